"""What a pass is to its transport: how messages are handed over, whatever carries them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..schedules.program import Program
from .p2p import Exchange

Memory = Callable[[int], Tensor]
"""Lends so many bytes of send memory that stay where they are during a pass."""


class Channel(Protocol):
    """The messages of one kind of pass. `passed` is what has come from other ranks and goes on; it and `receives` are
    contiguous tensors, field by field in the order of the program's messages. Channels over peer memory alone also
    `acquire` and `release` (see `SymmetricExchange`)."""

    @property
    def generation(self) -> int:
        """Counts up when the send memory has moved."""

    def begin(self) -> int:
        """Start a pass on the caller's stream; returns which of its memories it uses."""

    def memory(self) -> Tensor:
        """The send memory of this pass, as bytes."""

    def start(self, step: int, passed: Sequence[Tensor], receives: Sequence[Tensor], after: Sequence[Any]) -> Exchange:
        """Start a step's messages once the marks `after` are reached."""

    def wait(self, exchange: Exchange) -> None:
        """Make the caller's stream wait until the messages are in."""


class Transport(Protocol):
    """Carries the messages between the ranks of a group."""

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...] | None:
        """By rank, the ranks that read its memory, itself among them; None where nobody does."""

    def now(self) -> Any:
        """A mark after all work issued so far by the caller's stream; None where there are no streams."""

    def channel(self, program: Program, num_bytes: int, memory: Memory) -> Channel:
        """The messages of a program.

        Args:
            num_bytes: of the send memory of the rank that sends most.
            memory: lends what is sent point to point.
        """

    def break_off(self, error: BaseException) -> None:
        """A pass has ended with `error` on this rank: others wait for what it has not sent."""
