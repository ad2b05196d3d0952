"""What a plan needs to know of how ranks are linked. A `config.cluster.Cluster` has it; plans know no rates."""

from __future__ import annotations

from typing import Protocol

Rings = tuple[tuple[int, ...], ...]
"""Rings that each list all ranks. A rank sends to the next rank of the ring, the last to the first."""


class Links(Protocol):
    """Nodes of ranks: rank r is rank `r % ranks_per_node` of node `r // ranks_per_node`."""

    @property
    def nodes(self) -> int: ...

    @property
    def ranks_per_node(self) -> int: ...

    @property
    def network_is_slower(self) -> bool:
        """Whether a rank's share of the network is slower than its links within its node. False for one node."""

    def rings(self) -> tuple[Rings, str]:
        """Return the rings over which all ranks pass on blocks in the least time together, and the reason, to log."""
