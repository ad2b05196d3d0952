"""Megatron's plain GPT layers without the host work that only training and other kinds of layers need.

`DirectLayer` issues the same operations on the same parameters in the same order as `TransformerLayer`, `SelfAttention`
and `MLP` of Megatron-Core 0.16 and 0.19 in evaluation, so results are equal bit for bit. It omits their autograd
functions, contexts, module calls and views. For few tokens, that host work takes longer than the GPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import FunctionType

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

from ..inference.fp8 import product
from .norms import LayerNorm, PostNormAdd, RMSNorm
from .rope import Rotation, checking_rope
from .row_parallel import ReducedRowParallelLinear

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of queries `[s, 1, h, d]`, and keys and values `[s, 1, g, d]`, that returns `[s, 1, h, d]`."""

_FALSE = (
    *("fp32_residual_connection", "sequence_parallel", "attention_output_gate", "inference_fuse_tp_communication"),
    *("use_te_activation_func", "test_mode"),
)
_NONE = ("fp8", "fp4", "activation_func_clamp_value", "no_rope_freq")
_PLAIN_SETTINGS = dict.fromkeys(_FALSE, False) | dict.fromkeys(_NONE) | {"glu_linear_offset": 0.0}
"""Required settings: with other values a layer computes something else."""


def why_not_direct(gpt: GPTModel) -> str | None:
    """Return None if `DirectLayer` supports every layer, else the reason in a few words."""
    config = gpt.config
    for key, plain in _PLAIN_SETTINGS.items():
        if getattr(config, key) != plain:
            return f"{key} is {getattr(config, key)}"
    if config.bias_activation_fusion and not (config.gated_linear_unit and config.activation_func == functional.silu):
        return "a fused activation is not SwiGLU"
    for number, layer in enumerate(gpt.decoder.layers):
        for name, kinds in (
            ("", (TransformerLayer,)),
            ("pre_cross_attn_layernorm", (IdentityOp,)),
            ("cross_attention", (IdentityOp,)),
            ("self_attention", (SelfAttention, checking_rope(SelfAttention))),
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
            part = attrgetter(name)(layer) if name else layer
            if type(part) not in kinds:
                return f"layer {number}'s {name or 'class'} is {type(part).__name__}"
        if config.num_query_groups < layer.self_attention.world_size:
            return "tensor-parallel ranks share KV heads"
    return None


class DirectLayer:
    """One layer, in evaluation mode, of a model that `why_not_direct` accepts. Call it without gradients.

    Every call reads the parameters from `layer`, so they may change between calls.
    """

    def __init__(self, layer: TransformerLayer) -> None:
        attention, mlp, config = layer.self_attention, layer.mlp, layer.config
        self._input_norm, self._mlp_norm = layer.input_layernorm, layer.pre_mlp_layernorm
        self._qkv, self._projection = attention.linear_qkv, attention.linear_proj
        self._up, self._down = mlp.linear_fc1, mlp.linear_fc2
        self._groups = attention.num_query_groups_per_partition
        self._queries_per_group = attention.num_attention_heads_per_partition // self._groups
        self._fused, self._gated = config.bias_activation_fusion, config.gated_linear_unit
        self._activation = config.activation_func
        self._q_norm, self._k_norm = _norm(attention.q_layernorm), _norm(attention.k_layernorm)
        self._post_norms = [_norm(getattr(bda, "norm", None)) for bda in (layer.self_attn_bda, layer.mlp_bda)]

    def __call__(self, hidden: Tensor, rotation: Rotation | None, attend: AttentionFn) -> Tensor:
        """Run the layer on `[s, 1, h]`, and return the same shape.

        Args:
            attend: called with rotated queries and keys.
        """
        attention_norm, mlp_norm = self._post_norms
        attended = _row_parallel(self._projection, self._attention(hidden, rotation, attend))
        hidden = attention_norm(attended).add_(hidden)
        del attended
        wide = product(self._mlp_norm(hidden), self._up.weight)
        wide = self._activate(wide)
        return mlp_norm(_row_parallel(self._down, wide)).add_(hidden)

    def _attention(self, hidden: Tensor, rotation: Rotation | None, attend: AttentionFn) -> Tensor:
        """Return `[s, 1, h d]`. A separate function, so that its intermediate tensors do not live through the MLP."""
        mixed = product(self._input_norm(hidden), self._qkv.weight)
        if self._qkv.bias is not None:  # not in the product: Megatron's layers round before they add it
            mixed = mixed + self._qkv.bias
        mixed = mixed.view(*mixed.shape[:2], self._groups, self._queries_per_group + 2, -1)
        q, k, v = mixed.split_with_sizes((self._queries_per_group, 1, 1), 3)
        q, k = self._q_norm(q), self._k_norm(k)
        if rotation is not None:
            q, k = rotation.rotate_both(q, k)
        return attend(q.flatten(2, 3), k.squeeze(3), v.squeeze(3)).flatten(2)

    def _activate(self, wide: Tensor) -> Tensor:
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
    """Return a norm, or instead of an absent one a function that is cheaper to call than a module."""
    return (lambda x: x) if norm is None or isinstance(norm, IdentityOp) else norm


def _row_parallel(linear: RowParallelLinear, x: Tensor) -> Tensor:
    """Apply a row-parallel layer: the product, its sum over the tensor-parallel ranks, and the bias."""
    out = product(x, linear.weight)
    if isinstance(linear, ReducedRowParallelLinear):
        out = linear.reducer.all_reduce(out, overwrite=True)
    elif linear.tp_group.size() > 1:
        dist.all_reduce(out, group=linear.tp_group)
    return out if linear.bias is None else out + linear.bias
