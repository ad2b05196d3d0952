"""Megatron's plain GPT layers without the host work that only training and other kinds of layers need.

`DirectLayer` issues the same operations on the same parameters in the same order as `TransformerLayer`, `SelfAttention`
and `MLP` of Megatron-Core 0.16 and 0.19 in evaluation, so results are equal bit for bit. It omits their autograd
functions, contexts, module calls and views. For few tokens, that host work takes longer than the GPU's. On GPUs an
RMSNorm is one kernel with the sum before it, which rounds where these operations do and adds squares in another order.

`SharedWeights` are for ranks of a cache that each hold a part of every matrix. For few tokens, which all ranks compute,
this is Helix Parallelism (NVIDIA, 2025): ranks hold parts of the sequence in attention, and parts of the matrices
elsewhere. A layer has four exchanges: queries, keys and values are gathered, attention's partial results are exchanged
by heads, and the two row-parallel products are summed. For prompts, of which every rank has its own tokens, a layer's
weights are gathered while the layer before computes. Gathering the tokens instead would move 4 h values for each: fewer
bytes only for passes of fewer tokens than 13,000 over all ranks, with the shape of Llama 3 8B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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

from ..core.comm import all_gather_rows
from ..inference.fp8 import product
from ..inference.prefetch import Empty, Prefetch
from ..inference.weight_gathers import Ranks, rows_of_slice, share_layers
from ..lowbit.quantized import PeerReduction, add_norm, all_reduce, peer_reduction
from .groups import WeightGroups
from .norms import LayerNorm, PostNormAdd, RMSNorm
from .rope import Rotation, checking_rope
from .row_parallel import ReducedRowParallelLinear

AttentionFn = Callable[[Tensor, Tensor, Tensor, Rotation | None], Tensor]
"""A function of queries `[s, 1, g, h / g, d]`, keys and values `[s, 1, g, 1, d]`, and the rotation of queries and keys,
that returns `[s, 1, h, d]`."""
NormFn = Callable[[Tensor], Tensor]

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


@dataclass
class Stream:
    """The residual stream `[s, 1, h]`, and its norm for the part of a layer that comes next."""

    hidden: Tensor
    normed: Tensor | None = None

    def take(self) -> Tensor:
        """Return the norm and forget it, so that it lives no longer than the product that reads it."""
        normed, self.normed = self.normed, None
        assert normed is not None
        return normed


class DirectLayer:
    """One layer, in evaluation mode, of a model that `why_not_direct` accepts. Call it without gradients.

    Every call reads the parameters from `layer`, so they may change between calls.

    shares: of ranks that share the weights; None for tensor parallelism alone.
    """

    def __init__(self, layer: TransformerLayer, shares: SharedWeights | None = None) -> None:
        attention, mlp, config = layer.self_attention, layer.mlp, layer.config
        self._layer, self._shares = layer, shares
        self.input_norm, self._mlp_norm = layer.input_layernorm, layer.pre_mlp_layernorm
        self._projection, self._down = attention.linear_proj, mlp.linear_fc2
        self._groups = attention.num_query_groups_per_partition if shares is None else shares.kv_heads
        self._head_dim = attention.hidden_size_per_attention_head
        self._up_rows = mlp.linear_fc1.output_size_per_partition
        self._fused, self._gated = config.bias_activation_fusion, config.gated_linear_unit
        self._activation = config.activation_func
        self._q_norm, self._k_norm = _norm(attention.q_layernorm), _norm(attention.k_layernorm)
        self._post_norms = [_norm(getattr(bda, "norm", None)) for bda in (layer.self_attn_bda, layer.mlp_bda)]

    def __call__(
        self,
        stream: Stream,
        rotation: Rotation | None,
        attend: AttentionFn,
        next_norm: NormFn,
        gathered: LayerWeights | None = None,
    ) -> None:
        """Run the layer on a stream whose norm is `input_norm`'s, and leave it with the one of `next_norm`.

        attend: rotates and attends.
        gathered: the weights of all ranks that share them, for tokens that only this rank has; None for its own.
        """
        attention_norm, mlp_norm = self._post_norms
        weights = LayerWeights.of(self._layer) if gathered is None else gathered
        is_whole = gathered is not None
        attended = product(self._attention(stream, rotation, attend, weights, is_whole), weights.projection)
        self._add(stream, self._projection, attended, is_whole, attention_norm, self._mlp_norm)
        del attended
        wide = self._activate(product(stream.take(), weights.up), weights.up_bias)
        self._add(stream, self._down, product(wide, weights.down), is_whole, mlp_norm, next_norm)

    def _attention(
        self, stream: Stream, rotation: Rotation | None, attend: AttentionFn, weights: LayerWeights, is_whole: bool
    ) -> Tensor:
        """Return `[s, 1, h d]`. A separate function, so that its intermediate tensors do not live through the MLP."""
        mixed = product(stream.take(), weights.qkv)
        if weights.qkv_bias is not None:  # not in the product: Megatron's layers round before they add it
            mixed = mixed + weights.qkv_bias
        if self._shares is not None and not is_whole:
            mixed = self._shares.mixed(mixed)
        mixed = mixed.view(*mixed.shape[:2], self._groups, -1, self._head_dim)
        q, k, v = mixed.split_with_sizes((mixed.shape[3] - 2, 1, 1), 3)
        return attend(self._q_norm(q), self._k_norm(k), v, rotation).flatten(2)

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

    def _add(
        self, stream: Stream, linear: RowParallelLinear, out: Tensor, is_whole: bool, post_norm: NormFn, norm: NormFn
    ) -> None:
        """Finish a row-parallel layer's product: sum it over the ranks with the same tokens, add its bias, its own norm
        and the residual, and normalize that for the next part."""
        shares, hidden, normed = self._shares, stream.hidden, None
        rms = norm.plain if isinstance(norm, RMSNorm) and post_norm is _same and linear.bias is None else None
        if rms and shares is not None and (peers := shares.exact_peers(linear, out, is_whole)) is not None:
            normed = peers.sum_norm(out, hidden, *rms)
        if normed is None:
            out = _sum(linear, out) if shares is None else shares.sum(linear, out, is_whole)
            normed = add_norm(out, hidden, *rms) if rms else None
        if normed is None:
            out = post_norm(out if linear.bias is None else out + linear.bias).add_(hidden)
            normed = norm(out)
        stream.hidden, stream.normed = out, normed


def _same(x: Tensor) -> Tensor:
    return x


def _norm(norm: torch.nn.Module | None) -> NormFn:
    """Return a norm, or instead of an absent one a function that is cheaper to call than a module."""
    return _same if norm is None or isinstance(norm, IdentityOp) else norm


def _sum(linear: RowParallelLinear, out: Tensor) -> Tensor:
    """Sum over the tensor-parallel ranks."""
    if isinstance(linear, ReducedRowParallelLinear):
        return linear.reducer.all_reduce(out, overwrite=True)
    if linear.tp_group.size() > 1:
        dist.all_reduce(out, group=linear.tp_group)
    return out


_PEERS = {"auto": "auto", "peer": "peer", "p2p": "collective"}
"""`reduction.transport` of exact sums, keyed by `inference.transport`."""


class SharedWeights:
    """The weights of a model that was built for `groups.megatron`, whose ranks share a cache.

    All ranks make the same calls in the same order.

    transport: `inference.transport`, which also says how sums of few tokens travel.
    kv_heads: of this rank's cache.
    peers: sums over peer memory; None for collectives.
    collective: whether ranks without tokens have to call `layer` too.
    """

    def __init__(self, gpt: GPTModel, groups: WeightGroups, transport: str) -> None:
        config, tp = gpt.config, groups.megatron.tp
        self._groups, self._layers = groups, list(gpt.decoder.layers)
        self._parts = groups.cache.size()
        slices, own = tp.size() // self._parts, tp.rank() // self._parts
        self.kv_heads = max(1, config.num_query_groups // slices)
        # Several slices may have the same keys and values. Each then takes its rows of all rows.
        self._of_slice: Callable[[Tensor, int], Tensor] | None = None
        self._mixed_group = groups.cache
        if config.num_query_groups < slices:
            self._mixed_group = tp
            heads = config.num_query_groups, config.num_attention_heads // config.num_query_groups
            self._of_slice = lambda x, dim: rows_of_slice(x, dim, heads, own, slices)
        device = next(gpt.parameters()).device
        self.peers = peer_reduction(_PEERS[transport], tp, device)
        self._mixed_peers = peer_reduction(_PEERS[transport], self._mixed_group, device)
        self._prefetch = Prefetch[LayerWeights](device)
        first = tp.rank() // self._parts * self._parts
        self._of_cache = range(first, first + self._parts), groups.gather
        self._of_mixed = self._of_cache[0] if self._of_slice is None else range(tp.size()), self._mixed_group
        layers = [] if why_not_direct(gpt, shared=True) else self._layers  # others are refused later
        every = [vars(LayerWeights.of(layer)).items() for layer in layers]
        matrices = [{name: x for name, x in of_layer if x is not None} for of_layer in every]
        self._gathers = share_layers(matrices, tp, device, self.peers is not None)
        self.collective = any(each.is_collective for each in self._gathers)
        self._gathered: dict[int, LayerWeights] = {}  # in the memory that they are copied to, keyed by the layer

    def all_heads(self, sinks: Tensor | None) -> Tensor | None:
        """Return the sinks `[h]` of all heads of the cache, from those of this rank."""
        return None if sinks is None else all_gather_rows(self._groups.cache, sinks.detach()).flatten()

    def mixed(self, own: Tensor) -> Tensor:
        """Return queries, keys and values of all heads of the cache, from this rank's contiguous `[s, 1, rows]`."""
        mixed = None if self._mixed_peers is None else self._mixed_peers.all_gather(own)
        if mixed is None:
            gathered = all_gather_rows(self._mixed_group, own.view(-1)).view(-1, *own.shape)
            mixed = gathered.movedim(0, 2).flatten(2)
        return mixed if self._of_slice is None else self._of_slice(mixed, 2)

    def sum(self, linear: RowParallelLinear, out: Tensor, gathered: bool) -> Tensor:
        """Return the sum of products over the ranks that have the same tokens, in any memory.

        Policies may quantize sums; exact ones of few tokens travel over peer memory, if any.
        """
        group = self._groups.slices if gathered else self._groups.megatron.tp
        if (peers := self.exact_peers(linear, out, gathered)) is not None:
            return all_reduce(out, group, bits=None, out=out, peers=peers)
        if isinstance(linear, ReducedRowParallelLinear):
            reducer = linear.reducer_over(group)
            if reducer.format("all_reduce", out) is not None:
                return reducer.all_reduce(out)
        if group.size() > 1:
            dist.all_reduce(out, group=group)
        return out

    def exact_peers(self, linear: RowParallelLinear, out: Tensor, gathered: bool) -> PeerReduction | None:
        """Return what sums these products exactly over peer memory; None for another way."""
        if self.peers is None or gathered or not isinstance(linear, ReducedRowParallelLinear):
            return None if gathered else self.peers
        reducer = linear.reducer_over(self._groups.megatron.tp)
        return self.peers if reducer.format("all_reduce", out) is None else None

    def layer(self, number: int) -> LayerWeights:
        """Return a layer's weights of all ranks of the cache, and begin to gather those of the next layer.

        They are overwritten when the layer after the next begins.
        """
        weights = self._prefetch.take(number, self._gather)
        if number + 1 < len(self._layers):
            self._prefetch.begin(number + 1, self._gather)
        return weights

    def _gather(self, number: int, empty: Empty) -> LayerWeights:
        if number not in self._gathered:
            self._gathered[number] = self._prepare(number, empty)
        weights = self._gathered[number]
        self._gathers[number].gather()
        if self._of_slice is None:
            return weights
        bias = None if weights.qkv_bias is None else self._of_slice(weights.qkv_bias, 0)
        return replace(weights, qkv=self._of_slice(weights.qkv, 0), qkv_bias=bias)

    def _prepare(self, number: int, empty: Empty) -> LayerWeights:
        own, gather = LayerWeights.of(self._layers[number]), self._gathers[number]

        def rows(name: str, part: Tensor, of: Ranks = self._of_cache) -> Tensor:
            into = empty(name, (len(of[0]) * part.shape[0], *part.shape[1:]), part)
            gather.add_rows(name, of, into, empty)
            return into

        def columns(name: str, part: Tensor) -> Tensor:
            into = empty(name, (part.shape[0], self._parts * part.shape[1]), part)
            gather.add_columns(name, self._of_cache, into, empty)
            return into

        return LayerWeights(
            rows("qkv", own.qkv, self._of_mixed),
            None if own.qkv_bias is None else rows("qkv_bias", own.qkv_bias, self._of_mixed),
            columns("projection", own.projection),
            rows("up", own.up),
            None if own.up_bias is None else rows("up_bias", own.up_bias),
            columns("down", own.down),
        )

    def together(
        self,
        x: Tensor,
        most: int,
        work: Callable[[Tensor], Tensor],
        take: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> Iterator[tuple[int, Tensor]]:
        """Apply `work`, whose weights all ranks share, to rows `[m, ...]` of which every rank has its own, maybe none.

        Yield the first row and the results of every call's own rows, in order; nothing for none.

        most: the rows of all ranks together in one call of `work`.
        take: makes a call's own rows `[m, ...]` from those of `x`.
        """
        rank, size = self._groups.cache.rank(), max(1, most // self._parts)
        count = torch.tensor(len(x), device=x.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self._groups.cache)
        for start in range(0, int(count), size):
            size = min(size, int(count) - start)
            own = take(x[start : start + size])
            padded = own.new_zeros(size, *own.shape[1:])
            padded[: len(own)] = own
            every = all_gather_rows(self._groups.cache, padded.view(-1)).view(-1, *own.shape[1:])
            found = work(every)[rank * size :][: len(own)]
            if len(own):
                yield start, found
