"""Megatron's plain GPT layers without what only training, other layers and other schedules need.

The same operations on the same parameters in the same order as `TransformerLayer`, `SelfAttention` and `MLP` of
Megatron-Core 0.16 and 0.19 issue in evaluation, so results are equal bit for bit. What is left out is their host work,
which at few tokens takes longer than the GPU does: autograd functions, contexts, module calls, and views.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu, swiglu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import functional

from .norms import LayerNorm, PostNormAdd, RMSNorm
from .rope import Rotation
from .row_parallel import ReducedRowParallelLinear

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries `[s, 1, h, d]`, keys and values `[s, 1, g, d]` to `[s, 1, h, d]`."""

_PLAIN_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("fp32_residual_connection", False),
    ("fp8", None),
    ("fp4", None),
    ("sequence_parallel", False),
    ("attention_output_gate", False),
    ("inference_fuse_tp_communication", False),
    ("use_te_activation_func", False),
    ("activation_func_clamp_value", None),
    ("glu_linear_offset", 0.0),
    ("no_rope_freq", None),
    ("test_mode", False),
)
"""What must be so: other values change what a layer computes."""


def why_not_direct(gpt: GPTModel) -> str | None:
    """None if every layer is one that `DirectLayer` computes, else what is not, in a few words."""
    config = gpt.config
    for key, plain in _PLAIN_SETTINGS:
        if getattr(config, key) != plain:
            return f"{key} is {getattr(config, key)}"
    if config.bias_activation_fusion and not (config.gated_linear_unit and config.activation_func == functional.silu):
        return "a fused activation is not SwiGLU"
    for number, layer in enumerate(gpt.decoder.layers):
        for name, kinds in (
            ("", (TransformerLayer,)),
            ("pre_cross_attn_layernorm", (IdentityOp,)),
            ("cross_attention", (IdentityOp,)),
            ("self_attention", (SelfAttention,)),
            ("self_attn_bda", (FunctionType, PostNormAdd)),
            ("self_attention.q_layernorm", (IdentityOp, RMSNorm, LayerNorm, type(None))),
            ("self_attention.k_layernorm", (IdentityOp, RMSNorm, LayerNorm, type(None))),
            ("self_attention.linear_qkv", (ColumnParallelLinear,)),
            ("self_attention.linear_proj", (RowParallelLinear, ReducedRowParallelLinear)),
            ("mlp_bda", (FunctionType, PostNormAdd)),
            ("mlp", (MLP,)),
            ("mlp.linear_fc1", (ColumnParallelLinear,)),
            ("mlp.linear_fc2", (RowParallelLinear, ReducedRowParallelLinear)),
        ):
            part = layer
            for word in name.split(".") if name else ():
                part = getattr(part, word)
            if type(part) not in kinds:
                return f"layer {number}'s {name or 'class'} is {type(part).__name__}"
        if config.num_query_groups < layer.self_attention.world_size:
            return "tensor-parallel ranks share KV heads"
    return None


class DirectLayer:
    """One layer of a model in evaluation mode that `why_not_direct` accepts. Call it without gradients.

    Parameters are read from `layer` in every call, so they may change in between.
    """

    def __init__(self, layer: TransformerLayer) -> None:
        attention, mlp, config = layer.self_attention, layer.mlp, layer.config
        self._input_norm, self._mlp_norm = layer.input_layernorm, layer.pre_mlp_layernorm
        self._qkv, self._projection = attention.linear_qkv, attention.linear_proj
        self._up, self._down = mlp.linear_fc1, mlp.linear_fc2
        self._groups = attention.num_query_groups_per_partition
        self._queries = attention.num_attention_heads_per_partition // self._groups  # of a group
        self._fused, self._gated = config.bias_activation_fusion, config.gated_linear_unit
        self._activation = config.activation_func
        self._q_norm, self._k_norm = _norm(attention.q_layernorm), _norm(attention.k_layernorm)
        self._norms_behind = [_norm(getattr(bda, "norm", None)) for bda in (layer.self_attn_bda, layer.mlp_bda)]

    def __call__(self, hidden: Tensor, rotation: Rotation | None, attend: Attend) -> Tensor:
        """`[s, 1, h]` to the same; `attend` gets rotated queries and keys."""
        behind_attention, behind_mlp = self._norms_behind
        attended = _row_parallel(self._projection, self._attended(hidden, rotation, attend))
        hidden = behind_attention(attended).add_(hidden)
        del attended
        wide = functional.linear(self._mlp_norm(hidden), self._up.weight)
        wide = self._activated(wide)
        return behind_mlp(_row_parallel(self._down, wide)).add_(hidden)

    def _attended(self, hidden: Tensor, rotation: Rotation | None, attend: Attend) -> Tensor:
        """`[s, 1, h d]`. What is made on the way ends here, not with the layer."""
        mixed = _times(self._input_norm(hidden), self._qkv.weight, self._qkv.bias)
        mixed = mixed.view(*mixed.shape[:2], self._groups, self._queries + 2, -1)
        q, k, v = mixed.split_with_sizes((self._queries, 1, 1), 3)
        q, k = self._q_norm(q), self._k_norm(k)
        if rotation is not None:
            q, k = rotation.of_both(q, k)
        return attend(q.flatten(2, 3), k.squeeze(3), v.squeeze(3)).flatten(2)

    def _activated(self, wide: Tensor) -> Tensor:
        bias = self._up.bias
        if self._fused:  # Megatron's own compiled functions, which it calls with two dimensions
            flat = wide.view(-1, wide.shape[-1])
            out: Tensor = swiglu(flat) if bias is None else bias_swiglu(flat, bias)
            return out.view(*wide.shape[:-1], -1)
        if bias is not None:
            wide = wide + bias
        if not self._gated:
            return self._activation(wide)  # type: ignore[no-any-return]
        gate, value = wide.chunk(2, -1)
        return self._activation(gate) * value  # type: ignore[no-any-return]


def _norm(norm: torch.nn.Module | None) -> Callable[[Tensor], Tensor]:
    """What it does, without a call of what does nothing."""
    return _as_it_is if norm is None or isinstance(norm, IdentityOp) else norm


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _times(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As Megatron's layers: the product is rounded before the bias is added."""
    out = functional.linear(x, weight)
    return out if bias is None else out + bias


def _row_parallel(linear: RowParallelLinear, x: Tensor) -> Tensor:
    """Summed over the tensor-parallel ranks, with the layer's bias."""
    out = functional.linear(x, linear.weight)
    if isinstance(linear, ReducedRowParallelLinear):
        out = linear.sum_of(out)
    elif linear.tp_group.size() > 1:
        dist.all_reduce(out, group=linear.tp_group)
    return out if linear.bias is None else out + linear.bias
