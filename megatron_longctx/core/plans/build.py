"""Build the plan of a mode for a mask, as it is executed."""

from functools import lru_cache

from ..layout import build_layout
from . import backward
from .mask import Mask
from .modes import Mode, ModeOptions, check_messages, find_mode
from .plan import Plan, collector_paused
from .visibility import visibility


def build_plan(
    schedule: str | Mode,
    n: int,
    mask: Mask | int,
    options: ModeOptions | None = None,
    unit: int = 1,
    layout: str = "auto",
    keep_received: bool | None = False,
    batch: int = 1,
    sum_in_node: int = 0,
) -> Plan:
    """Return the forward plan of a mode for `n` ranks, from which `backward_plan` derives the backward plan.

    Args:
        schedule: a mode or its name.
        mask: what the tokens see. A number of tokens means a causal sequence.
        options: the options of a mode that is given by name.
        unit: the number of tokens of every rank is a multiple of this (see `layout`).
        layout: a name in `layout.LAYOUTS` that the mode supports. "auto" is the mode's own, or balanced for several
            documents.
        keep_received: whether ranks keep received blocks for backward; None for whether it pays (`keeps_received`).
        batch: the number of sequences in a call.
        sum_in_node: the ranks of a node that sum their gradients (`node_size_to_sum`); 0 for none.

    Raises:
        ValueError: the schedule is unknown, it refuses the sizes, options or layout, or the plan has too many messages.
    """
    mode = find_mode(schedule, n, options or ModeOptions()) if isinstance(schedule, str) else schedule
    mask = Mask.of(mask)
    plan = _build_cached(mode, n, mask, unit, mode.layout_of(mask, layout))
    if backward.keeps_received(keep_received, mode.name, n, mask.length, batch):
        plan = backward.keep_received(plan)
    return backward.sum_in_nodes(plan, sum_in_node)


@lru_cache(maxsize=64)
def _build_cached(mode: Mode, n: int, mask: Mask, unit: int, name: str) -> Plan:
    layout = build_layout(name, n, mask.length, unit, mask.documents)
    check_messages(str(mode), n, mode.num_messages(n, mask.length))
    with collector_paused():
        return mode.plan(visibility(mask, layout))
