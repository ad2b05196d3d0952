"""The weights that ranks share, in memory that all of them read.

They never change, so a rank that gathers a layer waits for no other, and the copy engine copies the others' parts
without an SM. NCCL's rings take SMs and need a copy for matrices that are divided by columns.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.comm.collectives import PeerMemoryError
from ..core.comm.device import synchronize
from ..core.comm.symmetric import allocate, driver, free_cached_memory

logger = logging.getLogger(__name__)

_ALIGN = 256
_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class PeerWeights:
    """The matrices of all ranks of a group, of one layer.

    Args:
        matrices: keyed by name and by rank, of one shape each; a rank's own ones too.
        rank: this one.
        owner: of the memory.
    """

    def __init__(self, matrices: Mapping[str, Sequence[Tensor]], rank: int, owner: object = None) -> None:
        self._matrices, self._rank, self._owner = matrices, rank, owner

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

    def gather_rows(self, name: str, ranks: range, into: Tensor) -> None:
        """Write the rows of some ranks, one rank after another, `[ranks * rows, …]`."""
        for i in self._from_own(ranks):
            part = self._matrices[name][ranks[i]]
            into.view(len(ranks), *part.shape)[i].copy_(part, non_blocking=True)

    def gather_columns(self, name: str, ranks: range, into: Tensor) -> None:
        """Write the columns of some ranks, one rank after another, `[rows, ranks * columns]`."""
        for i in self._from_own(ranks):
            part = self._matrices[name][ranks[i]]
            copy_block(part, into.view(len(part), len(ranks), -1)[:, i])

    def _from_own(self, ranks: range) -> Sequence[int]:
        """Return the places of ranks in the order to copy from them: not all ranks begin with the same one."""
        return sorted(range(len(ranks)), key=lambda i: (ranks[i] - self._rank) % len(ranks))


def share_layers(
    layers: Sequence[Mapping[str, Tensor]], group: dist.ProcessGroup, device: torch.device
) -> list[PeerWeights]:
    """Share the matrices of every layer. Collective. Return an empty list if there is no memory for that."""
    found = []
    try:
        for own in layers:
            found.append(PeerWeights.of(own, group, device))
    except PeerMemoryError as error:  # on all ranks alike
        if group.rank() == 0:
            logger.warning("prompts gather weights by collectives, not over peer memory: %s", error)
        found = []
    synchronize(device)
    dist.barrier(group)
    return found


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


def copy_block(source: Tensor, into: Tensor) -> None:
    """Copy `[rows, columns]`, whose columns are neighbours, on the current stream; on GPUs by the copy engine, where
    torch would copy by a kernel."""
    if not into.is_cuda:
        into.copy_(source)
        return
    size = source.element_size()
    block = _Block(width=source.shape[1] * size, height=len(source))
    for side, x in (("source", source), ("target", into)):
        setattr(block, f"{side}_memory", _DEVICE)
        setattr(block, f"{side}_device", x.data_ptr())
        setattr(block, f"{side}_pitch", x.stride(0) * size)
    stream = ctypes.c_void_p(torch.cuda.current_stream(into.device).cuda_stream)
    if code := driver().cuMemcpy2DAsync_v2(ctypes.byref(block), stream):
        raise RuntimeError(f"cuMemcpy2DAsync returned CUDA error {code} for {tuple(source.shape)}")


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
