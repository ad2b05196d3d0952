"""Parallelism modes as plans. Each mode is a small pure function from a layout to a `Plan`.

`build_plan("zigzag", n, length)` builds, seals and caches one; `backward_plan` derives its backward; `verify` proves
either; `describe` prints it and `draw` draws it. To add a mode, write its function in a file of its own, enter it in
`SCHEDULES` and in `config.SCHEDULES`: the executor runs it unchanged.
"""

from .build import DEFAULT_OPTIONS, SCHEDULES, PlanOptions, build_plan, check_heads, layout_name, num_messages, seal
from .cost import Costs, KernelSample, MessageSample, Workload
from .describe import describe, moved_tokens
from .hide import backward_plan
from .keep import keeping, keeps_received
from .plan import ALL_HEADS, RESULTS, Attend, Block, Heads, Kind, Move, Plan, Step
from .residency import Stay, assign, buffer_need, stays
from .transpose import transpose
from .verify import PlanError, results_away, verify

__all__ = [
    "ALL_HEADS",
    "DEFAULT_OPTIONS",
    "RESULTS",
    "SCHEDULES",
    "Attend",
    "Block",
    "Costs",
    "Heads",
    "KernelSample",
    "Kind",
    "MessageSample",
    "Move",
    "Plan",
    "PlanError",
    "PlanOptions",
    "Stay",
    "Step",
    "Workload",
    "assign",
    "backward_plan",
    "buffer_need",
    "build_plan",
    "check_heads",
    "describe",
    "keeping",
    "keeps_received",
    "layout_name",
    "moved_tokens",
    "num_messages",
    "results_away",
    "seal",
    "stays",
    "transpose",
    "verify",
]
