"""Attention over the sharded KV cache: stores a layer's new keys and values and returns its attention output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..config.cluster import GIB
from ..core.attention.execute import Pass, Runtime
from ..core.attention.function import merge_sink
from ..core.attention.kv_format import KVFormat, Shapes, StackedKV
from ..core.comm import (
    BufferPool,
    PeerMemoryError,
    PeerTransport,
    all_gather_rows,
    all_to_all_rows,
    choose_transport,
    gather_objects,
)
from ..core.errors import refuse
from ..core.kernels import KernelRequest, choose_kernel
from ..core.kernels.packed import to_device
from ..core.plans import Kind, Recorder, Target, Workload
from .batch import Batch, ScheduledChunk
from .paged import FUSED_DTYPES, PackedPartials, Pages, attend_pages, attend_splits, has_fused_kernels, merge_ranks
from .quantize_kv import Int8KV
from .sampling import PromptScorer
from .states import RecurrentStates

if TYPE_CHECKING:
    from .peer_merge import PeerMerge

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheShape:
    """The cache's contents per token: keys and values of `num_kv_heads` heads of `head_dim` in `num_layers` layers.

    Attributes:
        num_heads, num_kv_heads: the heads of one tensor-parallel rank.
        dtype: of queries and outputs.
        int8: whether keys and values are stored, sent and attended as 8-bit integers with a scale for every token and
            head (`inference.quantize_kv`).
        windows: per layer, the number of tokens before itself that a query sees, None for all; empty if all layers see
            all tokens.
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
    def distinct_windows(self) -> tuple[int | None, ...]:
        """The windows of layers, each once: every one has its own plans and its own numbers in a decode step."""
        return tuple(dict.fromkeys(self.windows)) or (None,)

    @property
    def widest_window(self) -> int | None:
        """The window of the layers that see most, whose attention takes longest."""
        bounds = [window for window in self.distinct_windows if window is not None]
        return None if len(bounds) < len(self.distinct_windows) else max(bounds)

    @property
    def kv(self) -> KVFormat:
        """The format of keys and values in the cache and in messages."""
        return Int8KV(self.head_dim, self.dtype) if self.int8 else StackedKV(self.head_dim, self.dtype)

    @property
    def workload(self) -> Workload:
        """The workload of one sequence."""
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return Workload(*heads, element_bytes=self.dtype.itemsize, kv_row_bytes=self.kv.row_bytes)

    @property
    def layer_bytes(self) -> int:
        """The bytes of one cached token in a layer."""
        return self.num_kv_heads * self.kv.row_bytes

    @property
    def token_bytes(self) -> int:
        """The bytes of one cached token in all layers."""
        return self.num_layers * self.layer_bytes

    @property
    def group_bytes(self) -> tuple[int, int]:
        """The bytes of one cached token in the layers without and with a window."""
        windowed = sum(window is not None for window in self.windows)
        return (self.num_layers - windowed) * self.layer_bytes, windowed * self.layer_bytes


class CachedAttention:
    """The cache tensors of one rank, and the executor that attends over the caches of all ranks.

    `begin` takes the plan of a batch, or `begin_replicated` a few tokens; then every layer is called once, in order.

    Attributes:
        layers: the cache of each layer, `[slots, …]`.
        on_layer: called before every layer, but not when a CUDA graph is replayed. It may raise to end the pass.
        on_wait: called when a step of decode has been launched, before the host waits for its tokens.
        states: of the model's recurrent layers; None without any.
        tail: on GPUs, reached before the last sixteenth of the layers of a prompt by plans; None after other batches.

    Args:
        group: the context-parallel process group, or None for one rank.
        slots: the number of tokens that fit into this rank's cache, in layers without and with windows if they differ.
        kernel: a name in `kernels.PROVIDERS`, or `auto`.
        transport: how blocks are sent, as for `comm.choose_transport`.
        divides_heads: whether each rank gets its part of the heads of replicated tokens' outputs, or all of them.

    Raises:
        ValueError: no kernel takes this shape, the transport is unknown, or the cache does not fit into the device's
            memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        shape: CacheShape,
        slots: int | tuple[int, int],
        device: torch.device,
        kernel: str = "auto",
        transport: str = "p2p",
        divides_heads: bool = False,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1
        self.shape = shape
        self.device = device
        self._parts = self.world if divides_heads else 1  # of the heads of replicated tokens' outputs
        request = KernelRequest(
            device.type, shape.dtype, shape.head_dim, shape.num_heads, shape.num_kv_heads, packed=True
        )
        links = None
        if group is not None and self.world > 1:
            # The messages of a conversation need a little more memory in every turn.
            links = choose_transport(transport, group, device, growth=2.0, key="inference.transport")
        self._runtime = Runtime(choose_kernel(kernel, request), links, BufferPool(device))
        has_windows = any(window is not None for window in shape.distinct_windows)
        self._window_kernel = (
            choose_kernel(kernel, replace(request, windows=True)) if has_windows else self._runtime.kernel
        )
        self._shapes = Shapes(shape.workload, shape.dtype, device, shape.kv, shape.kv)
        self.on_layer: Callable[[], None] = lambda: None
        self.on_wait = self.on_layer
        self.states: RecurrentStates | None = None
        self.tail: torch.cuda.Event | None = None
        self._merge: PeerMerge | None = None
        self._passes: dict[int | None, Pass] = {}  # keyed by the window of layers
        self._new_slots: Sequence[slice | Tensor] = ()  # of layers without and with windows
        self._num_new = 0
        self._pages: Mapping[int | None, Pages] | None = None  # of replicated tokens
        # One more slot than there are; nobody reads it.
        self.unused_slots = slots if isinstance(slots, tuple) else (slots, slots)
        sizes = [self.unused_slots[shape.window(layer) is not None] for layer in range(shape.num_layers)]
        like = shape.kv.spec(1, 1, shape.num_kv_heads, device)
        try:
            self._storage = [torch.zeros(s + 1, *like.shape[1:], dtype=like.dtype, device=device) for s in sizes]
        except (RuntimeError, MemoryError) as error:  # CPUs have no error type for being out of memory
            gib = sum(sizes) * shape.layer_bytes / GIB
            raise refuse(
                "inference.cache_tokens",
                self.unused_slots[0] * self.world,
                f"a cache that fits into memory; this one takes {gib:.2f} GiB per rank ({error})",
                "Lower it, or use more context-parallel ranks.",
            ) from error
        self.layers = [storage[:-1] for storage in self._storage]

    @property
    def groups(self) -> list[list[Tensor]]:
        """The cache of the layers without and of those with windows; of all together if there are no windows."""
        windowed = [window is not None for window in self.shape.windows or [None] * self.shape.num_layers]
        kinds = (False, True) if any(windowed) else (False,)
        return [[x for x, its in zip(self.layers, windowed, strict=True) if its == kind] for kind in kinds]

    @property
    def is_replicated(self) -> bool:
        """Whether every rank computes the tokens that were begun."""
        return self._pages is not None

    def target(self, joined: bool, window: int | None = None) -> Target:
        """Return the target of plans for layers with this window. joined: see `Target`."""
        runtime = self._runtime_for(window)
        return Target(self._shapes.workload, runtime.kernel.takes, runtime.over_peers, joined)

    def _runtime_for(self, window: int | None) -> Runtime:
        """Return the runtime for a window: the fastest kernel for layers without one may not support windows."""
        return self._runtime if window is None else replace(self._runtime, kernel=self._window_kernel)

    def begin(self, batch: Batch, mode: str, joined: bool = False) -> None:
        """Use the plans of `mode` for the next call of every layer, which stores the batch's new keys and values.

        Args:
            joined: attend to all keys of a query block in one kernel call, and copy keys that lie apart together, so
                that results do not depend, bit for bit, on which slots of the cache hold the tokens.

        Raises:
            ValueError: the batch is for another number of ranks, or the mode is unknown.
        """
        if batch.n != self.world:
            raise refuse(
                "batch", f"of {batch.n} ranks", f"one of {self.world}", "Append to this group's cache manager."
            )
        self._pages = None
        if self.states is not None:
            self.states.begin(batch)
        self._passes = {
            window: Pass(
                Recorder(batch.with_window(window).plan(mode), self.target(joined, window)),
                self.rank,
                self._shapes,
                self._runtime_for(window),
                packed=True,
            )
            for window in self.shape.distinct_windows
        }
        self._num_new = batch.num_rows(self.rank)
        chunks = batch.chunks, [chunk.windowed or chunk for chunk in batch.chunks]
        self._new_slots = [self._slots_of(chunk.new_slots[self.rank] for chunk in each) for each in chunks]

    def _slots_of(self, parts: Iterable[tuple[range, ...]]) -> slice | Tensor:
        """Return the slots of new tokens: a slice if they are neighbours."""
        runs = list(chain.from_iterable(parts))
        if all(before.stop == after.start for before, after in pairwise(runs)):
            return slice(runs[0].start, runs[-1].stop) if runs else slice(0, 0)
        return to_device(_numbers(runs), self.device)

    def allocate_merge(self, most: int) -> None:
        """Allocate peer memory for merging the results of up to `most` replicated tokens, if ranks have it. Collective.

        `begin_replicated` also works without this memory, and for more tokens, by a collective in every layer.
        """
        group, shape = self.group, self.shape
        if group is None or self._merge is not None or not isinstance(self._runtime.transport, PeerTransport):
            return
        if shape.dtype in FUSED_DTYPES and all(gather_objects(group, has_fused_kernels())):
            from .peer_merge import PeerMerge

            try:
                heads = shape.num_heads // self._parts
                self._merge = PeerMerge.of(group, self.device, most, heads, shape.head_dim, self._parts)
            except PeerMemoryError as error:  # on all ranks alike
                if self.rank == 0:
                    logger.warning("decode's partial results are gathered, not merged over peer memory: %s", error)

    def begin_replicated(self, pages: Mapping[int | None, Pages], slots: Sequence[Tensor]) -> None:
        """Attend for `B` tokens that every rank computes, in the next call of every layer, which reads these tensors.

        Args:
            pages: keyed by the window of layers, the tokens on this rank that each row sees: its sequence up to its
                own token, which is included if it is stored here.
            slots: int64 `[B]` for layers without windows and for those with one, the slots for the new keys and values;
                one of `unused_slots` for rows that another rank stores.
        """
        self._pages, self._new_slots, self._num_new = pages, slots, slots[0].numel()

    def place(self, layer: int) -> tuple[Tensor, Tensor | slice] | None:
        """Return a layer's cache `[slots, 2, 1, g, d]` and the slots of the new tokens, if it holds keys and values as
        they are: the caller may then store them itself, in this order. None for another format."""
        slots = self._new_slots[self.shape.window(layer) is not None]
        return None if self.shape.int8 else (self._storage[layer], slots)

    @torch.inference_mode()
    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        scale: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Store this rank's new keys and values, and attend to all keys that its queries see in this layer.

        Args:
            layer: counted from 0.
            q: this rank's new tokens, `[s, 1, h, d]`, in the order of the plan's rows.
            k, v: `[s, 1, g, d]`; None if they are in `place` already.
            scale: the factor of the scores; default `d ** -0.5`.
            sink: `[h]`, a logit per head that takes part in every softmax and has no value; None for none.

        Returns:
            `[s, 1, h, d]` in q's dtype; of replicated tokens this rank's part of the heads if ranks divide them.

        Raises:
            ValueError: shapes do not match the plan or the cache.
        """
        assert self._passes or self._pages is not None, "begin() comes before the layers"
        self.on_layer()
        rows, shape = self._num_new, self.shape
        for name, x, heads in (("q", q, shape.num_heads), ("k", k, shape.num_kv_heads), ("v", v, shape.num_kv_heads)):
            if x is not None and x.shape != (rows, 1, heads, shape.head_dim):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: expected [{rows}, 1, {heads}, {shape.head_dim}], the new "
                    f"tokens of rank {self.rank} in the plan or rows that were begun."
                )
        if k is not None:
            assert v is not None, "keys and values are stored together"
            self._store(layer, k, v)
        scale = shape.head_dim**-0.5 if scale is None else scale
        if self._pages is not None:
            return self._attend_replicated(layer, self._pages[shape.window(layer)], q, scale, sink)
        if layer == shape.num_layers - shape.num_layers // 16 and q.is_cuda:
            self.tail = torch.cuda.current_stream(self.device).record_event()
        run = self._passes[shape.window(layer)].run({Kind.Q: (q,), Kind.KV: (self.layers[layer],)}, scale)
        out, lse = run.result(Kind.OUT)
        return out if sink is None else merge_sink(out, lse, sink, range(shape.num_heads))[0]

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        storage, kv = self._storage[layer], self.shape.kv
        slots = self._new_slots[self.shape.window(layer) is not None]
        in_place = isinstance(slots, slice)
        new = storage[slots] if in_place else kv.spec(self._num_new, 1, k.shape[2], self.device).empty()
        for into, source in kv.pairs(new, k, v):
            into.copy_(source)
        if not in_place:
            storage[slots] = new

    def _attend_replicated(self, layer: int, pages: Pages, q: Tensor, scale: float, sink: Tensor | None) -> Tensor:
        """Attend to this rank's keys, on rank 0 also to the sink, and merge the results of all ranks in rank order."""
        q, cache = q[:, 0], self._storage[layer][:, :, 0]
        rows, heads, head_dim = q.shape
        own = rows, heads // self._parts, head_dim
        merge = self._merge if self._merge is not None and self._merge.fits(*own) else None
        partial = (attend_pages if merge is None else attend_splits)(q, cache, pages, scale)
        if sink is not None and self.rank == 0:
            _add_sink(partial.out.view(-1, *q.shape)[0], partial.lse.view(-1, *q.shape[:2])[0], sink)
        if self.world == 1:
            return partial.out.to(q.dtype).unsqueeze(1)
        out = q.new_empty(own)
        if merge is not None:
            return merge(partial, out).unsqueeze(1)
        if self._parts == 1:
            return merge_ranks(PackedPartials(all_gather_rows(self.group, partial.flat), *own), out).unsqueeze(1)
        assert self.group is not None
        received = all_to_all_rows(self.group, partial.divided(self._parts).flat)
        return merge_ranks(PackedPartials(received, *own), out).unsqueeze(1)


def _numbers(ranges: Sequence[range]) -> Tensor:
    """Return all numbers of some ranges of step 1, in order: int64, on the host."""
    return torch.cat([torch.arange(0), *(torch.arange(each.start, each.stop) for each in ranges)])


def local_rows(chunks: Sequence[ScheduledChunk], texts: Sequence[Sequence[int]], rank: int) -> tuple[Tensor, Tensor]:
    """Return the ids and the positions of a rank's new tokens, int64 `[s]` on the host, in the order of a plan's rows.

    Args:
        texts: the new tokens of every chunk.
    """
    tokens: list[int] = []
    for chunk, text in zip(chunks, texts, strict=True):
        for span in chunk.new_spans[rank]:
            tokens += text[span.start : span.stop]
    positions = _numbers([span for chunk in chunks for span in chunk.new_positions(rank)])
    return torch.tensor(tokens, dtype=torch.int64), positions


class CachedModel(Protocol):
    """A model whose layers attend through a `CachedAttention`. max_positions: of a sequence; None for no bound."""

    vocab_size: int
    max_positions: int | None
    attention: CachedAttention

    def logits(self, tokens: Tensor, positions: Tensor, rows: Tensor, scorer: PromptScorer | None = None) -> Tensor:
        """Run this rank's new tokens and return the logits after some of them.

        Args:
            tokens, positions: int64 `[s]`.
            rows: int64, the rows whose next tokens are wanted.
            scorer: gets the logits of its own rows in blocks, so that those of a whole prompt never exist together.

        Returns:
            fp32 `[len(rows), vocab_size]`.
        """


def _add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Run `merge_sink` in place: `out` `[..., h, e]` and `lse` `[..., h]` of one dtype. The host does not wait."""
    total = torch.logaddexp(lse, sink.to(lse.dtype))
    out.mul_(torch.exp(lse - total).unsqueeze(-1))
    lse.copy_(total)
