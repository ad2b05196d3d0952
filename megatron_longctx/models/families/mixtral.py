"""Mixtral: Mistral's form, where every MLP is a mixture of experts."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from ..experts import of_each, read_experts, with_experts, write_experts
from ..family import Family, Weight
from ..fields import Fields
from ..forms import EXPERTS, EXPERTS_GATE_UP
from ..rope import read_rope, write_rope
from ..windows import SLIDING, read_windows, sliding_window
from .llama import common_weights, read_common, write_common

_BLOCK = "model.layers.{layer}.block_sparse_moe."
_EXPERT = f"{_BLOCK}experts.{{expert}}."


def _read(given: Fields) -> dict[str, Any]:
    given.only("router_jitter_noise", 0.0)
    common = read_common(given, norm_epsilon=1e-5)
    width = given.take("sliding_window", None, int)
    windows = read_windows(width, [] if width is None else [SLIDING] * common["num_layers"])
    experts = read_experts(given, given.need("num_local_experts"))
    return {**common, **read_rope(given, default_base=1e6), **windows, **experts}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_common(model),
        **write_rope(model),
        **write_experts(model),
        "num_local_experts": model.num_moe_experts,
        "sliding_window": sliding_window(model),
    }


def _weights(model: ModelConfig) -> list[Weight]:
    first = of_each(model, f"{_EXPERT}w1.weight", f"{_EXPERT}w3.weight")
    second = of_each(model, f"{_EXPERT}w2.weight")
    return with_experts(common_weights(model), f"{_BLOCK}gate.", (first, EXPERTS_GATE_UP), (second, EXPERTS))


FAMILY = Family("mixtral", ("MixtralForCausalLM",), _read, _write, _weights)
