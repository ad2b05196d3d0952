"""What a plan is lowered for."""

from __future__ import annotations

from dataclasses import dataclass

from .cost import Workload
from .kernel_calls import PLAINEST, Takes


@dataclass(frozen=True)
class Target:
    """What a plan is lowered for.

    takes: which calls the kernel takes. hosts: by rank, the ranks that read its memory, itself among them; None where
    all messages go point to point. joined: all keys of a call are copied together if they lie apart, so that results do
    not depend, bit for bit, on where in a cache they lie.
    """

    workload: Workload
    takes: Takes = PLAINEST
    hosts: tuple[tuple[int, ...], ...] | None = None
    joined: bool = False

    def peers(self, rank: int) -> frozenset[int]:
        """The ranks that read its memory."""
        return frozenset() if self.hosts is None else frozenset(self.hosts[rank])
