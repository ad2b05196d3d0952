"""The text models of Gemma 3: four norms a layer, windows with a RoPE of their own, scaled embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...config import ModelConfig
from ..experts import MLP
from ..family import Family, Weight
from ..fields import Fields, refused
from ..rope import read_scaling, write_scaling
from ..windows import FULL, SLIDING, layer_types, read_windows, sliding_window
from .llama import common_weights, read_common, write_common
from .qwen3 import qk_norms

_BASES = {FULL: 1_000_000.0, SLIDING: 10_000.0}
_BASE_FIELDS = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
_NORMS = "model.layers.{layer}.%s_layernorm.weight"
_FUNCTION = {
    "activation": "geglu",
    "zero_centered_norms": True,
    "qk_norm": True,
    "post_norms": True,
    "scale_embedding": True,
}


def _read(given: Fields) -> dict[str, Any]:
    given.only("hidden_activation", "gelu_pytorch_tanh")
    given.only("attention_bias", False)
    given.only("partial_rotary_factor", 1.0)
    given.only("use_bidirectional_attention", False)
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        given.only(name, None, remedy="Soft-capping is not served.")
    for name in ("head_dim", "num_key_value_heads"):  # defaults of `transformers` are those of one size
        given.need(name)
    tied = given.take("tie_word_embeddings", True)
    common = read_common(given)
    scalar = given.take("query_pre_attn_scalar", 256, float)
    if scalar <= 0:
        raise refused("query_pre_attn_scalar", scalar, "a number above 0", "Restore the model's config.json.")
    usual = scalar == (common["head_dim"] or common["hidden_size"] // common["num_attention_heads"])
    return {
        **common,
        **_FUNCTION,
        "tie_embeddings": tied,
        "attention_scale": None if usual else scalar**-0.5,
        **_read_layers(given, common["num_layers"]),
    }


def _read_layers(given: Fields, num_layers: int) -> dict[str, Any]:
    """Windows and RoPE."""
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    pattern = next((found for name in names if (found := given.take(name, None, int))), 6)
    types = given.take("layer_types", [SLIDING if number % pattern else FULL for number in range(1, num_layers + 1)])
    if len(types) != num_layers:
        raise refused("layer_types", types, f"{num_layers}, as num_hidden_layers", "Restore the model's config.json.")
    width = given.take("sliding_window", None if given.has("sliding_window") else 4096, int)
    windows = read_windows(width, types)
    bases, scalings = {}, {}
    said = given.take("rope_parameters", {})
    for name in said:
        if name not in (FULL, SLIDING):
            raise refused(f"rope_parameters.{name}", said[name], f"{FULL} and {SLIDING}", "Say it for each of these.")
    for kind, field in _BASE_FIELDS.items():
        inner = dict(said.get(kind) or {})
        if kind == FULL:
            inner |= given.take("rope_scaling", {})  # of the models' first files
        base = given.take(field, _BASES[kind], float)
        bases[kind] = inner.pop("rope_theta", base)
        lengths = None, given.need("max_position_embeddings")
        scalings[kind] = read_scaling(inner, lengths, f"rope_parameters.{kind}")
    if scalings[SLIDING].kind != "none":
        raise refused(f"rope_parameters.{SLIDING}", said[SLIDING], "rope_type default", "Only full layers are scaled.")
    return {
        **windows,
        "position_embedding": "rope",
        "rope_base": bases[FULL],
        "rope_scaling": scalings[FULL],
        "window_rope_base": None if windows["window"] is None else bases[SLIDING],
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    common = write_common(model)
    del common["hidden_act"]
    scalar = model.kv_channels if model.attention_scale is None else round(model.attention_scale**-2)
    return {
        **common,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scalar,
        "sliding_window": sliding_window(model),
        "layer_types": layer_types(model),
        "rope_theta": model.rope_base,
        "rope_local_base_freq": model.window_rope_base or model.rope_base,
        "rope_scaling": write_scaling(model.rope_scaling),
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    }


def _weights(model: ModelConfig) -> list[Weight]:
    before_mlp = f"{MLP}linear_fc1.layer_norm_weight"
    common = [
        replace(weight, theirs=(_NORMS % "pre_feedforward",)) if weight.ours == before_mlp else weight
        for weight in common_weights(model)
    ]
    behind = [
        Weight(f"decoder.layers.{{layer}}.{ours}.norm.weight", (_NORMS % theirs,), ("hidden",))
        for ours, theirs in (("self_attn_bda", "post_attention"), ("mlp_bda", "post_feedforward"))
    ]
    return [*common, *behind, *qk_norms()]


FAMILY = Family("gemma3_text", ("Gemma3ForCausalLM",), _read, _write, _weights)
