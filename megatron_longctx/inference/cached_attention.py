"""Attention over the cache: one layer's new queries, keys and values in, its attention out, on any ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention.bind import Bound, Engine, Shapes, bind
from ..attention.function import add_sink_, merge_sink
from ..attention.kv_format import Int8KV, KVFormat, StackedKV
from ..attention.run import Run
from ..comm import (
    BufferPool,
    PeerMemoryError,
    PeerMerge,
    PeerTransport,
    choose_transport,
    from_all,
    gather_over,
)
from ..errors import refuse
from ..kernels import KernelRequest, choose
from ..kernels.paged import (
    FUSED_DTYPES,
    PackedPartials,
    Pages,
    attend_pages,
    attend_splits,
    compile_decode,
    has_fused_kernels,
    merge_ranks,
)
from ..kernels.partials import compile_merges
from ..kernels.quantize_kv import SCALE_BYTES
from ..schedules import Kind, Lowering, Target, Workload
from ..topology.cluster import GIB
from .batch import Batch
from .cache_manager import ScheduledChunk

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheShape:
    """What a rank keeps per token: keys and values of `num_kv_heads` heads of `head_dim`, in `num_layers` layers.

    Heads are those of one tensor-parallel rank. int8: what is kept, sent and attended are 8-bit integers with a scale
    for every token and head (`kernels.quantize_kv`); `dtype` is that of queries and outputs. windows: by layer, tokens
    before itself that a query sees, None for all; empty where all layers see all. Everything is kept in any case.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    int8: bool = False
    windows: tuple[int | None, ...] = ()

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def kinds(self) -> tuple[int | None, ...]:
        """The windows of layers, each once: of what plans, and a step's numbers, are made."""
        return tuple(dict.fromkeys(self.windows)) or (None,)

    @property
    def widest(self) -> int | None:
        """The window of the layers that see most, whose attention takes longest."""
        bounds = [window for window in self.kinds if window is not None]
        return None if len(bounds) < len(self.kinds) else max(bounds)

    @property
    def kv(self) -> KVFormat:
        """How keys and values lie in the cache and travel."""
        return Int8KV(self.head_dim, self.dtype) if self.int8 else StackedKV(self.head_dim, self.dtype)

    @property
    def workload(self) -> Workload:
        """Of one sequence."""
        return Workload(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            element_bytes=self.dtype.itemsize,
            kv_row_bytes=self.kv.row_bytes,
        )

    @property
    def token_bytes(self) -> int:
        """Of one cached token, over all layers."""
        return self.num_layers * self.num_kv_heads * self.kv.row_bytes


@dataclass(frozen=True)
class Rows:
    """New tokens of several sequences, which all ranks compute alike.

    Attributes:
        pages: by window of layers, what this rank holds of each row's sequence up to its token, that included where it
            is stored here.
        slots: int64 `[B]`, where the new keys and values are stored; `CachedAttention.nowhere` if on another rank.
    """

    pages: Mapping[int | None, Pages]
    slots: Tensor


class CachedAttention:
    """The tensors of one rank's cache, and the executor that attends over all ranks' caches.

    `begin` takes the plan of a batch, or `begin_rows` few tokens; then every layer is called once, in order.

    Args:
        group: the context-parallel process group, or None for one rank.
        slots: tokens that fit into this rank's cache.
        kernel: a name in `kernels.PROVIDERS`, or `auto`.
        transport: how blocks travel, as for `comm.choose_transport`.

    Raises:
        ValueError: no kernel for this shape, no such transport, or a cache that does not fit into the device's memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        shape: CacheShape,
        slots: int,
        device: torch.device,
        kernel: str = "auto",
        transport: str = "p2p",
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1
        self.shape = shape
        self.device = device
        request = KernelRequest(
            device.type, shape.dtype, shape.head_dim, shape.num_heads, shape.num_kv_heads, packed=True
        )
        links = None
        if group is not None and self.world > 1:
            # A conversation needs a little more memory for its messages in every turn.
            links = choose_transport(transport, group, device, growth=2.0, key="inference.transport")
        self._engine = Engine(choose(kernel, request), links, BufferPool(device))
        near = any(window is not None for window in shape.kinds)
        self._near = choose(kernel, replace(request, windows=True)) if near else self._engine.kernel
        self._shapes = Shapes(shape.workload, shape.dtype, device, shape.kv, shape.kv)
        self._merge: PeerMerge | None = None
        self._bound: dict[int | None, Bound] = {}  # by window of layers
        self._place: slice | Tensor = slice(0, 0)  # of the new tokens' keys and values
        self._num_new = 0
        self._rows: Rows | None = None
        self.nowhere = slots  # a slot more than there are, which nobody reads
        spec = shape.kv.spec(slots + 1, 1, shape.num_kv_heads, device)
        try:
            self._storage = [torch.zeros(spec.shape, dtype=spec.dtype, device=device) for _ in range(shape.num_layers)]
        except (RuntimeError, MemoryError) as error:  # out of memory has no type of its own on CPU
            gib = slots * shape.token_bytes / GIB
            raise refuse(
                "inference.cache_tokens",
                slots * self.world,
                f"a cache that fits into memory; this one takes {gib:.2f} GiB a rank ({error})",
                "Lower it, or use more context-parallel ranks.",
            ) from error

        self._layers = [storage[:slots] for storage in self._storage]

    def compile_kernels(self, page_tokens: int) -> None:
        """Compile the kernels of ours that prompts and decode over pages of so many tokens need; on CPUs there are
        none."""
        if self.device.type == "cuda":
            compile_merges(self.shape.num_heads, self.shape.head_dim, self.shape.dtype, self.device)
            q = torch.empty(0, self.shape.num_heads, self.shape.head_dim, dtype=self.shape.dtype, device=self.device)
            windows = {window is not None for window in self.shape.kinds}
            compile_decode(q, self._storage[0][:, :, 0], page_tokens, windows)
            if self._merge is not None:
                self._merge.compile(self.shape.num_heads, self.shape.head_dim, self.shape.dtype, self.device)

    def copy(self, source: range, target: range) -> None:
        """Copy cached keys and values of all layers from this rank's slots to others of its own."""
        for layer in self._layers:
            layer[target.start : target.stop] = layer[source.start : source.stop]

    def target(self, joined: bool, window: int | None = None) -> Target:
        """What plans of layers with this window are lowered for; `joined` as there."""
        engine = self._engine_of(window)
        hosts = None if engine.transport is None else engine.transport.hosts
        return Target(self._shapes.workload, engine.kernel.takes, hosts, joined)

    def _engine_of(self, window: int | None) -> Engine:
        """The fastest kernel for plain layers need not take windows."""
        return self._engine if window is None else replace(self._engine, kernel=self._near)

    def begin(self, batch: Batch, mode: str, joined: bool = False) -> None:
        """Follow the plan of a mode in the calls that come, of every window that layers have; keys and values of the
        batch's new tokens are stored where it says.

        joined: one kernel call for all keys of a block of queries, copied together if they lie apart, so that results
        do not depend, bit for bit, on where in the cache tokens lie.
        """
        if batch.n != self.world:
            raise refuse(
                "batch", f"of {batch.n} ranks", f"one of {self.world}", "Append to this group's cache manager."
            )
        self._rows = None
        self._bound = {
            window: bind(
                Lowering(batch.within(window).plan(mode), self.target(joined, window)),
                self.rank,
                self._shapes,
                self._engine_of(window),
            )
            for window in self.shape.kinds
        }
        runs = [run for chunk in batch.chunks for run in chunk.new_runs[self.rank] if run]
        self._num_new = sum(map(len, runs))
        if all(before.stop == after.start for before, after in pairwise(runs)):
            self._place = slice(runs[0].start, runs[-1].stop) if runs else slice(0, 0)
        else:
            self._place = numbers_of(runs).to(self.device)

    def expect_rows(self, most: int) -> None:
        """Make memory for what ranks find for up to so many rows, where they can read each other's. Collective;
        `begin_rows` works without and with more of them as well, over a collective of every layer."""
        group, shape = self.group, self.shape
        if group is None or self._merge is not None or not isinstance(self._engine.transport, PeerTransport):
            return
        if shape.dtype in FUSED_DTYPES and all(from_all(group, has_fused_kernels())):
            try:
                self._merge = PeerMerge.of(group, self.device, most, shape.num_heads, shape.head_dim)
            except PeerMemoryError as error:  # on all ranks alike
                if self.rank == 0:
                    logger.warning("decode's partial results are gathered, not merged over peer memory: %s", error)

    def begin_rows(self, rows: Rows) -> None:
        """Attend for these rows in the calls that come, on every rank; a layer's call reads their tensors."""
        self._rows = rows
        self._place, self._num_new = rows.slots, rows.slots.numel()

    def randomize(self) -> None:
        """Fill the cache with random keys and values, for measurements."""
        for layer in self._layers:
            if self.shape.int8:
                layer.random_()[..., -SCALE_BYTES:].view(torch.float32).fill_(1 / 64)
            else:
                layer.normal_()

    @torch.inference_mode()
    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, sink: Tensor | None = None
    ) -> Tensor:
        """Store this rank's new keys and values, and attend over everything its queries see in this layer.

        Args:
            layer: counted from 0.
            q: the new tokens of this rank, `[s, 1, h, d]`, in the order of the plan's rows.
            k, v: `[s, 1, g, d]`.
            scale: factor of the scores; default `d ** -0.5`.
            sink: `[h]`, a logit per head that takes part in every softmax and has no value; None for none.

        Returns:
            `[s, 1, h, d]` in q's dtype.

        Raises:
            ValueError: shapes that do not fit the plan or the cache.
        """
        assert self._bound or self._rows is not None, "begin() comes before the layers"
        rows, shape = self._num_new, self.shape
        for name, x, heads in (("q", q, shape.num_heads), ("k", k, shape.num_kv_heads), ("v", v, shape.num_kv_heads)):
            if x.shape != (rows, 1, heads, shape.head_dim):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: expected [{rows}, 1, {heads}, {shape.head_dim}], the new "
                    f"tokens of rank {self.rank} in the plan or rows that were begun."
                )
        self._store(layer, k, v)
        scale = shape.head_dim**-0.5 if scale is None else scale
        if self._rows is not None:
            return self._attend_rows(layer, self._rows.pages[shape.window(layer)], q, scale, sink)
        run = Run(self._bound[shape.window(layer)], {Kind.Q: (q,), Kind.KV: (self._layers[layer],)}, scale)
        run()
        out, lse = run.result(Kind.OUT)
        return out if sink is None else merge_sink(out, lse, sink, range(shape.num_heads))[0]

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        storage, kv = self._storage[layer], self.shape.kv
        in_place = isinstance(self._place, slice)
        new = storage[self._place] if in_place else kv.spec(self._num_new, 1, k.shape[2], self.device).empty()
        for into, source in kv.pairs(new, k, v):
            into.copy_(source)
        if not in_place:
            storage[self._place] = new

    def _attend_rows(self, layer: int, pages: Pages, q: Tensor, scale: float, sink: Tensor | None) -> Tensor:
        """Each rank attends over what it holds, the first one with the sink; all merge what all have found, in the
        same order."""
        q, cache = q[:, 0], self._storage[layer][:, :, 0]
        merge = self._merge if self._merge is not None and self._merge.fits(*q.shape) else None
        found = (attend_pages if merge is None else attend_splits)(q, cache, pages, scale)
        if sink is not None and self.rank == 0:
            add_sink_(found.out.view(-1, *q.shape)[0], found.lse.view(-1, *q.shape[:2])[0], sink)
        if self.world == 1:
            return found.out.to(q.dtype).unsqueeze(1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if merge is not None:
            return merge(found, out).unsqueeze(1)
        gathered = PackedPartials(gather_over(self.group, found.flat), *q.shape)
        return merge_ranks(gathered, out).unsqueeze(1)


def numbers_of(ranges: Sequence[range]) -> Tensor:
    """int64, on the host: all numbers of some ranges of step 1, in order."""
    return torch.cat([torch.arange(0), *(torch.arange(each.start, each.stop) for each in ranges)])


def rows_of(chunks: Sequence[ScheduledChunk], texts: Sequence[Sequence[int]], rank: int) -> tuple[Tensor, Tensor]:
    """A rank's new tokens themselves and their positions, int64 `[s]` each, on the host, in the order of a plan's
    rows."""
    tokens: list[int] = []
    positions: list[range] = []
    for chunk, text in zip(chunks, texts, strict=True):
        for span in chunk.new_spans(rank):
            tokens += text[span.start : span.stop]
            positions.append(range(chunk.cached + span.start, chunk.cached + span.stop))
    return torch.tensor(tokens, dtype=torch.int64), numbers_of(positions)


class CachedModel(Protocol):
    """A model whose layers attend through a `CachedAttention`. max_positions: None for no bound."""

    vocab_size: int
    max_positions: int | None
    attention: CachedAttention

    def logits(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Run this rank's new tokens.

        Args:
            tokens, positions: int64 `[s]`.
            rows: int64; whose next tokens are asked for.

        Returns:
            fp32 `[len(rows), vocab_size]`.
        """
