"""All-reduce and reduce-scatter over peer memory, each in one kernel instead of two collectives and four kernels.

In two steps, the results have the same bits as those of `quantized.all_reduce`. Small tensors take one step: every rank
packs its values once and sends all of them to all ranks, and each rank sums them. This waits once instead of twice and
quantizes once instead of twice. Without bits, values are sent unquantized and summed in fp32 in the order of ranks. In
each case, all ranks get the same bits.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import PeerMemoryError, all_or_none
from ..comm.peer_memory import PeerMemory, allocate_peer_memory
from ..comm.symmetric import find_hosts
from ..config import check_value
from ..errors import refuse
from .quantize import Wire
from .quantized import formats, output_like, shard_like

logger = logging.getLogger(__name__)

HALF_BYTES = 64 * 2**20
"""The size of each half of a rank's memory. Larger tensors are reduced in pieces."""
_REMEDY = "Choose reduction.transport=collective, which needs none."
_EXTRA_ONE_STEP_BYTES = 2**20
"""The bytes that one step may send in addition to those of two: about what links carry in the time of a second wait."""

_SET_UP: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, tuple[PeerReduction | None, str | None]]] = (
    WeakKeyDictionary()
)
"""The reduction, or the reason why there is none, per group and device: all users of a group share the memory."""


class PeerReduction:
    """Reductions among GPUs of one host. All ranks make the same calls with the same sizes, in one order on the device.

    Calls can be captured in a CUDA graph after the same call has been made once, which compiles the kernel.
    """

    def __init__(self, memory: PeerMemory) -> None:
        from . import peer_kernels  # imports triton

        self._memory, self._kernels = memory, peer_kernels
        self._stream: Any = None

    def all_reduce(
        self,
        x: Tensor,
        *,
        bits: int | None = 8,
        group_size: int = 128,
        symmetric: bool = False,
        out: Tensor | None = None,
        steps: int | None = None,
    ) -> Tensor:
        """Return the sum of all ranks' `x`, with the same bits on all ranks.

        Arguments and errors are those of `quantized.all_reduce`, except:
            bits: None for unquantized values. In one step, 6 means 4.
            steps: 1 or 2, or None for the faster one by its bytes. One step refuses tensors that do not fit the memory.
        """
        wires = self._wires(x.dtype, bits, group_size, symmetric)
        out = output_like(x, x.shape, out)
        if self._memory.world == 1 or x.numel() == 0:
            return out.copy_(x) if out is not x else out
        flat, into = x.reshape(-1), out.view(-1)
        num_bytes = wires[0].message_bytes(flat.numel())
        fits = self._memory.world * num_bytes <= self._memory.half_bytes
        if steps is None:
            n = self._memory.world
            steps = 1 if fits and num_bytes * (n - 1) * (n - 2) / n <= _EXTRA_ONE_STEP_BYTES else 2
        if steps not in (1, 2) or (steps == 1 and not fits):
            raise ValueError(
                f"steps={steps} for {x.numel()} elements: expected 2, or 1 if every rank's {num_bytes} bytes fit into "
                f"{self._memory.half_bytes}. Leave it out."
            )
        self._in_order(x.device)
        with torch.no_grad():
            if steps == 1:
                self._kernels.one_step(self._memory, flat, into, wires[0])
                return out
            for part in self._pieces(flat.numel(), wires, self._memory.world):
                chunk = -(-(part.stop - part.start) // (self._memory.world * wires[0].group_size)) * wires[0].group_size
                self._kernels.two_step(self._memory, flat[part], into[part], wires, chunk=chunk, stride=chunk)
        return out

    def reduce_scatter(
        self,
        x: Tensor,
        *,
        bits: int | None = 8,
        group_size: int = 128,
        symmetric: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's shard of the sum. See `quantized.reduce_scatter`, and `all_reduce` for bits."""
        wires = self._wires(x.dtype, bits, group_size, symmetric)
        n = self._memory.world
        out = shard_like(x, n, out)
        if n == 1 or x.numel() == 0:
            return out.copy_(x)
        self._in_order(x.device)
        with torch.no_grad():
            flat, into, stride = x.reshape(-1), out.view(-1), out.numel()
            for part in self._pieces(stride, wires, 1):
                self._kernels.two_step(
                    self._memory, flat[part.start :], into[part], wires, chunk=part.stop - part.start, stride=stride,
                    scatter=True,
                )  # fmt: skip
        return out

    def _wires(self, dtype: torch.dtype, bits: int | None, group_size: int, symmetric: bool) -> tuple[Wire, Wire]:
        forms = formats(dtype, 8 if bits is None else bits, group_size, symmetric)
        first, second = (Wire(None if bits is None else form, dtype.itemsize) for form in forms)
        return first, second

    def _pieces(self, numel: int, wires: tuple[Wire, Wire], chunks: int) -> list[slice]:
        """Divide `numel` elements, in groups of `chunks` chunks, into the fewest similar pieces that fit the memory."""
        # Each rank has a message of each kind, whose length is rounded up.
        groups = (self._memory.half_bytes // self._memory.world - 32) // sum(wire.group_bytes for wire in wires)
        whole = chunks * wires[0].group_size
        count = -(-numel // (groups * whole))
        size = -(-numel // (count * whole)) * whole
        return [slice(first, min(first + size, numel)) for first in range(0, numel, size)]

    def _in_order(self, device: torch.device) -> None:
        """Make this call wait for earlier ones on another stream, because calls share memory and flags."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream


def peer_reduction(name: str, group: dist.ProcessGroup, device: torch.device) -> PeerReduction | None:
    """Return the reductions over peer memory of a group and device, or None for collectives. Collective.

    Args:
        name: `peer`, `collective`, or `auto` for peer memory if the GPUs can write each other's memory. If they cannot,
            rank 0 logs the reason once.

    Raises:
        ValueError: an unknown name, or `peer` where peer memory is not available.
    """
    check_value("reduction.transport", name)
    if name == "collective" or (name == "auto" and device.type != "cuda"):
        return None
    set_up = _SET_UP.setdefault(group, {})
    if device not in set_up:
        reason = find_hosts(group, device).reason
        set_up[device] = _set_up(group, device) if reason is None else (None, reason)
        if name == "auto" and set_up[device][0] is None and dist.get_rank(group) == 0:
            reason = set_up[device][1]
            logger.warning("low-bit reductions use all-to-all and all-gather, not peer memory: %s", reason)
    reduction, reason = set_up[device]
    if name == "peer" and reduction is None:
        expected = f"GPUs that can write each other's memory, but {reason}"
        raise refuse("reduction.transport", name, expected, "Choose auto.")
    return reduction


def _set_up(group: dist.ProcessGroup, device: torch.device) -> tuple[PeerReduction | None, str | None]:
    """Return the reduction if all ranks can set it up, otherwise the reason of one that cannot."""
    try:
        memory = allocate_peer_memory(group, device, HALF_BYTES, _REMEDY)
        return all_or_none(group, lambda: PeerReduction(memory), "setting up its kernels", "Install triton."), None
    except PeerMemoryError as error:
        return None, str(error)
