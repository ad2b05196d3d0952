"""Qwen3-Next: gated delta nets in most layers, attention with gates and partial RoPE in others, experts, one shared."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...config import RECURRENT_KEYS, ModelConfig
from .. import common
from ..common import ATTENTION, FULL, MLP, PUBLISHED_MLP
from ..family import Family
from ..fields import RESTORE, Fields, refuse_field
from ..weights import DELTA, DELTA_CONVOLUTION, GATE_UP, GATED_QKV, Form, Weight
from . import qwen3_moe

_LINEAR = "linear_attention"
_PUBLISHED = "model.layers.{layer}.linear_attn."
_OF_EXPERTS = {"num_layers", "num_moe_experts", "moe_layer_freq"}
_QKV = f"{ATTENTION}linear_qkv."


def read(fields: Fields, width: str = "intermediate_size") -> dict[str, Any]:
    """Read the fields of a model with experts. width: see `common.read`."""
    common.require_head_sizes(fields)
    keys = common.read(fields, partial_rotary=0.25, width=width)
    keys |= qwen3_moe.read_experts(fields, keys["num_layers"], norm_topk_prob=True)
    keys["moe_shared_expert_intermediate_size"] = fields.require("shared_expert_intermediate_size")
    return keys | read_mixers(fields, keys)


def read_mixers(fields: Fields, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Read the sizes of gated delta nets, and which layers have them. keys: the model's others."""
    sizes = {key: fields.require(key) for key in RECURRENT_KEYS}
    recurrent = _read_layers(fields, keys["num_layers"])
    if not any(recurrent):
        raise refuse_field("layer_types", FULL, f"a layer of {_LINEAR}", "Such models are not known to be published.")
    of_experts = ModelConfig(**{key: keys[key] for key in _OF_EXPERTS & keys.keys()})
    pairs = ["*G"[mixer] + "-E"[mlp] for mixer, mlp in zip(recurrent, of_experts.expert_layers, strict=True)]
    return sizes | {"pattern": common.repeated(pairs)}


def _read_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Return for every layer whether it is recurrent."""
    interval = fields.get("full_attention_interval", 4)
    if interval < 1:
        raise refuse_field("full_attention_interval", interval, "at least 1", RESTORE)
    types = fields.get("layer_types", [_LINEAR if number % interval else FULL for number in range(1, num_layers + 1)])
    if len(types) != num_layers or any(each not in (_LINEAR, FULL) for each in types):
        expected = f"{num_layers} of {_LINEAR} and {FULL}, as num_hidden_layers"
        raise refuse_field("layer_types", types, expected, RESTORE)
    return [each == _LINEAR for each in types]


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that `read` reads."""
    shared = {"shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size}
    return {**qwen3_moe.write(model), **shared, **write_mixers(model)}


def write_mixers(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that `read_mixers` reads, and the share of heads that RoPE rotates."""
    return {
        **{key: getattr(model, key) for key in RECURRENT_KEYS},
        "layer_types": [_LINEAR if recurrent else FULL for recurrent in model.recurrent_layers],
        "partial_rotary_factor": model.rotary_percent,
    }


def weights(model: ModelConfig, projections: Sequence[str], form: Form) -> list[Weight]:
    """Return the weights of a model with experts. projections, form: as for `with_mixers`."""
    return with_mixers([*qwen3_moe.weights(model), *_shared_expert_weights()], projections, form)


def with_mixers(plain: Sequence[Weight], projections: Sequence[str], form: Form) -> list[Weight]:
    """Return the weights of a model with gated delta nets, and with output gates of attention.

    Args:
        plain: of the same model with plain attention in all layers.
        projections, form: the published names of the delta net's input projections, and their form.
    """
    gated = [replace(each, form=GATED_QKV) if each.name == f"{_QKV}weight" else each for each in plain]
    published = tuple(f"{_PUBLISHED}{name}.weight" for name in projections)
    convolution, shape = (f"{_PUBLISHED}conv1d.weight",), ("delta_mixed", "delta_taps")
    delta_net = [
        Weight(f"{_QKV}weight", published, ("delta_rows", "hidden"), form),
        Weight(f"{ATTENTION}linear_proj.weight", (f"{_PUBLISHED}out_proj.weight",), ("hidden", "delta_values")),
        Weight(f"{ATTENTION}conv_weight", convolution, shape, DELTA_CONVOLUTION),
        Weight(f"{ATTENTION}decay_log", (f"{_PUBLISHED}A_log",), ("delta_heads",)),
        Weight(f"{ATTENTION}decay_bias", (f"{_PUBLISHED}dt_bias",), ("delta_heads",)),
        Weight(f"{ATTENTION}norm_weight", (f"{_PUBLISHED}norm.weight",), ("delta_value",)),
    ]
    return common.beside_recurrent(gated, delta_net)


def _shared_expert_weights() -> list[Weight]:
    own, published = f"{MLP}shared_experts.", f"{PUBLISHED_MLP}shared_expert"
    gate_up = (f"{published}.gate_proj.weight", f"{published}.up_proj.weight")
    weights = [
        Weight(f"{own}linear_fc1.weight", gate_up, ("shared_gate_up", "hidden"), GATE_UP),
        Weight(f"{own}linear_fc2.weight", (f"{published}.down_proj.weight",), ("hidden", "shared_ffn")),
        Weight(f"{own}gate_weight", (f"{published}_gate.weight",), ("one", "hidden")),
    ]
    return [replace(each, in_expert_layers=True) for each in weights]


KEYS = {"qk_norm": True, "zero_centered_norms": True, "attention_output_gate": True}
FAMILY = Family(
    "qwen3_next", ("Qwen3NextForCausalLM",), read, write,
    partial(weights, projections=("in_proj_qkvz", "in_proj_ba"), form=DELTA),
    constants={"attention_bias": False}, keys=KEYS | {"moe_shared_expert_gate": True}, dropped=("mtp.",),
)  # fmt: skip
