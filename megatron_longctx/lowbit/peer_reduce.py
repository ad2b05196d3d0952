"""All-reduce and reduce-scatter over peer memory: what `quantized` does with two collectives and four kernels, in one.

In two steps the results are those of `quantized.all_reduce` to the bit. Small tensors take one step: every rank gives
all its values to all, packed once, and each sums them itself, which waits once instead of twice and quantizes once
instead of twice. Without bits, values travel as they are and are summed in fp32 in the order of ranks; then too all
ranks end with the same bits.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collect import PeerMemoryError, all_or_none
from ..comm.hosts import find_hosts
from ..comm.peer_memory import PeerMemory, peer_memory
from ..config import check_value
from ..errors import refuse
from .quantize import Wire
from .quantized import formats, output_like, share_like

logger = logging.getLogger(__name__)

ROOM = 64 * 2**20
"""Bytes of each of the two halves of a rank's memory; what does not fit is reduced piece by piece."""
_REMEDY = "Choose reduction.transport=collective, which needs none."
_MORE_FOR_ONE_STEP = 2**20
"""Bytes that one step may send more than two: about what passes in the time of a second wait."""


_KEPT: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, tuple[PeerReduction | None, str | None]]] = (
    WeakKeyDictionary()
)
"""By group and device: what was set up, or why nothing was. Memory is shared by all who sum over the same ranks."""


class PeerReduction:
    """Reductions among GPUs of one host. All ranks make the same calls with the same sizes, in one order on the device.

    Calls can be captured in a CUDA graph once the same call has been made before (Triton compiles at the first).

    Args:
        memory: see `peer_memory`.
    """

    def __init__(self, memory: PeerMemory) -> None:
        from . import peer_kernels

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
        """The sum of every rank's `x`, exactly equal on all of them.

        Args and errors are those of `quantized.all_reduce`, besides:
            bits: None for unquantized. In one step, 6 is 4.
            steps: 1 or 2, of which one step refuses more than fits at once; None for the faster by its bytes.
        """
        wires = self._wires(x.dtype, bits, group_size, symmetric)
        out = output_like(x, x.shape, out)
        if self._memory.world == 1 or x.numel() == 0:
            return out.copy_(x) if out is not x else out
        flat, into = x.reshape(-1), out.view(-1)
        num_bytes = wires[0].message_bytes(flat.numel())
        fits = self._memory.world * num_bytes <= self._memory.room
        if steps is None:
            n = self._memory.world
            steps = 1 if fits and num_bytes * (n - 1) * (n - 2) / n <= _MORE_FOR_ONE_STEP else 2
        if steps not in (1, 2) or (steps == 1 and not fits):
            raise ValueError(
                f"steps={steps} for {x.numel()} elements: expected 2, or 1 if every rank's {num_bytes} bytes fit into "
                f"{self._memory.room}. Leave it out."
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
        """This rank's share, along the first dimension, of the sum of every rank's `x`: as `quantized.reduce_scatter`,
        with bits as for `all_reduce`."""
        wires = self._wires(x.dtype, bits, group_size, symmetric)
        n = self._memory.world
        out = share_like(x, n, out)
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
        """`numel` elements in as few parts of about the same size as fit, whole groups of `chunks` chunks each."""
        # A row of each message, and what its length is rounded up by.
        groups = (self._memory.room // self._memory.world - 32) // sum(wire.group_bytes for wire in wires)
        whole = chunks * wires[0].group_size
        count = -(-numel // (groups * whole))
        size = -(-numel // (count * whole)) * whole
        return [slice(first, min(first + size, numel)) for first in range(0, numel, size)]

    def _in_order(self, device: torch.device) -> None:
        """Calls share memory and flags: one on another stream waits for those before it."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream


def peer_reduction(name: str, group: dist.ProcessGroup, device: torch.device) -> PeerReduction | None:
    """Reductions over peer memory, or None where there are to be none. All ranks of `group` call it together; whoever
    asks for the same group and device gets the same.

    Args:
        name: `peer`; `collective` for none; `auto` for peer memory where GPUs can write each other's, and none
            elsewhere, said once with the reason.

    Raises:
        ValueError: an unknown name, or peer memory asked for where there is none.
    """
    check_value("reduction.transport", name)
    if name == "collective" or (name == "auto" and device.type != "cuda"):
        return None
    kept = _KEPT.setdefault(group, {})
    if device not in kept:
        reason = find_hosts(group, device).reason
        kept[device] = _set_up(group, device) if reason is None else (None, reason)
        if name == "auto" and kept[device][0] is None and dist.get_rank(group) == 0:
            reason = kept[device][1]
            logger.warning("low-bit reductions take all-to-all and all-gather, not peer memory: %s", reason)
    found, reason = kept[device]
    if name == "peer" and found is None:
        raise refuse(
            "reduction.transport", name, f"GPUs that can write each other's memory, but {reason}", "Choose auto."
        )
    return found


def _set_up(group: dist.ProcessGroup, device: torch.device) -> tuple[PeerReduction | None, str | None]:
    """Peer memory if all ranks could set it up, else the reason of one that could not."""
    try:
        memory = peer_memory(group, device, ROOM, _REMEDY)
        return all_or_none(group, lambda: PeerReduction(memory), "setting up its kernels", "Install triton."), None
    except PeerMemoryError as error:
        return None, str(error)
