"""All-reduce and reduce-scatter of low-bit integers in two steps: Flash Communication, section 3.2.

Every rank quantizes the chunk of each other rank and sends it straight there (all-to-all); each sums its chunk in fp32,
quantizes the sum and gives it to all (all-gather). Whatever the number of ranks, a value is quantized twice and summed
once, where a ring would do so at every hop. With bits=6, the paper's INT6, sums are gathered in 8 bits and what is
summed travels in 4: the second quantization cannot average out over ranks.

The error of an element is at most half a step of its group on every rank, and half a step of the sum's group
(`lowbit.quantize.error_bound`). All ranks end with the same bits, this rank's own chunk included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.p2p import P2PTransport
from ..errors import refuse
from .quantize import DTYPES, QuantFormat, dequantize, quantize, requantize_sum, sum_quantized

BITS = (8, 6, 4)
# torch 2.13 gave it a new name, and warns of the old one.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def formats(
    dtype: torch.dtype, bits: int, group_size: int = 128, symmetric: bool = False
) -> tuple[QuantFormat, QuantFormat]:
    """The formats of the two steps: of what is summed, and of the sums.

    Ranges have bf16 ends for bf16 values and fp32 ends for others, which bf16 would coarsen.

    Raises:
        ValueError: bits, a group size or a dtype that is not offered.
    """
    if bits not in BITS:
        raise ValueError(f"bits={bits}: expected one of 8, 6 (4 to sum, 8 to gather), 4. Choose one of these.")
    if dtype not in DTYPES:
        raise ValueError(f"a tensor of {dtype}: expected bf16, fp16 or fp32. Convert it.")
    ends = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    first, second = {8: (8, 8), 6: (4, 8), 4: (4, 4)}[bits]
    return QuantFormat(first, group_size, symmetric, ends), QuantFormat(second, group_size, symmetric, ends)


def all_reduce(
    x: Tensor,
    group: dist.ProcessGroup,
    *,
    bits: int = 8,
    group_size: int = 128,
    symmetric: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The sum of every rank's `x`, about the same on all and exactly equal between them.

    Args:
        x: any shape (the same on all ranks) and strides; bf16, fp16 or fp32. Alone in its group a rank gets it back
            unquantized.
        group: NCCL for CUDA tensors, gloo for CPU tensors.
        bits: 8, 6 or 4.
        group_size: neighbours (of x flattened) that share a range: 32, 64 or 128.
        symmetric: ranges around zero.
        out: contiguous, of x's shape and dtype; may be `x` itself. None for a new tensor.

    Raises:
        ValueError: an argument that does not fit, before anything is sent.
    """
    first, second = formats(x.dtype, bits, group_size, symmetric)
    out = output_like(x, x.shape, out)
    n = dist.get_world_size(group)
    if n == 1 or x.numel() == 0:
        return out.copy_(x) if out is not x else out
    # Whole groups, so that only the last chunk is ragged.
    chunk = -(-x.numel() // (n * group_size)) * group_size
    received = _to_their_ranks(quantize(x.reshape(-1), n, chunk, first), group)
    summed = requantize_sum(received, chunk, first, second)
    gathered = torch.empty(n * summed.numel(), dtype=torch.uint8, device=x.device)
    _all_gather(gathered, summed, group=group)
    dequantize(gathered.view(n, -1), chunk, second, out.view(-1))
    return out


def reduce_scatter(
    x: Tensor,
    group: dist.ProcessGroup,
    *,
    bits: int = 8,
    group_size: int = 128,
    symmetric: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """This rank's share, along the first dimension, of the sum of every rank's `x`.

    It is the first step of `all_reduce` alone: bits=6 sends the same as bits=4.

    Args:
        x: `[n * s, ...]` (the same on all ranks), any strides; bf16, fp16 or fp32.
        out: contiguous `[s, ...]` of x's dtype; None for a new tensor.
        The others: as for `all_reduce`.

    Raises:
        ValueError: an argument that does not fit, before anything is sent.
    """
    form, _ = formats(x.dtype, bits, group_size, symmetric)
    n = dist.get_world_size(group)
    out = share_like(x, n, out)
    if n == 1 or x.numel() == 0:
        return out.copy_(x)
    chunk = out.numel()
    received = _to_their_ranks(quantize(x.reshape(-1), n, chunk, form), group)
    sum_quantized(received, chunk, form, out.view(-1))
    return out


def _to_their_ranks(messages: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Message r to rank r; row r of the result is from rank r."""
    received = torch.empty_like(messages)
    if messages.is_cuda:
        dist.all_to_all_single(received, messages, group=group)
        return received
    # One peer at a time: flows from all to all at once share NICs unevenly, which over TCP cost a fifth of their rate.
    transport = P2PTransport(group, messages.device)
    n, rank = transport.world, transport.rank
    received[rank] = messages[rank]
    for shift in range(1, n):
        to, source = (rank + shift) % n, (rank - shift) % n
        transport.wait(transport.start([(messages[to], to)], [(received[source], source)]))
    return received


def share_like(x: Tensor, n: int, out: Tensor | None = None) -> Tensor:
    """`out`, if it can hold an n-th of `x` along the first dimension, or a new tensor; ValueError if it cannot."""
    if x.ndim == 0 or x.shape[0] % n:
        raise refuse("x", tuple(x.shape), f"a first dimension that {n} ranks divide", "Pad it, or use all_reduce.")
    return output_like(x, torch.Size((x.shape[0] // n, *x.shape[1:])), out)


def output_like(x: Tensor, shape: torch.Size, out: Tensor | None) -> Tensor:
    """`out`, if it can hold a result of `shape` for `x`, or a new tensor; ValueError if it cannot."""
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.shape != shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise ValueError(
            f"out of shape {tuple(out.shape)}, {out.dtype}, on {out.device}, strides {out.stride()}: expected a "
            f"contiguous {tuple(shape)} in {x.dtype} on {x.device}. Leave it out for a new tensor."
        )
    return out
