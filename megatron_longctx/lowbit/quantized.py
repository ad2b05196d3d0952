"""All-reduce and reduce-scatter of low-bit integers in two steps: Flash Communication, section 3.2.

Every rank quantizes a chunk for each other rank and sends it there directly (all-to-all). Each rank sums its chunk in
fp32, quantizes the sum and sends it to all (all-gather). For any number of ranks, a value is thus quantized twice and
summed once; a ring would do both in every hop. bits=6, the paper's INT6, sends 4 bits to sum and 8 bits to gather,
because errors of the second quantization do not average out over ranks.

An element is off by at most half a step of its group on every rank plus half a step of the sum's group. All ranks get
the same bits, including a rank's own chunk.

Over peer memory, each is one kernel instead of two collectives and four kernels, with the same bits. Small tensors take
one step there: every rank packs its values once and sends all of them to all ranks, and each rank sums them. This waits
once instead of twice and quantizes once instead of twice. Without bits, values are sent unquantized and summed in fp32
in the order of ranks.
"""

from __future__ import annotations

import functools
import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import check_value
from ..core.comm.collectives import PeerMemoryError, all_gather_single, all_or_none
from ..core.comm.p2p import P2PTransport
from ..core.comm.symmetric import why_no_peer_memory
from ..core.errors import refuse
from ..core.kernels.fused import load_fused
from .peer_memory import PeerMemory, allocate_peer_memory
from .quantize import DTYPES, Format, QuantFormat, RawFormat, dequantize, quantize, requantize_sum, sum_quantized

logger = logging.getLogger(__name__)

Forms = tuple[QuantFormat, QuantFormat] | None

HALF_BYTES = 64 * 2**20
"""The size of each half of a rank's memory. Larger tensors are reduced in pieces."""
_REMEDY = "Choose reduction.transport=collective, which needs none."
_MAX_NORM_WIDTH = 16384
"""The most elements of a row that a block normalizes without running out of registers."""
_MAX_NORM_BYTES = 2**22
"""The most bytes that a rank sums and normalizes in one kernel: with more, the sum alone, whose blocks do not wait for
whole rows, and a kernel for the norm take less time."""
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
        pair, n = forms or _raw(x), self._memory.world
        self._in_order(x.device)
        with torch.no_grad():
            if self._takes_one_step(x, pair[0]):
                self._kernels.one_step(self._memory, x, out, pair[0])
                return
            for part in self._pieces(x.numel(), pair, n):
                whole = n * pair[0].group_size
                chunk = -(-(part.stop - part.start) // whole) * pair[0].group_size
                self._kernels.two_step(self._memory, x[part], out[part], pair, chunk=chunk, stride=chunk)

    def _takes_one_step(self, x: Tensor, form: Format) -> bool:
        num_bytes, n = form.message_bytes(x.numel()), self._memory.world
        fits = n * num_bytes <= self._memory.half_bytes
        return fits and num_bytes * (n - 1) * (n - 2) / n <= _EXTRA_ONE_STEP_BYTES

    def sum_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Run `sum_norm_triton.sum_norm` over the ranks; None, and nothing has changed, if `all_reduce` of such a
        tensor takes two steps, or the kernel does not take it."""
        kernel = _fused_norm() if _takes_norm(x, residual, weight) else None
        if kernel is None or x.nbytes > _MAX_NORM_BYTES or not self._takes_one_step(x, _raw(x)[0]):
            return None
        self._in_order(x.device)
        with torch.no_grad():
            return kernel.sum_norm(self._memory, x, residual, weight, eps)  # type: ignore[no-any-return]

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


_fused_norm = functools.partial(load_fused, f"{__package__}.sum_norm", "norms")


def _takes_norm(x: Tensor, residual: Tensor, weight: Tensor) -> bool:
    alike = x.dtype == residual.dtype == weight.dtype and x.dtype in DTYPES and 0 < weight.numel() <= _MAX_NORM_WIDTH
    return alike and x.is_cuda and x.numel() > 0 and x.is_contiguous() and residual.is_contiguous()


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """Run `sum_norm_triton.sum_norm` on one rank; None, and nothing has changed, on CPUs and for other dtypes."""
    kernel = _fused_norm() if _takes_norm(x, residual, weight) else None
    return None if kernel is None else kernel.sum_norm(None, x, residual, weight, eps)


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


_STEP_BITS: dict[int | None, tuple[int, int]] = {8: (8, 8), 6: (4, 8), 4: (4, 4)}


@functools.cache
def formats(
    dtype: torch.dtype, bits: int | None, group_size: int = 128, symmetric: bool = False
) -> tuple[QuantFormat, QuantFormat]:
    """Return the formats of the two steps: of the values, and of their sums.

    The ends of ranges are bf16 for bf16 values, and fp32 for others, whose ranges bf16 would widen.

    Raises:
        ValueError: unsupported bits, group size or dtype.
    """
    if bits not in _STEP_BITS:
        raise refuse("bits", bits, "one of 8, 6 (4 to sum, 8 to gather), 4", "Choose one of these.")
    if dtype not in DTYPES:
        raise ValueError(f"a tensor of {dtype}: expected bf16, fp16 or fp32. Convert it.")
    ends = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    first, second = (QuantFormat(each, group_size, symmetric, ends) for each in _STEP_BITS[bits])
    return first, second


def all_reduce(
    x: Tensor,
    group: dist.ProcessGroup,
    *,
    bits: int | None = 8,
    group_size: int = 128,
    symmetric: bool = False,
    out: Tensor | None = None,
    peers: PeerReduction | None = None,
) -> Tensor:
    """Return the approximate sum of all ranks' `x`, with the same bits on all ranks.

    Args:
        x: the same shape on all ranks, any strides; bf16, fp16 or fp32. A group of one rank does not quantize it.
        group: NCCL for CUDA tensors, gloo for CPU tensors.
        bits: 8, 6 or 4. None for unquantized values, only with `peers`; they are summed in fp32 in the order of ranks.
        group_size: 32, 64 or 128 neighbouring elements (of x flattened) that share a range.
        symmetric: whether ranges are symmetric around zero.
        out: contiguous, of x's shape and dtype; may be `x` itself. None for a new tensor.
        peers: sums over peer memory instead of collectives.

    Raises:
        ValueError: an unsuitable argument, before anything is sent.
    """
    unquantized = bits is None and peers is not None
    first, second = formats(x.dtype, 8 if unquantized else bits, group_size, symmetric)
    out = output_like(x, x.shape, out)
    n = dist.get_world_size(group)
    if n == 1 or x.numel() == 0:
        return out.copy_(x) if out is not x else out
    if peers is not None:
        peers.all_reduce(x.reshape(-1), out.view(-1), None if unquantized else (first, second))
        return out
    # Chunks of whole groups; only the last chunk may be shorter.
    chunk = -(-x.numel() // (n * group_size)) * group_size
    received = _all_to_all(quantize(x.reshape(-1), n, chunk, first), group)
    summed = requantize_sum(received, chunk, first, second)
    gathered = torch.empty(n * summed.numel(), dtype=torch.uint8, device=x.device)
    all_gather_single(gathered, summed, group=group)
    dequantize(gathered.view(n, -1), chunk, second, out.view(-1))
    return out


def reduce_scatter(
    x: Tensor,
    group: dist.ProcessGroup,
    *,
    bits: int | None = 8,
    group_size: int = 128,
    symmetric: bool = False,
    out: Tensor | None = None,
    peers: PeerReduction | None = None,
) -> Tensor:
    """Return this rank's shard, along the first dimension, of the approximate sum of all ranks' `x`.

    This is the first step of `all_reduce`, so bits=6 is the same as bits=4.

    Args:
        x: `[n * s, ...]`, the same shape on all ranks, any strides; bf16, fp16 or fp32.
        out: contiguous `[s, ...]` of x's dtype; None for a new tensor.
        Others: see `all_reduce`.

    Raises:
        ValueError: an unsuitable argument, before anything is sent.
    """
    unquantized = bits is None and peers is not None
    first, second = formats(x.dtype, 8 if unquantized else bits, group_size, symmetric)
    n = dist.get_world_size(group)
    out = shard_like(x, n, out)
    if n == 1 or x.numel() == 0:
        return out.copy_(x)
    if peers is not None:
        peers.reduce_scatter(x.reshape(-1), out.view(-1), None if unquantized else (first, second))
        return out
    chunk = out.numel()
    sum_quantized(_all_to_all(quantize(x.reshape(-1), n, chunk, first), group), chunk, first, out.view(-1))
    return out


def _all_to_all(messages: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row r of `messages` to rank r, and return the received rows by rank."""
    received = torch.empty_like(messages)
    if messages.is_cuda:
        dist.all_to_all_single(received, messages, group=group)
        return received
    # One peer at a time: simultaneous TCP flows between all ranks share NICs unevenly, which cost a fifth of the rate.
    transport = P2PTransport(group, messages.device)
    n, rank = transport.world, transport.rank
    received[rank] = messages[rank]
    for shift in range(1, n):
        to, source = (rank + shift) % n, (rank - shift) % n
        transport.wait(transport.start([(messages[to], to)], [(received[source], source)]))
    return received


def shard_like(x: Tensor, n: int, out: Tensor | None = None) -> Tensor:
    """Return `out`, or a new tensor for an n-th of `x` along the first dimension. ValueError if `out` is unsuitable."""
    if x.ndim == 0 or x.shape[0] % n:
        raise refuse("x", tuple(x.shape), f"a first dimension that {n} ranks divide", "Pad it, or use all_reduce.")
    return output_like(x, torch.Size((x.shape[0] // n, *x.shape[1:])), out)


def output_like(x: Tensor, shape: torch.Size, out: Tensor | None) -> Tensor:
    """Return `out`, or a new tensor of `shape` with x's dtype and device. ValueError if `out` is unsuitable."""
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.shape != shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise ValueError(
            f"out of shape {tuple(out.shape)}, {out.dtype}, on {out.device}, strides {out.stride()}: expected a "
            f"contiguous {tuple(shape)} in {x.dtype} on {x.device}. Leave it out for a new tensor."
        )
    return out
