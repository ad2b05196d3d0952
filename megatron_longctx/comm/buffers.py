"""Memory for blocks of other ranks: allocated once, shared by every layer."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor


class BufferPool:
    """Named scratch tensors that keep their memory between uses and grow when a larger one is asked for.

    Whoever asks for a name owns it until it is asked for again: callers order their uses on the device themselves.

    Attributes:
        generation: counts up when a tensor gets other memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storage: dict[Hashable, Tensor] = {}
        self.generation = 0

    def get(self, name: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous, uninitialized tensor of `shape`."""
        size = math.prod(shape)
        kept = self._storage.get((name, dtype))
        with torch.inference_mode(False):  # it outlives the call that asks first
            if kept is None or kept.numel() < size:
                self.generation += 1
                kept = self._storage[name, dtype] = torch.empty(size, dtype=dtype, device=self._device)
            return kept[:size].view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._storage.values())
