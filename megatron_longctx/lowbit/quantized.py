"""All-reduce and reduce-scatter of low-bit integers in two steps: Flash Communication, section 3.2.

Every rank quantizes a chunk for each other rank and sends it there directly (all-to-all). Each rank sums its chunk in
fp32, quantizes the sum and sends it to all (all-gather). For any number of ranks, a value is thus quantized twice and
summed once; a ring would do both in every hop. bits=6, the paper's INT6, sends 4 bits to sum and 8 bits to gather,
because errors of the second quantization do not average out over ranks.

An element is off by at most half a step of its group on every rank plus half a step of the sum's group. All ranks get
the same bits, including a rank's own chunk.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.comm.collectives import all_gather_single
from ..core.comm.p2p import P2PTransport
from ..core.errors import refuse
from .peer_reduce import PeerReduction
from .quantize import DTYPES, QuantFormat, dequantize, quantize, requantize_sum, sum_quantized

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
