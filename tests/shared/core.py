"""Which modules of the package are its core: exact attention over a sharded sequence, with torch and numpy alone."""

from __future__ import annotations

import re

_CORE = re.compile(
    """__init__|cache|errors|layout
    |(attention|kernels|schedules/modes)/.*
    |comm/(__init__|collectives|device|hybrid|p2p|peer|peer_kernels|peer_memory|symmetric)
    |schedules/(__init__|accumulators|backward|buffers|build|collector|hamiltonian|kernel_calls|links|lower|mask|plan
    |program|record|recording|send_layout|slices|verify|visibility|workload)""",
    re.VERBOSE,
)


def is_core(path: str) -> bool:
    """Whether `path`, inside the package and without `.py`, is a module of the core."""
    return _CORE.fullmatch(path) is not None
