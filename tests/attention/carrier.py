"""Peer memory without GPUs that could read each other's."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_longctx.comm import Exchange, Outbox, P2PTransport


class Carrier:
    """Peer memory whose bytes travel over gloo: what is sent is read from where the outbox says that it lies."""

    def __init__(self, transport: P2PTransport, peers: tuple[int, ...]) -> None:
        self.peers = peers
        self._transport = transport

    def mailbox(self, outbox: Outbox) -> Box:
        return Box(self._transport, outbox)

    def break_off(self, error: BaseException) -> None:
        raise AssertionError("a pass failed") from error


class Box:
    generation = 0

    def __init__(self, transport: P2PTransport, outbox: Outbox) -> None:
        self._transport, self._outbox = transport, outbox
        self._memory = torch.zeros(outbox.num_bytes, dtype=torch.uint8)
        self._lent: list[Tensor] = []
        self.met = 0

    def begin(self) -> int:
        self._memory.fill_(255)
        return 0

    def region(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        offset = self._outbox.regions[name]
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._memory[offset : offset + size].view(dtype).view(tuple(shape))

    def start(self, step: int, passed: Sequence[Tensor], receives: Any, after: Any) -> Exchange:
        messages = self._outbox.sends[step]
        places = [self._memory[m.offset : m.offset + m.num_bytes] for m in messages]
        for place, tensor in zip([p for p, m in zip(places, messages, strict=True) if m.passed], passed, strict=True):
            place.copy_(tensor.view(-1).view(torch.uint8))
        sends = [(place, message.peer) for place, message in zip(places, messages, strict=True)]
        return self._transport.start(sends, [(tensor.view(-1).view(torch.uint8), peer) for tensor, peer in receives])

    def meets(self, step: int) -> bool:
        return step not in self._outbox.awaits and not any(message.passed for message in self._outbox.sends[step])

    def meet(self, step: int, receives: Any) -> list[Tensor]:
        """What comes lies in memory that is the senders', until `read`."""
        assert not self._lent
        self._lent = [torch.empty_like(tensor) for tensor, _ in receives]
        peers = (peer for _, peer in receives)
        self.wait(self.start(step, (), list(zip(self._lent, peers, strict=True)), ()))
        self.met += 1
        return list(self._lent)

    def read(self, step: int) -> None:
        for tensor in self._lent:
            tensor.view(-1).view(torch.uint8).fill_(255)
        self._lent = []

    def wait(self, exchange: Exchange) -> None:
        self._transport.wait(exchange)
