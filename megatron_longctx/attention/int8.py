"""Forward with keys and values as 8-bit integers until the kernel call: half the bytes of bf16 travel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.quantize_kv import pack_kv, packed_shape, unpack_kv
from .executor import ForwardPass
from .shapes import Like


class Int8ForwardPass(ForwardPass):
    """Every rank attends what `unpack_kv` gives for a token, its home included. Blocks are passed on as they came, so
    that they are quantized once however far they go."""

    def needs_packed_kv(self) -> bool:
        return True

    def packed_like(self) -> Like:
        k, _ = self._kv
        return Like(packed_shape(k), torch.uint8, k.device)

    def packed_kv(self, room: Tensor | None) -> Tensor:
        k, v = self._kv
        return pack_kv(k, v, room)

    def unpacked_kv(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        return unpack_kv(packed, self._q.dtype)
