"""The text models of Gemma 3: four norms per layer, windows with their own RoPE, scaled embeddings."""

from dataclasses import replace
from typing import Any

from ...config import ModelConfig
from .. import common
from ..common import FULL, MLP, SLIDING
from ..family import Family
from ..fields import RESTORE, Fields, refuse_field
from ..rope_frequencies import read_scaling
from ..weights import Weight

_BASES = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}
_SAME = "Set both to the same value, or delete one."
_NORM = "model.layers.{layer}.%s_layernorm.weight"


def _read(fields: Fields) -> dict[str, Any]:
    fields.expect("partial_rotary_factor", 1.0)
    fields.expect("use_bidirectional_attention", False)
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        fields.expect(name, None, remedy="Soft-capping is not supported.")
    common.require_head_sizes(fields)
    tied = fields.get("tie_word_embeddings", True)
    keys = common.read_shape(fields)
    scalar = fields.get("query_pre_attn_scalar", 256, float)
    if scalar <= 0:
        raise refuse_field("query_pre_attn_scalar", scalar, "a number above 0", RESTORE)
    usual = scalar == (keys["head_dim"] or keys["hidden_size"] // keys["num_attention_heads"])
    scale = None if usual else scalar**-0.5
    return keys | {"tie_embeddings": tied, "attention_scale": scale, **_read_layers(fields, keys["num_layers"])}


def _read_layers(fields: Fields, num_layers: int) -> dict[str, Any]:
    """Read windows and RoPE."""
    pattern = fields.get("sliding_window_pattern", None, int) or fields.get("_sliding_window_pattern", 6)
    fields.expect("_sliding_window_pattern", pattern, remedy=_SAME)  # `transformers` 5 writes both names
    types = fields.get("layer_types", [SLIDING if number % pattern else FULL for number in range(1, num_layers + 1)])
    width = fields.get("sliding_window", None if "sliding_window" in fields else 4096, int)
    windows = common.read_windows(width, types, num_layers)
    parameters = fields.get("rope_parameters", {})
    for name, given in parameters.items():
        if name not in (FULL, SLIDING) or not isinstance(given, dict | None):
            expected, remedy = f"objects {FULL} and {SLIDING}", "Give parameters for each of these."
            raise refuse_field(f"rope_parameters.{name}", given, expected, remedy)
    bases, scalings = {}, {}
    for kind, (field, default) in _BASES.items():
        inner = dict(parameters.get(kind) or {})
        if kind == FULL:
            scaling = fields.get("rope_scaling", {})  # in the first files of these models
            if any(inner.get(key, value) != value for key, value in scaling.items()):
                raise refuse_field("rope_scaling", scaling, f"the values of rope_parameters, {inner}", _SAME)
            inner |= scaling
        bases[kind] = inner.pop("rope_theta", None)
        if bases[kind] is None:
            bases[kind] = fields.get(field, default, float)
        fields.expect(field, bases[kind], remedy=_SAME)
        lengths = None, fields.require("max_position_embeddings")
        scalings[kind] = read_scaling(inner, lengths, f"rope_parameters.{kind}")
    if scalings[SLIDING].kind != "none":
        expected, remedy = "rope_type default", "Only full layers are scaled."
        raise refuse_field(f"rope_parameters.{SLIDING}", parameters[SLIDING], expected, remedy)
    return {
        **windows,
        "position_embedding": "rope",
        "rope_base": bases[FULL],
        "rope_scaling": scalings[FULL],
        "window_rope_base": None if windows["window"] is None else bases[SLIDING],
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    fields = common.write(model)
    del fields["hidden_act"]
    scalar = model.kv_channels if model.attention_scale is None else round(model.attention_scale**-2)
    return {
        **fields,
        "query_pre_attn_scalar": scalar,
        "sliding_window": common.sliding_window(model),
        "layer_types": common.layer_types(model),
        "rope_local_base_freq": model.window_rope_base or model.rope_base,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    }


def _weights(model: ModelConfig) -> list[Weight]:
    before_mlp = f"{MLP}linear_fc1.layer_norm_weight"
    weights = [
        replace(weight, published=(_NORM % "pre_feedforward",)) if weight.name == before_mlp else weight
        for weight in common.decoder_weights(model)
    ]
    post_norms = [
        Weight(f"decoder.layers.{{layer}}.{name}.norm.weight", (_NORM % published,), ("hidden",))
        for name, published in (("self_attn_bda", "post_attention"), ("mlp_bda", "post_feedforward"))
    ]
    return [*weights, *post_norms, *common.qk_norms()]


FAMILY = Family(
    "gemma3_text", ("Gemma3ForCausalLM",), _read, _write, _weights,
    constants={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
    keys={"activation": "geglu", "zero_centered_norms": True, "scale_embedding": True,
          "qk_norm": True, "post_norms": True},
)  # fmt: skip
