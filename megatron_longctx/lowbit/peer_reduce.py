"""All-reduce and reduce-scatter over peer memory, each in one kernel instead of two collectives and four kernels.

In two steps, the results have the same bits as `quantized.all_reduce`. Small tensors take one step: every rank
packs its values once and sends all of them to all ranks, and each rank sums them. This waits once instead of twice and
quantizes once instead of twice. Without bits, values are sent unquantized and summed in fp32 in the order of ranks. In
each case, all ranks get the same bits. `quantized` checks the arguments.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import check_value
from ..core.comm.collectives import PeerMemoryError, all_or_none
from ..core.comm.symmetric import why_no_peer_memory
from ..core.errors import refuse
from .peer_memory import PeerMemory, allocate_peer_memory
from .quantize import Format, QuantFormat, RawFormat

logger = logging.getLogger(__name__)

Forms = tuple[QuantFormat, QuantFormat] | None

HALF_BYTES = 64 * 2**20
"""The size of each half of a rank's memory. Larger tensors are reduced in pieces."""
_REMEDY = "Choose reduction.transport=collective, which needs none."
_EXTRA_ONE_STEP_BYTES = 2**20
"""The bytes that one step may send more than two steps do: about what links carry in the time of a second wait."""

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

    def all_reduce(self, x: Tensor, out: Tensor, forms: Forms) -> None:
        """Sum all ranks' `x` into `out`, in the faster of one and two steps by the bytes that each sends.

        Args:
            x, out: `[N]` contiguous, N > 0; may be the same tensor.
            forms: of the values and of their sums; None for unquantized values. One step uses only the first.
        """
        pair = forms or _raw(x)
        first, n = pair[0], self._memory.world
        num_bytes = first.message_bytes(x.numel())
        fits = n * num_bytes <= self._memory.half_bytes
        self._in_order(x.device)
        with torch.no_grad():
            if fits and num_bytes * (n - 1) * (n - 2) / n <= _EXTRA_ONE_STEP_BYTES:
                self._kernels.one_step(self._memory, x, out, first)
                return
            for part in self._pieces(x.numel(), pair, n):
                chunk = -(-(part.stop - part.start) // (n * first.group_size)) * first.group_size
                self._kernels.two_step(self._memory, x[part], out[part], pair, chunk=chunk, stride=chunk)

    def all_gather(self, x: Tensor) -> Tensor | None:
        """Return the ranks' contiguous `[..., w]` side by side, `[..., n w]`; None if the memory has no room for it."""
        n, form = self._memory.world, RawFormat(x.dtype.itemsize)
        if not x.numel() or n * form.message_bytes(x.numel()) > self._memory.half_bytes:
            return None
        self._in_order(x.device)
        out = x.new_empty(*x.shape[:-1], n * x.shape[-1])
        with torch.no_grad():
            self._kernels.one_step(self._memory, x, out, form, width=x.shape[-1])
        return out

    def reduce_scatter(self, x: Tensor, out: Tensor, forms: Forms) -> None:
        """Sum this rank's shard of all ranks' `x` into `out`. Call `quantized.reduce_scatter`."""
        pair = forms or _raw(x)
        self._in_order(x.device)
        with torch.no_grad():
            for part in self._pieces(out.numel(), pair, 1):
                self._kernels.two_step(
                    self._memory, x[part.start :], out[part], pair, chunk=part.stop - part.start, stride=out.numel(),
                    scatter=True,
                )  # fmt: skip

    def _pieces(self, numel: int, forms: tuple[Format, Format], chunks: int) -> list[slice]:
        """Divide `numel` elements, in groups of `chunks` chunks, into the fewest similar pieces that fit the memory."""
        group_bytes = sum(form.message_bytes(16 * form.group_size) // 16 for form in forms)
        groups = (self._memory.half_bytes // self._memory.world - 32) // group_bytes  # 32: two messages are rounded up
        whole = chunks * forms[0].group_size
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


def _raw(x: Tensor) -> tuple[RawFormat, RawFormat]:
    return RawFormat(x.dtype.itemsize), RawFormat(x.dtype.itemsize)


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
        reason = why_no_peer_memory(group, device)
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
