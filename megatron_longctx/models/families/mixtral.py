"""Mixtral: Mistral's form, with a mixture of experts in every layer."""

from typing import Any

from ...config import ModelConfig
from .. import common
from ..family import Family
from ..fields import Fields
from ..weights import Weight


def _read(fields: Fields) -> dict[str, Any]:
    fields.expect("router_jitter_noise", 0.0)
    fields.require("num_key_value_heads")
    keys = common.read(fields, norm_epsilon=1e-5, rope_base=1e6)
    window = common.read_one_window(fields.get("sliding_window", None, int), keys["num_layers"])
    return keys | window | common.read_experts(fields, fields.require("num_local_experts"))


def _write(model: ModelConfig) -> dict[str, Any]:
    own = {"num_local_experts": model.num_moe_experts, "sliding_window": common.sliding_window(model)}
    return common.write(model) | common.write_experts(model) | own


def _weights(model: ModelConfig) -> list[Weight]:
    block = "model.layers.{layer}.block_sparse_moe."
    experts = (f"{block}experts.{{expert}}.{name}.weight" for name in ("w1", "w3", "w2"))
    return common.with_separate_experts(model, f"{block}gate.", *experts)


FAMILY = Family("mixtral", ("MixtralForCausalLM",), _read, _write, _weights)
