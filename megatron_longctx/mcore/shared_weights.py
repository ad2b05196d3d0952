"""Weights that the ranks of a cache share: each holds a part of every matrix.

For few tokens, which all ranks compute, this is Helix Parallelism (NVIDIA, 2025): ranks hold parts of the sequence in
attention, and parts of the matrices elsewhere. A layer has four exchanges: queries, keys and values are gathered,
attention's partial results are exchanged by heads, and the two row-parallel products are summed.

For prompts, of which every rank has its own tokens, a layer's weights are gathered while the layer before computes.
Plans of attention stay as they are. Gathering the tokens instead would move 4 h values for each of them: fewer bytes
than a layer's weights only for passes of fewer tokens than 13,000 over all ranks, with the shape of Llama 3 8B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor

from ..core.comm import all_gather_rows
from ..core.comm.collectives import all_gather_single
from ..lowbit.quantized import all_reduce, peer_reduction
from .direct import LayerWeights
from .groups import WeightGroups
from .row_parallel import ReducedRowParallelLinear

_PEERS = {"auto": "auto", "peer": "peer", "p2p": "collective"}
"""`reduction.transport` of exact sums, keyed by `inference.transport`."""


class SharedWeights:
    """The weights of a model that was built for `groups.megatron`. See `direct.Shares`.

    All ranks make the same calls in the same order.

    transport: `inference.transport`, which also says how sums of few tokens travel.
    kv_heads: of this rank's cache.
    peers: sums over peer memory; None for collectives.
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
            self._of_slice = lambda x, dim: _rows_of_slice(x, dim, heads, own, slices)
        device = next(gpt.parameters()).device
        self.peers = peer_reduction(_PEERS[transport], tp, device)
        self._mixed_peers = peer_reduction(_PEERS[transport], self._mixed_group, device)
        self._prefetch = _Prefetch(device)

    def all_heads(self, sinks: Tensor | None) -> Tensor | None:
        """Return the sinks `[h]` of all heads of the cache, from those of this rank."""
        return None if sinks is None else all_gather_rows(self._groups.cache, sinks.detach()).flatten()

    def mixed(self, own: Tensor) -> Tensor:
        """See `direct.Shares`. Of contiguous `[s, 1, rows]`."""
        mixed = None if self._mixed_peers is None else self._mixed_peers.all_gather(own)
        if mixed is None:
            gathered = all_gather_rows(self._mixed_group, own.view(-1)).view(-1, *own.shape)
            mixed = gathered.movedim(0, 2).flatten(2)
        return mixed if self._of_slice is None else self._of_slice(mixed, 2)

    def sum(self, linear: RowParallelLinear, out: Tensor, gathered: bool) -> Tensor:
        """See `direct.Shares`. Policies may quantize sums; exact ones of few tokens travel over peer memory, if any."""
        group = self._groups.slices if gathered else self._groups.megatron.tp
        if isinstance(linear, ReducedRowParallelLinear):
            reducer = linear.reducer_over(group)
            if reducer.format("all_reduce", out) is not None:
                return reducer.all_reduce(out)
        if self.peers is not None and not gathered:
            return all_reduce(out, group, bits=None, out=out, peers=self.peers)
        if group.size() > 1:
            dist.all_reduce(out, group=group)
        return out

    def layer(self, number: int) -> LayerWeights:
        """Return a layer's weights of all ranks of the cache, and begin to gather those of the next layer.

        They are overwritten when the layer after the next begins.
        """
        weights = self._prefetch.take(number, self._gather)
        if number + 1 < len(self._layers):
            self._prefetch.begin(number + 1, self._gather)
        return weights

    def _gather(self, number: int, empty: Callable[[str, tuple[int, ...], Tensor], Tensor]) -> LayerWeights:
        own, group = LayerWeights.of(self._layers[number]), self._groups.gather

        def rows(name: str, part: Tensor, group: dist.ProcessGroup = group) -> Tensor:
            into = empty(name, (group.size() * part.shape[0], *part.shape[1:]), part)
            all_gather_single(into, part.detach(), group=group)
            return into

        def columns(name: str, part: Tensor) -> Tensor:
            height, width = part.shape
            parts = empty("columns", (self._parts * height, width), part)
            all_gather_single(parts, part.detach(), group=group)
            into = empty(name, (height, self._parts * width), part)
            into.view(height, self._parts, width).copy_(parts.view(self._parts, height, width).transpose(0, 1))
            return into

        def mixed(name: str, part: Tensor) -> Tensor:
            every = rows(name, part, self._mixed_group)
            return every if self._of_slice is None else self._of_slice(every, 0)

        return LayerWeights(
            mixed("qkv", own.qkv),
            None if own.qkv_bias is None else mixed("qkv_bias", own.qkv_bias),
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


class _Prefetch:
    """Gathers one layer's weights on a stream of its own while the layer before computes; on CPUs at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._memory: list[dict[str, Tensor]] = [{}, {}, {}]  # of layers of even and of odd numbers, and of both
        self._begun: dict[int, tuple[LayerWeights, torch.cuda.Event | None]] = {}

    def begin(self, number: int, gather: Callable[..., LayerWeights]) -> None:
        def empty(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
            memory = self._memory[2 if name == "columns" else number % 2]
            size = torch.Size(shape).numel()
            if name not in memory or memory[name].numel() < size:
                memory[name] = like.new_empty(size)
            return memory[name][:size].view(shape)

        if self._stream is None:
            self._begun = {number: (gather(number, empty), None)}
            return
        # The memory's last layer has been launched, and this waits for it.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            weights = gather(number, empty)
            self._begun = {number: (weights, self._stream.record_event())}

    def take(self, number: int, gather: Callable[..., LayerWeights]) -> LayerWeights:
        if number not in self._begun:
            self.begin(number, gather)
        weights, ready = self._begun.pop(number)
        if ready is not None:
            ready.wait()
        return weights


def _rows_of_slice(x: Tensor, dim: int, heads: tuple[int, int], own: int, slices: int) -> Tensor:
    """Return the rows of a slice of query heads, and of its one KV head, along `dim`.

    heads: all KV heads, and the query heads of each.
    """
    groups, queries = heads
    sharing, count = slices // groups, queries * groups // slices
    by_group = x.view(*x.shape[:dim], groups, queries + 2, -1, *x.shape[dim + 1 :])
    of_group = by_group.select(dim, own // sharing)
    first = own % sharing * count
    parts = of_group.narrow(dim, first, count), of_group.narrow(dim, queries, 2)
    return torch.cat(parts, dim).flatten(dim, dim + 1)
