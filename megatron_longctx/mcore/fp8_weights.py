"""FP8 weights of a model's layers for inference. Embedding, head, norms, biases and routers keep their dtype."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from ..config import Config
from ..core.errors import refuse
from ..inference.fp8 import MULTIPLE, Fp8Weight

_LEAST_CAPABILITY = (8, 9)


def check_fp8(config: Config) -> None:
    """Refuse `inference.weights=fp8` for layers that it does not support; `load_model` makes `auto` local ones.

    Raises:
        ValueError: another kind of layer, or sizes of a rank that 16 does not divide.
    """
    model, tensor = config.model, config.parallelism.tensor_parallel_size
    if config.inference.weights != "fp8":
        return
    if model.implementation == "transformer_engine":
        remedy = "FP8 weights are those of Megatron's local layers: set it to local or auto."
        raise refuse("model.implementation", model.implementation, "local with inference.weights=fp8", remedy)
    heads, groups = model.num_attention_heads // tensor, max(1, model.num_kv_heads // tensor)
    sizes = {
        "model.hidden_size": model.hidden_size,
        "a rank's share of queries, keys and values": (heads + 2 * groups) * model.kv_channels,
        "a rank's share of attention's output": heads * model.kv_channels,
    }
    experts = model.num_moe_experts is not None
    if not (experts and all(model.expert_layers)):
        sizes["a rank's share of model.ffn_hidden_size"] = model.ffn_hidden_size // tensor
    if experts:
        sizes["a rank's share of an expert"] = model.expert_width // (1 if model.bias else tensor)
    for name, size in sizes.items():
        if size % MULTIPLE:
            expected = f"exact, because {name} is {size}, no multiple of {MULTIPLE}"
            raise refuse("inference.weights", "fp8", expected, "Set it to exact, or use fewer tensor-parallel ranks.")


def quantize_layers(gpt: GPTModel) -> None:
    """Replace the weights of all products in the model's layers by FP8 ones. It can no longer train or be saved.

    Raises:
        ValueError: a GPU without FP8, or a layer with weights of another kind.
    """
    device = next(gpt.parameters()).device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        expected = f"exact on {torch.cuda.get_device_name(device)}, which has no FP8"
        raise refuse("inference.weights", "fp8", expected, "Set it to exact.")
    for linear in gpt.decoder.layers.modules():
        if isinstance(linear, (ColumnParallelLinear, RowParallelLinear)):
            weight = Fp8Weight.of(linear.weight)
            del linear.weight  # a parameter, whose memory is free before the next weight is quantized
            linear.weight = weight
            linear._forward_impl = _apply
    for name, parameter in gpt.decoder.layers.named_parameters():
        if parameter.ndim > 1 and ".router." not in name:
            expected = f"exact for a model with {name}, which is not a weight of a parallel layer"
            raise refuse("inference.weights", "fp8", expected, "Set it to exact.")


def _apply(input: Tensor, weight: Fp8Weight, bias: Tensor | None, **_: Any) -> Tensor:
    """Do what Megatron's functions of linear layers do, which are called with these names."""
    out = weight(input)
    return out if bias is None else out + bias


def stored_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's weights, quantized or not."""
    weights = [getattr(each, "weight", None) for each in model.modules()]
    quantized = sum(each.values.nbytes + each.scales.nbytes for each in weights if isinstance(each, Fp8Weight))
    return quantized + sum(each.nbytes for each in model.parameters())
