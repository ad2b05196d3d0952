"""Llama 2, 3 and models of the same form: SmolLM2, TinyLlama, Yi and others."""

from typing import Any

from ...config import ModelConfig
from .. import common
from ..common import MLP, PUBLISHED_MLP
from ..family import Family
from ..fields import Fields, refuse_field
from ..weights import GATE_UP, Weight


def _read(fields: Fields) -> dict[str, Any]:
    attention, mlp = fields.get("attention_bias", False), fields.get("mlp_bias", False)
    if attention != mlp:
        raise refuse_field("attention_bias", attention, f"{mlp}, as mlp_bias", "Only both, or neither, are supported.")
    return common.read(fields) | {"bias": attention}


def _write(model: ModelConfig) -> dict[str, Any]:
    return common.write(model) | {"attention_bias": model.bias, "mlp_bias": model.bias}


def _weights(model: ModelConfig) -> list[Weight]:
    weights = common.decoder_weights(model)
    if model.bias:
        gate_up = (f"{PUBLISHED_MLP}gate_proj.bias", f"{PUBLISHED_MLP}up_proj.bias")
        weights += [
            common.qkv_bias(),
            common.output_bias(),
            Weight(f"{MLP}linear_fc1.bias", gate_up, ("gate_up",), GATE_UP),
            Weight(f"{MLP}linear_fc2.bias", (f"{PUBLISHED_MLP}down_proj.bias",), ("hidden",)),
        ]
    return weights


FAMILY = Family("llama", ("LlamaForCausalLM",), _read, _write, _weights, constants={"pretraining_tp": 1})
