"""Bamba: Mamba-2 in most layers, attention with partial RoPE in others, dense MLPs."""

from dataclasses import replace
from math import inf
from typing import Any

from ...config import ModelConfig
from .. import common
from ..common import ATTENTION, PUBLISHED_MLP
from ..family import Family
from ..fields import RESTORE, Fields, refuse_field
from ..weights import MAMBA, MAMBA_BIAS, MAMBA_CONVOLUTION, UNCHANGED, Form, Weight

_PUBLISHED = "model.layers.{layer}.mamba."
_NAMES = {
    PUBLISHED_MLP: "model.layers.{layer}.feed_forward.",
    "post_attention_layernorm": "pre_ff_layernorm",
    "model.norm.": "model.final_layernorm.",
}
# Keys of `ModelConfig`, and the fields that are required.
_SIZES = {
    "linear_num_key_heads": "mamba_n_groups",
    "linear_num_value_heads": "mamba_n_heads",
    "linear_key_head_dim": "mamba_d_state",
    "linear_conv_kernel_dim": "mamba_d_conv",
}


def _read(fields: Fields) -> dict[str, Any]:
    fields.require("num_key_value_heads")
    keys = common.read(fields, norm_epsilon=1e-5, partial_rotary=0.5)
    keys |= {key: fields.require(name) for key, name in _SIZES.items()}
    fields.expect("time_step_limit", [0.0, inf], (0.0, inf), [0.0, {"__float__": "Infinity"}])
    fields.ignore("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")
    inner, heads = fields.get("mamba_expand", 2) * keys["hidden_size"], keys["linear_num_value_heads"]
    size = fields.get("mamba_d_head", None)
    if size in (None, "auto"):
        size = inner // heads
    if size * heads != inner:
        expected = f"mamba_expand x hidden_size / mamba_n_heads = {inner} / {heads}"
        raise refuse_field("mamba_d_head", size, expected, RESTORE)
    attention, layers = fields.get("attn_layer_indices", []), range(keys["num_layers"])
    if any(each not in layers for each in attention) or all(layer in attention for layer in layers):
        expected = f"numbers below num_hidden_layers={keys['num_layers']}, but not all of them"
        raise refuse_field("attn_layer_indices", attention, expected, RESTORE)
    if keys["rotary_percent"] != 0.5:
        raise refuse_field("partial_rotary_factor", keys["rotary_percent"], "0.5", "`transformers` reads no other.")
    pattern = common.repeated(["*-" if layer in attention else "M-" for layer in layers])
    return keys | {"linear_value_head_dim": size, "pattern": pattern}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        **common.write(model),
        **{name: getattr(model, key) for key, name in _SIZES.items()},
        "mamba_d_head": model.linear_value_head_dim,
        "mamba_expand": model.recurrent_columns[1] // model.hidden_size,
        "attn_layer_indices": [layer for layer, recurrent in enumerate(model.recurrent_layers) if not recurrent],
        "partial_rotary_factor": model.rotary_percent,
    }


def _weights(model: ModelConfig) -> list[Weight]:
    plain = []
    for each in common.decoder_weights(model):
        published = each.published
        for name, its in _NAMES.items():
            published = tuple(x.replace(name, its) for x in published)
        plain.append(replace(each, published=published))
    heads = ("delta_heads",)
    mamba: dict[str, tuple[str, tuple[str, ...], Form]] = {
        "linear_qkv.weight": ("in_proj.weight", ("delta_rows", "hidden"), MAMBA),
        "linear_proj.weight": ("out_proj.weight", ("hidden", "delta_values"), UNCHANGED),
        "conv_weight": ("conv1d.weight", ("delta_mixed", "delta_taps"), MAMBA_CONVOLUTION),
        "conv_bias": ("conv1d.bias", ("delta_mixed",), MAMBA_BIAS),
        "decay_log": ("A_log", heads, UNCHANGED),
        "decay_bias": ("dt_bias", heads, UNCHANGED),
        "skip": ("D", heads, UNCHANGED),
        "norm_weight": ("norm.weight", ("delta_values",), UNCHANGED),
    }
    own = [Weight(f"{ATTENTION}{name}", (f"{_PUBLISHED}{x}",), shape, form) for name, (x, shape, form) in mamba.items()]
    return common.beside_recurrent(plain, own)


FAMILY = Family(
    "bamba", ("BambaForCausalLM",), _read, _write, _weights,
    constants={"attention_bias": False, "mlp_bias": False, "mamba_conv_bias": True, "mamba_proj_bias": False},
)  # fmt: skip
