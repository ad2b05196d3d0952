"""Gathers of the weights that ranks share: over peer memory, or by collectives.

Weights never change, so a rank that reads them from its peers waits for no other, and the copy engine needs no SM.
NCCL's rings take SMs, and matrices that are divided by columns are then copied once more.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.comm.collectives import PeerMemoryError, all_gather_single
from ..core.comm.device import synchronize
from ..core.comm.symmetric import allocate, driver, free_cached_memory
from .prefetch import Empty

logger = logging.getLogger(__name__)

Ranks = tuple[range, dist.ProcessGroup]
"""Some ranks of the group that shares weights, and the group of these."""
Copy = Callable[[ctypes.c_void_p | None], object]
"""Copies on a stream; None on CPUs."""

_ALIGN = 256
_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class PeerWeights:
    """The matrices of all ranks of a group, of one layer, which this rank copies to the same memory every time.

    Args:
        matrices: keyed by name and by rank, of one shape each; a rank's own ones too.
        rank: this one.
        owner: of the memory.
    """

    is_collective = False

    def __init__(self, matrices: Mapping[str, Sequence[Tensor]], rank: int, owner: object = None) -> None:
        self._matrices, self._rank, self._owner = matrices, rank, owner
        self._copies: list[Copy] = []

    @staticmethod
    def of(own: Mapping[str, Tensor], group: dist.ProcessGroup, device: torch.device) -> PeerWeights:
        """Move a rank's own matrices to memory that the others read. Collective; they may read it after a barrier.

        Raises PeerMemoryError: a rank cannot allocate it; raised by all ranks alike.
        """
        *starts, size = accumulate((-(-x.nbytes // _ALIGN) * _ALIGN for x in own.values()), initial=0)
        free_cached_memory(device, size)
        remedy = "Choose inference.transport=p2p, which needs none."
        with torch.inference_mode(False):
            (handle,) = allocate(group, device, [size], remedy, "sharing weights over peer memory")
            buffers = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())]
            matrices = {
                name: [each[start : start + x.nbytes].view(x.dtype).view(x.shape) for each in buffers]
                for (name, x), start in zip(own.items(), starts, strict=True)
            }
        for name, x in own.items():
            x.data = matrices[name][group.rank()].copy_(x.detach())
        return PeerWeights(matrices, group.rank(), handle)

    def add_rows(self, name: str, of: Ranks, into: Tensor, _: Empty) -> None:
        """Let `gather` write the rows of some ranks, one rank after another: contiguous `[ranks * rows, …]`."""
        self._add(name, of[0], list(into.view(len(of[0]), -1, *into.shape[1:])))

    def add_columns(self, name: str, of: Ranks, into: Tensor, _: Empty) -> None:
        """Let `gather` write the columns of some ranks, one after another: contiguous `[rows, ranks * columns]`."""
        self._add(name, of[0], into.view(len(into), len(of[0]), -1).unbind(1))

    def gather(self) -> None:
        """Copy, on the current stream, all that was added, to the same memory as before."""
        device = next(iter(self._matrices.values()))[self._rank].device
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else None
        for copy in self._copies:
            copy(stream)

    def _add(self, name: str, ranks: range, parts: Sequence[Tensor]) -> None:
        # Not all ranks begin with the same one.
        order = sorted(range(len(ranks)), key=lambda i: (ranks[i] - self._rank) % len(ranks))
        self._copies += [copier(self._matrices[name][ranks[i]], parts[i]) for i in order]


class GroupWeights:
    """The same by collectives, in which all ranks of a group take part. own: a rank's matrices of one layer."""

    is_collective = True

    def __init__(self, own: Mapping[str, Tensor]) -> None:
        self._own = own
        self._copies: list[Callable[[], object]] = []

    def add_rows(self, name: str, of: Ranks, into: Tensor, _: Empty) -> None:
        self._copies.append(partial(all_gather_single, into, self._own[name].detach(), group=of[1]))

    def add_columns(self, name: str, of: Ranks, into: Tensor, empty: Empty) -> None:
        height, width = self._own[name].shape
        parts = empty("columns", (len(of[0]) * height, width), into)
        self.add_rows(name, of, parts, empty)
        by_rank = parts.view(-1, height, width).transpose(0, 1)
        self._copies.append(partial(into.view(height, -1, width).copy_, by_rank))

    def gather(self) -> None:
        for copy in self._copies:
            copy()


def share_layers(
    layers: Sequence[Mapping[str, Tensor]], group: dist.ProcessGroup, device: torch.device, over_peers: bool
) -> list[PeerWeights | GroupWeights]:
    """Return the gathers of every layer, from a rank's own matrices. Collective.

    Layers are gathered by collectives from the first one on for which a rank has no peer memory left. Those before it
    have moved, so they stay where they are.
    """
    found: list[PeerWeights | GroupWeights] = []
    try:
        for own in layers if over_peers else ():
            found.append(PeerWeights.of(own, group, device))
    except PeerMemoryError as error:  # on all ranks alike
        if group.rank() == 0:
            which = f"{len(layers) - len(found)} of {len(layers)} layers"
            logger.warning("prompts gather the weights of %s by collectives, not over peer memory: %s", which, error)
    if found:
        synchronize(device)
        dist.barrier(group)
    return found + [GroupWeights(own) for own in layers[len(found) :]]


class _Block(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        *(
            (f"{side}_{name}", kind)
            for side in ("source", "target")
            for name, kind in (
                *(("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("memory", ctypes.c_uint), ("host", ctypes.c_void_p)),
                *(("device", ctypes.c_uint64), ("array", ctypes.c_void_p), ("pitch", ctypes.c_size_t)),
            )
        ),
        *(("width", ctypes.c_size_t), ("height", ctypes.c_size_t)),
    )


def copier(source: Tensor, into: Tensor) -> Copy:
    """Return a function that copies contiguous rows into rows whose elements are neighbours; on GPUs on a stream and by
    the copy engine, where torch would copy parts of rows by a kernel. The host prepares its arguments only once."""
    if not into.is_cuda:
        return lambda _: into.copy_(source)
    if into.is_contiguous():
        addresses = ctypes.c_uint64(into.data_ptr()), ctypes.c_uint64(source.data_ptr())
        call = partial(driver().cuMemcpyDtoDAsync_v2, *addresses, ctypes.c_size_t(source.nbytes))
    else:
        size = source.element_size()
        block = _Block(width=source.shape[1] * size, height=len(source))
        for side, x in (("source", source), ("target", into)):
            setattr(block, f"{side}_memory", _DEVICE)
            setattr(block, f"{side}_device", x.data_ptr())
            setattr(block, f"{side}_pitch", x.stride(0) * size)
        call = partial(driver().cuMemcpy2DAsync_v2, ctypes.byref(block))

    def copy(stream: ctypes.c_void_p | None) -> None:
        if code := call(stream):
            raise RuntimeError(f"a copy of {tuple(source.shape)} between GPUs returned CUDA error {code}")

    return copy


def rows_of_slice(x: Tensor, dim: int, heads: tuple[int, int], own: int, slices: int) -> Tensor:
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
