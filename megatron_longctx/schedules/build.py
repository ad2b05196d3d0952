"""From a mode's name to its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..layout import Layout, build_layout
from ..topology import hamiltonian_cycles
from .all_gather import all_gather
from .double_ring import double_ring
from .helper import helper
from .plan import Plan
from .residency import buffer_need
from .ring import ring
from .tasp import tasp
from .ulysses import ulysses


@dataclass(frozen=True)
class Schedule:
    """A mode: the layout its load balance rests on, and the function that plans it.

    `splits_heads`: ranks share the attention heads, so their number has to fit them.
    """

    layout: str
    plan: Callable[[Layout, bool, int | None], Plan]
    about: str
    splits_heads: bool = False


SCHEDULES: dict[str, Schedule] = {
    "ring": Schedule("contiguous", lambda layout, causal, _: ring(layout, causal), "Ring Attention, contiguous tokens"),
    "zigzag": Schedule("zigzag", lambda layout, causal, _: ring(layout, causal, "zigzag"), "balanced ring"),
    "striped": Schedule("striped", lambda layout, causal, _: ring(layout, causal, "striped"), "Striped Attention"),
    "helper": Schedule("contiguous", lambda layout, causal, _: helper(layout, causal), "DistFlashAttn's helpers"),
    "double_ring": Schedule(
        "zigzag",
        lambda layout, causal, _: double_ring(layout, causal, inner_ring_size(layout.n)),
        "a ring inside each node, a ring of nodes around it",
    ),
    "tasp": Schedule(
        "zigzag",
        lambda layout, causal, _: tasp(layout, causal, hamiltonian_cycles(layout.n)),
        "rings over all edge-disjoint Hamiltonian cycles of a full mesh",
    ),
    "all_gather": Schedule("zigzag", all_gather, "fetch needed keys from their homes, few long kernel calls"),
    "ulysses": Schedule(
        "contiguous", lambda layout, causal, _: ulysses(layout, causal), "tokens exchanged for heads", splits_heads=True
    ),
}


def inner_ring_size(n: int) -> int:
    """Ranks of an inner ring of `double_ring`: the largest proper divisor of n up to 8, the GPUs of a usual node."""
    return max((k for k in range(1, min(n, 9)) if n % k == 0), default=1)


def check_heads(schedule: str, n: int, num_heads: int, num_kv_heads: int) -> None:
    """Refuse a mode that shares heads among ranks whose number does not fit them.

    Raises:
        ValueError: names the numbers of ranks that do.
    """

    def fits(ranks: int) -> bool:
        return num_heads % ranks == 0 and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)

    if SCHEDULES[schedule].splits_heads and not fits(n):
        legal = sorted((k for k in range(1, num_heads + 1) if fits(k)), key=lambda k: (abs(k - n), k))[:3]
        raise ValueError(
            f"{n} context-parallel ranks with schedule {schedule}: expected a divisor of the {num_heads} query heads "
            f"that divides the {num_kv_heads} key/value heads or is a multiple of them. "
            f"Nearest: {', '.join(map(str, legal))}; "
            "or choose a ring schedule."
        )


def seal(plan: Plan) -> Plan:
    """The same plan, with the buffers it needs stated."""
    return replace(plan, buffers=tuple(sorted(buffer_need(plan).items())))


@lru_cache(maxsize=256)
def build_plan(
    schedule: str, n: int, length: int, causal: bool = True, max_buffer_tokens: int | None = None, unit: int = 1
) -> Plan:
    """The forward plan of `schedule` for `n` ranks and a sequence of `length` tokens.

    Args:
        max_buffer_tokens: most remote key/value tokens a rank may hold at once (all_gather); None for no bound.
        unit: every rank's tokens come in multiples of this (see `layout.layouts`).

    Raises:
        ValueError: unknown schedule, or sizes its layout refuses.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r}: expected one of {', '.join(SCHEDULES)}. Choose one of these.")
    mode = SCHEDULES[schedule]
    return seal(mode.plan(build_layout(mode.layout, n, length, unit), causal, max_buffer_tokens))
