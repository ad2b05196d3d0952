"""From a mode's name to its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..layout import Layout, build_layout
from .all_gather import all_gather
from .plan import Plan
from .residency import buffer_need
from .ring import ring


@dataclass(frozen=True)
class Schedule:
    """A mode: the layout its load balance rests on, and the function that plans it."""

    layout: str
    plan: Callable[[Layout, bool, int | None], Plan]
    about: str


SCHEDULES: dict[str, Schedule] = {
    "ring": Schedule("contiguous", lambda layout, causal, _: ring(layout, causal), "Ring Attention, contiguous tokens"),
    "zigzag": Schedule("zigzag", lambda layout, causal, _: ring(layout, causal, "zigzag"), "balanced ring"),
    "all_gather": Schedule("zigzag", all_gather, "fetch needed keys from their homes, few long kernel calls"),
}


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
