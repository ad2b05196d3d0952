"""Keys and values as 8-bit integers, with a scale for every token and head: half the bytes of bf16 in messages and in
the cache."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..core.attention.kv_format import KVFormat, TensorSpec
from ..core.errors import refuse
from ..core.kernels.batched_copy import Pair
from ..core.kernels.fused import load_fused
from ..core.kernels.no_grad import no_grad

_fused = partial(load_fused, __name__, "packing keys and values")

_LEVELS = 127
SCALE_BYTES = torch.float32.itemsize
_SMALLEST_SCALE = 2.0**-126
"""The smallest scale that has a reciprocal in fp32; rows with smaller ones become zeros."""


def packed_shape(k: Tensor) -> tuple[int, ...]:
    """Return the shape that `pack_kv` returns for keys (and values) like `k`, `[t, b, g, d]`."""
    return (k.shape[0], 2, *k.shape[1:-1], k.shape[-1] + SCALE_BYTES)


@no_grad
def pack_kv(k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
    """Pack keys and values token by token into one tensor of bytes, which can be cut along tokens and heads.

    A row (one head of one token) has d signed bytes, symmetric around zero, and their scale in fp32. The error of an
    element is at most half a scale, which is its row's largest value / 254. Rows with an infinity or a NaN are unpacked
    as NaN throughout.

    Args:
        k, v: `[t, b, g, d]`, any float dtype and strides; 4 divides d.
        out: contiguous, is written and returned; None for a new tensor.

    Returns:
        `[t, 2, b, g, d + 4]` uint8.

    Raises:
        ValueError: a head dimension that 4 does not divide.
    """
    d = k.shape[-1]
    if d % SCALE_BYTES:
        raise ValueError(f"head dimension {d}: expected a multiple of {SCALE_BYTES} for 8-bit keys and values.")
    packed = torch.empty(packed_shape(k), dtype=torch.uint8, device=k.device) if out is None else out
    impl = _fused() if packed.is_cuda else None
    if packed.numel():
        (impl.pack_kv if impl else _pack_torch)(k, v, packed)
    return packed


@no_grad
def unpack_kv(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys and values of `pack_kv`, each `[t, b, g, d]` in `dtype`."""
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] - SCALE_BYTES, dtype=dtype, device=packed.device)
    impl = _fused() if packed.is_cuda else None
    if out.numel():
        (impl.unpack_kv if impl else _unpack_torch)(packed, out)
    k, v = out.unbind(1)
    return k, v


def _pack_torch(k: Tensor, v: Tensor, packed: Tensor) -> None:
    """Run `pack_kv` in plain PyTorch: the reference, and the way on CPU."""
    d = k.shape[-1]
    x = torch.stack((k, v), dim=1).float()
    scale = x.abs().amax(-1, keepdim=True) * (1 / _LEVELS)
    finite = scale.isfinite()
    inverse = torch.where(finite & (scale > _SMALLEST_SCALE), 1 / scale, 0.0)
    steps = torch.where(finite, x, 0.0).mul_(inverse).round_().clamp_(-_LEVELS, _LEVELS)
    packed[..., :d].view(torch.int8).copy_(steps)
    packed[..., d:].view(torch.float32).copy_(scale.where(finite, torch.nan))


def _unpack_torch(packed: Tensor, out: Tensor) -> None:
    d = out.shape[-1]
    out.copy_(packed[..., :d].view(torch.int8) * packed[..., d:].view(torch.float32))


@dataclass(frozen=True)
class Int8KV(KVFormat):
    """8-bit integers with a scale for every token and head (`inference.quantize_kv`); forward only.

    dtype: the dtype in which attention is computed.
    """

    head_dim: int
    dtype: torch.dtype

    def spec(self, tokens: int, batch: int, heads: int, device: torch.device) -> TensorSpec:
        return TensorSpec((tokens, 2, batch, heads, self.head_dim + SCALE_BYTES), torch.uint8, device)

    def pairs(self, into: Tensor, k: Tensor, v: Tensor) -> list[Pair]:
        pack_kv(k, v, into)
        return []

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return unpack_kv(rows, self.dtype)


def int8_kv(head_dim: int, value_dim: int, dtype: torch.dtype) -> KVFormat:
    """Return the format of 8-bit integers. Raises ValueError: the head dims differ."""
    if head_dim != value_dim:
        raise refuse("head dimension of values", value_dim, f"{head_dim}, as of keys", "Take another format.")
    return Int8KV(head_dim, dtype)
