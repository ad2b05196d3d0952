"""Tensors that recomputed layers store between forward and backward: their inputs and attention's results.

A `Store` leaves them on the device, a `HostStore` moves them to host memory. `AttentionTape` records the results of
attention in one run of a layer and replays them when the layer runs again. Attention and its communication therefore
run once per step, as in DistFlashAttn.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

import numpy
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..core.attention import AttentionResult, ContextParallelAttention
from ..core.layout import Layout
from ..core.plans import Mask

_TAKEN_TWICE = (
    "was already used by a backward: expected one backward per forward. "
    "Run forward again instead of keeping the graph for a second backward."
)


class StoredTensors:
    """Tensors that stay on their device until they are taken, once."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._on_device: tuple[Tensor, ...] | None = tensors

    def take(self) -> tuple[Tensor, ...]:
        """Return the tensors, ready for the current stream; a RuntimeError the second time."""
        tensors, self._on_device = self._on_device, None
        if tensors is None:
            raise RuntimeError(f"the stored state of a layer {_TAKEN_TWICE}")
        return tensors


class Store:
    """Leaves tensors on their device. All layers of a model share one store and use it in the order of forward.

    kept_results: the share of attention's results that tapes put in it; see `recompute.kept_results`.
    """

    def __init__(self, kept_results: float = 1.0) -> None:
        self.kept_results = kept_results

    def begin_run(self) -> None:
        """Begin the next layer's run: `put` assigns tensors to it from now on."""

    def put(self, *tensors: Tensor) -> StoredTensors:
        """Store tensors until backward takes them."""
        return StoredTensors(tensors)


class HostStore(Store):
    """Moves tensors to host memory, pinned if there is a GPU.

    Copies run on a separate stream, concurrently with computation. Two layer runs' worth stay on the device, for any
    number of layers and of micro-batches in flight: in forward the current run and the run before it. While backward
    works on one run, the run before it in forward is copied back. Backward of a micro-batch begins with the two runs
    that are still on the device. If forward of another micro-batch came between (pipelines), its last layer waits for
    its tensors.
    """

    def __init__(self, kept_results: float = 1.0) -> None:
        super().__init__(kept_results)
        self.run = 0
        self.stream: torch.cuda.Stream | None = None
        self.buffers = _HostBuffers()
        self._stored: weakref.WeakKeyDictionary[_HostTensors, None] = weakref.WeakKeyDictionary()  # in forward's order

    def begin_run(self) -> None:
        self.run += 1
        self._release_all_but(self.run)

    def put(self, *tensors: Tensor) -> StoredTensors:
        device = tensors[0].device
        if device.type == "cuda" and self.stream is None:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stored = _HostTensors(tensors, self)
        self._stored[stored] = None
        return stored

    def fetch(self, run: int) -> None:
        """Fetch the tensors of `run` and of the run before it; release the device memory of all others."""
        self._release_all_but(run)
        for wanted in (run, run - 1):
            for stored in list(self._stored):
                if stored.run == wanted:
                    stored.fetch()

    def _release_all_but(self, run: int) -> None:
        for stored in list(self._stored):
            if stored.run not in (run, run - 1):
                stored.release_device()


class _HostBuffers:
    """Host buffers that are allocated once and reused in every step.

    Torch caches pinned memory too, but reuses a block only after the host has seen that the device read it. If the host
    runs ahead of the device (many micro-batches per step), torch would pin more. Here all copies use one stream, and
    its order suffices: a buffer is free as soon as its last copy has been issued.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def take(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return a buffer, and a view of it with the shape, dtype and strides of a copy of `like`.

        Sizes are powers of two, as torch's pinned memory has them, so packs of unequal lengths share buffers.
        """
        size = like.numel() * like.element_size()
        rounded = 1 << max(0, size - 1).bit_length()
        free = self._free.setdefault(rounded, [])
        if not free:
            free.append(torch.empty(rounded, dtype=torch.uint8, pin_memory=like.device.type == "cuda"))
        buffer = free.pop()
        strides = torch.empty_like(like, device="meta").stride()  # kernels depend on them
        return buffer, buffer[:size].view(like.dtype).as_strided(like.shape, strides)

    def release(self, buffer: Tensor) -> None:
        self._free[buffer.numel()].append(buffer)


class _HostTensors(StoredTensors):
    """Tensors of one layer run on their way to the host, on the host, or on their way back."""

    def __init__(self, tensors: tuple[Tensor, ...], store: HostStore) -> None:
        super().__init__(tensors)
        self.run = store.run
        self._store, self._stream = store, store.stream
        self._device = tensors[0].device
        self._copied: torch.cuda.Event | None = None
        taken = [store.buffers.take(x) for x in tensors]
        self._buffers, self._on_host = [buffer for buffer, _ in taken], [view for _, view in taken]
        self._copy(tensors, self._on_host)

    def take(self) -> tuple[Tensor, ...]:
        self._store.fetch(self.run)
        self._release_host()
        return super().take()

    def fetch(self) -> None:
        if self._on_device is None and self._on_host:
            self._on_device = tuple(torch.empty_like(x, device=self._device) for x in self._on_host)
            self._copy(self._on_host, self._on_device)

    def release_device(self) -> None:
        """Free the device memory.

        The current stream waits for the copy, which finished long ago. So the memory is free for the next operations
        however far the host is ahead; it need not wait until the host has seen the end of the copy.
        """
        if self._on_host:
            self._wait()
            self._on_device = None

    def __del__(self) -> None:  # if no backward took them, a copy may be in flight
        self._release_host()

    def _release_host(self) -> None:
        self._wait()
        for buffer in self._buffers:
            self._store.buffers.release(buffer)
        self._buffers, self._on_host = [], []

    def _wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def _copy(self, sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        if self._stream is None:
            for x, copy in zip(sources, copies, strict=True):
                copy.copy_(x)
            return
        # Copies to the device wait too: operations queued on the current stream may still read the new memory.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for x, copy in zip(sources, copies, strict=True):
                copy.copy_(x, non_blocking=True)
        self._copied = self._stream.record_event()


@lru_cache(maxsize=64)
def first_tokens(mask: Mask, layout: Layout, rank: int, kept: float, device: torch.device) -> tuple[Mask, Tensor]:
    """Return the mask of the queries whose results are not kept, and the slots of a rank's other queries.

    They are the first tokens of each document on each rank, or of each document where ranks hold every n-th token.
    """
    spans = [(0, 0)]
    strided = any(span.step != 1 for of in layout.spans for span in of)
    for start, stop, _ in mask.documents:
        for of in [[range(start, stop)]] if strided else layout.spans:
            own = [range(max(start, span.start), min(stop, span.stop)) for span in of]
            left = int((1 - kept) * sum(map(len, own)))
            for tokens in own:
                spans += [(tokens.start, tokens[:left].stop)] if tokens[:left] else []
                left -= min(left, len(tokens))
    spans.sort()
    starts, stops = numpy.array(spans).T
    tokens_here = numpy.fromiter(layout.tokens(rank), numpy.int64, layout.num_tokens(rank))
    slots = numpy.flatnonzero(tokens_here >= stops[numpy.searchsorted(starts, tokens_here, "right") - 1])
    return mask.of_queries(spans[1:]), torch.from_numpy(slots).to(device)


class AttentionTape:
    """Stores the input of one layer run, and records and replays its attention results.

    A tape belongs to one run of one layer with one micro-batch, so any number of micro-batches may be in flight.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        store.begin_run()
        self._results: deque[StoredTensors] = deque()
        self.replaying = False

    def storing_input(self, layer_input: Tensor) -> saved_tensors_hooks:
        """Return a context in which autograd saves the layer's input `[s, b, h]` in the store, all else unchanged."""
        stored = self._store.put(layer_input.detach())
        address = layer_input.data_ptr()  # a reference to the tensor would keep its memory alive

        def save(x: Tensor) -> Tensor | StoredTensors:
            return stored if x.data_ptr() == address else x

        return saved_tensors_hooks(save, lambda saved: saved.take()[0] if isinstance(saved, StoredTensors) else saved)

    def rewind(self) -> None:
        """End the recording: later calls of `attend` replay it."""
        self.replaying = True

    def attend(
        self,
        attention: ContextParallelAttention,
        qkv: tuple[Tensor, Tensor, Tensor],
        *,
        mask: Mask,
        scale: float | None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Return `attention(*qkv, ...)`.

        It is computed without a graph and recorded, or after `rewind` replayed with a graph. A result can be replayed
        once; the tape then drops it. The part that is not kept is computed again, without a graph as well.

        Raises:
            RuntimeError: the replay has more calls than the recording.
        """
        share, here = self._store.kept_results, (attention.layout(mask), attention.rank)
        first, rows = (None, None) if share == 1 else first_tokens(mask, *here, share, qkv[0].device)
        if not self.replaying:
            result = attention.forward(*qkv, mask=mask, scale=scale, sink=sink)
            kept = result if rows is None else [x.index_select(0, rows) for x in result]
            self._results.append(self._store.put(*kept))
            return result.out
        if not self._results:
            raise RuntimeError(f"the result of an attention call {_TAKEN_TWICE}")
        result = AttentionResult(*self._results.popleft().take())
        if first is not None and rows is not None:
            whole = attention.forward(*qkv, mask=first, scale=scale, sink=sink)
            result = AttentionResult(*(x.index_copy_(0, rows, part) for x, part in zip(whole, result, strict=True)))
        return attention(*qkv, mask=mask, scale=scale, sink=sink, result=result)
