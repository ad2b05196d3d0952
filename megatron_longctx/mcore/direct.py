"""Megatron's plain GPT layers without the host work that only training and other kinds of layers need.

`DirectLayer` issues the same operations on the same parameters in the same order as `TransformerLayer`, `SelfAttention`
and `MLP` of Megatron-Core 0.16 and 0.19 in evaluation, so results are equal bit for bit. It omits their autograd
functions, contexts, module calls and views. For few tokens, that host work takes longer than the GPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from types import FunctionType
from typing import Protocol

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


@dataclass(frozen=True)
class LayerWeights:
    """The matrices and the sharded biases of a layer, as `torch.nn.functional.linear` takes them."""

    qkv: Tensor
    qkv_bias: Tensor | None
    projection: Tensor
    up: Tensor
    up_bias: Tensor | None
    down: Tensor

    @staticmethod
    def of(layer: TransformerLayer) -> LayerWeights:
        """Return this rank's own ones."""
        attention, mlp = layer.self_attention, layer.mlp
        qkv, up = attention.linear_qkv, mlp.linear_fc1
        return LayerWeights(
            qkv.weight, qkv.bias, attention.linear_proj.weight, up.weight, up.bias, mlp.linear_fc2.weight
        )


class Shares(Protocol):
    """How ranks that share a cache also share the weights. See `shared_weights.SharedWeights`."""

    kv_heads: int

    def mixed(self, own: Tensor) -> Tensor:
        """Return the queries, keys and values of all heads of the cache, from this rank's rows of their matrix."""

    def sum(self, linear: RowParallelLinear, out: Tensor, gathered: bool) -> Tensor:
        """Return the sum of products over the ranks that have the same tokens, in any memory."""


def why_not_direct(gpt: GPTModel, shared: bool = False) -> str | None:
    """Return None if `DirectLayer` supports every layer, else the reason in a few words.

    shared: whether the ranks that share a cache also share the weights.
    """
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
        if not shared and config.num_query_groups < layer.self_attention.world_size:
            return "tensor-parallel ranks share KV heads"
    return None


class DirectLayer:
    """One layer, in evaluation mode, of a model that `why_not_direct` accepts. Call it without gradients.

    Every call reads the parameters from `layer`, so they may change between calls.

    shares: of ranks that share the weights; None for tensor parallelism alone.
    """

    def __init__(self, layer: TransformerLayer, shares: Shares | None = None) -> None:
        attention, mlp, config = layer.self_attention, layer.mlp, layer.config
        self._layer, self._shares = layer, shares
        self._input_norm, self._mlp_norm = layer.input_layernorm, layer.pre_mlp_layernorm
        self._projection, self._down = attention.linear_proj, mlp.linear_fc2
        self._groups = attention.num_query_groups_per_partition if shares is None else shares.kv_heads
        self._head_dim = attention.hidden_size_per_attention_head
        self._up_rows = mlp.linear_fc1.output_size_per_partition
        self._fused, self._gated = config.bias_activation_fusion, config.gated_linear_unit
        self._activation = config.activation_func
        self._q_norm, self._k_norm = _norm(attention.q_layernorm), _norm(attention.k_layernorm)
        self._post_norms = [_norm(getattr(bda, "norm", None)) for bda in (layer.self_attn_bda, layer.mlp_bda)]

    def __call__(
        self, hidden: Tensor, rotation: Rotation | None, attend: AttentionFn, gathered: LayerWeights | None = None
    ) -> Tensor:
        """Run the layer on `[s, 1, h]`, and return the same shape.

        attend: called with rotated queries and keys.
        gathered: the weights of all ranks that share them, for tokens that only this rank has; None for its own.
        """
        attention_norm, mlp_norm = self._post_norms
        weights = LayerWeights.of(self._layer) if gathered is None else gathered
        is_whole = gathered is not None
        attended = self._attention(hidden, rotation, attend, weights, is_whole)
        attended = self._row_parallel(self._projection, weights.projection, attended, is_whole)
        hidden = attention_norm(attended).add_(hidden)
        del attended
        wide = self._activate(product(self._mlp_norm(hidden), weights.up), weights.up_bias)
        return mlp_norm(self._row_parallel(self._down, weights.down, wide, is_whole)).add_(hidden)

    def _attention(
        self, hidden: Tensor, rotation: Rotation | None, attend: AttentionFn, weights: LayerWeights, is_whole: bool
    ) -> Tensor:
        """Return `[s, 1, h d]`. A separate function, so that its intermediate tensors do not live through the MLP."""
        mixed = product(self._input_norm(hidden), weights.qkv)
        if weights.qkv_bias is not None:  # not in the product: Megatron's layers round before they add it
            mixed = mixed + weights.qkv_bias
        if self._shares is not None and not is_whole:
            mixed = self._shares.mixed(mixed)
        mixed = mixed.view(*mixed.shape[:2], self._groups, -1, self._head_dim)
        q, k, v = mixed.split_with_sizes((mixed.shape[3] - 2, 1, 1), 3)
        q, k = self._q_norm(q), self._k_norm(k)
        if rotation is not None:
            q, k = rotation.rotate_both(q, k)
        return attend(q.flatten(2, 3), k.squeeze(3), v.squeeze(3)).flatten(2)

    def _activate(self, wide: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the activation to the columns of one rank after another: gates and values of each are together."""
        if bias is not None and (bias.numel() != self._up_rows or not self._fused):
            wide, bias = wide + bias, None
        if self._fused:  # Megatron's own compiled functions, which it calls with two dimensions
            flat = wide.view(-1, self._up_rows)
            out: Tensor = swiglu(flat) if bias is None else bias_swiglu(flat, bias)
            return out.view(*wide.shape[:-1], -1)
        if not self._gated:
            return self._activation(wide)  # type: ignore[no-any-return]
        gate, value = wide.view(*wide.shape[:-1], -1, self._up_rows).chunk(2, -1)
        return (self._activation(gate) * value).flatten(-2)  # type: ignore[no-any-return]

    def _row_parallel(self, linear: RowParallelLinear, weight: Tensor, x: Tensor, is_whole: bool) -> Tensor:
        """Apply a row-parallel layer: the product, its sum over the ranks with the same tokens, and the bias."""
        out = product(x, weight)
        out = _sum(linear, out) if self._shares is None else self._shares.sum(linear, out, is_whole)
        return out if linear.bias is None else out + linear.bias


def _norm(norm: torch.nn.Module | None) -> Callable[[Tensor], Tensor]:
    """Return a norm, or instead of an absent one a function that is cheaper to call than a module."""
    return (lambda x: x) if norm is None or isinstance(norm, IdentityOp) else norm


def _sum(linear: RowParallelLinear, out: Tensor) -> Tensor:
    """Sum over the tensor-parallel ranks."""
    if isinstance(linear, ReducedRowParallelLinear):
        return linear.reducer.all_reduce(out, overwrite=True)
    if linear.tp_group.size() > 1:
        dist.all_reduce(out, group=linear.tp_group)
    return out
