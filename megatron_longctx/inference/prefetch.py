"""A layer's weights, gathered while the layer before computes."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Empty = Callable[[str, tuple[int, ...], Tensor], Tensor]
"""Returns memory of a name (`columns` for what is read only while gathering) and a shape, of a tensor's dtype."""
Weights = TypeVar("Weights")


class Prefetch(Generic[Weights]):
    """Gathers one layer's weights on a stream of its own while the layer before computes; on CPUs at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._memory: list[dict[str, Tensor]] = [{}, {}, {}]  # of layers of even and of odd numbers, and of both
        self._begun: dict[int, tuple[Weights, torch.cuda.Event | None]] = {}

    def begin(self, number: int, gather: Callable[[int, Empty], Weights]) -> None:
        def empty(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
            memory = self._memory[2 if name == "columns" else number % 2]
            size = torch.Size(shape).numel()
            if name not in memory or memory[name].numel() < size:
                memory[name] = like.new_empty(size)
            return memory[name][:size].view(shape)

        if self._stream is None:
            self._begun = {number: (gather(number, empty), None)}
            return
        # The memory's last layer has been launched, and this waits for it.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            weights = gather(number, empty)
            self._begun = {number: (weights, self._stream.record_event())}

    def take(self, number: int, gather: Callable[[int, Empty], Weights]) -> Weights:
        if number not in self._begun:
            self.begin(number, gather)
        weights, ready = self._begun.pop(number)
        if ready is not None:
            ready.wait()
        return weights
