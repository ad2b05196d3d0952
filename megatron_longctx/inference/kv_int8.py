"""Keys and values as 8-bit integers: half the bytes of bf16 in the cache and on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.attention.kv_format import KVFormat, TensorSpec
from ..core.errors import refuse
from ..core.kernels.batched_copy import Pair
from .quantize_kv import SCALE_BYTES, pack_kv, unpack_kv


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
    """Return the format of 8-bit integers.

    Raises:
        ValueError: the head dims differ.
    """
    if head_dim != value_dim:
        raise refuse("head dimension of values", value_dim, f"{head_dim}, as of keys", "Take another format.")
    return Int8KV(head_dim, dtype)
