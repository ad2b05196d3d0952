"""From a mode's name to its plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..config import OUTER_SCHEDULES, ParallelismConfig, refuse
from ..layout import Layout, build_layout
from ..topology import Cluster, hamiltonian_cycles, load_cluster, rings_for
from .all_gather import all_gather
from .double_ring import double_ring
from .helper import helper
from .plan import Plan
from .residency import buffer_need, collector_paused
from .ring import ring
from .tasp import Rings, tasp
from .ulysses import ulysses
from .usp import usp

logger = logging.getLogger(__name__)

_MOST_MESSAGES = 1_200_000  # a ring of 1,024 ranks has 1,048,576
_MANY_MESSAGES, _MESSAGES_PER_S = 50_000, 6_000


@dataclass(frozen=True)
class PlanOptions:
    """What modes may be told beyond the number of ranks and tokens; each ignores what it has no use for.

    max_buffer_tokens: most remote key/value tokens a rank may hold at once (all_gather); None for no bound.
    unit: every rank's tokens come in multiples of this (see `layout.layouts`).
    inner_size: ranks of an inner ring (double_ring), ranks that share the heads (usp); None for a node of `cluster`
        if it is described and smaller than all ranks, else for the largest proper divisor of their number up to 8.
    head_chunks: parts in which a rank's heads are exchanged and attended, one beside the next (ulysses).
    outer_schedule: the mode between the groups of usp: one whose layout gives a group neighbouring tokens.
    cluster: the ranks' links, for which tasp chooses its rings; None for a full mesh.
    """

    max_buffer_tokens: int | None = None
    unit: int = 1
    inner_size: int | None = None
    head_chunks: int = 1
    outer_schedule: str = "zigzag"
    cluster: Cluster | None = None

    @classmethod
    def of(cls, par: ParallelismConfig) -> PlanOptions:
        """What the configuration says.

        Raises:
            ValueError: a cluster that cannot be read, or has no such number of ranks.
        """
        return cls(
            max_buffer_tokens=par.max_buffer_tokens,
            unit=par.tensor_parallel_size if par.uses_sequence_parallel else 1,
            inner_size=par.inner_size,
            head_chunks=par.head_chunks,
            outer_schedule=par.outer_schedule,
            cluster=load_cluster(par.cluster).resized(par.context_parallel_size) if par.cluster else None,
        )

    def inner(self, n: int) -> int:
        """Ranks of an inner ring of `double_ring`, or that share the heads in `usp`."""
        if self.inner_size is not None:
            return self.inner_size
        if self.cluster is not None and self.cluster.ranks_per_node < n:
            return self.cluster.ranks_per_node
        return max((k for k in range(1, min(n, 9)) if n % k == 0), default=1)

    def rings(self, n: int) -> Rings:
        """The rings of `tasp`."""
        return hamiltonian_cycles(n) if self.cluster is None else rings_for(self.cluster)


DEFAULT_OPTIONS = PlanOptions()


@dataclass(frozen=True)
class Schedule:
    """A mode: the layout its load balance rests on, and the function that plans it.

    `splits_heads`: ranks share the attention heads, so their number has to fit them.
    """

    layout: str
    plan: Callable[[Layout, bool, PlanOptions], Plan]
    about: str
    splits_heads: bool = False


SCHEDULES: dict[str, Schedule] = {
    "ring": Schedule("contiguous", lambda layout, causal, _: ring(layout, causal), "Ring Attention, contiguous tokens"),
    "zigzag": Schedule("zigzag", lambda layout, causal, _: ring(layout, causal, "zigzag"), "balanced ring"),
    "striped": Schedule("striped", lambda layout, causal, _: ring(layout, causal, "striped"), "Striped Attention"),
    "helper": Schedule("contiguous", lambda layout, causal, _: helper(layout, causal), "DistFlashAttn's helpers"),
    "double_ring": Schedule(
        "zigzag",
        lambda layout, causal, options: double_ring(layout, causal, options.inner(layout.n)),
        "a ring inside each node, a ring of nodes around it",
    ),
    "tasp": Schedule(
        "zigzag",
        lambda layout, causal, options: tasp(layout, causal, options.rings(layout.n)),
        "rings over all edge-disjoint Hamiltonian cycles of the topology",
    ),
    "all_gather": Schedule(
        "zigzag",
        lambda layout, causal, options: all_gather(layout, causal, options.max_buffer_tokens),
        "fetch needed keys from their homes, few long kernel calls",
    ),
    "ulysses": Schedule(
        "contiguous",
        lambda layout, causal, options: ulysses(layout, causal, options.head_chunks),
        "tokens exchanged for heads",
        splits_heads=True,
    ),
    "usp": Schedule(
        "zigzag",
        lambda layout, causal, options: usp(layout, causal, options.inner(layout.n), _outer(options)),
        "Ulysses inside groups of ranks, a ring of groups around them",
        splits_heads=True,
    ),
}


def _outer(options: PlanOptions) -> Callable[[Layout, bool], Plan]:
    mode = SCHEDULES[options.outer_schedule]
    inside = replace(options, inner_size=None, head_chunks=1, cluster=None)  # said of all ranks, not of groups
    return lambda layout, causal: mode.plan(layout, causal, inside)


def layout_name(schedule: str, options: PlanOptions) -> str:
    """The layout that a mode rests on."""
    return SCHEDULES[options.outer_schedule if schedule == "usp" else schedule].layout


def check_heads(
    schedule: str, n: int, num_heads: int, num_kv_heads: int, options: PlanOptions = DEFAULT_OPTIONS
) -> None:
    """Refuse a mode that shares heads among ranks whose number does not fit them.

    Raises:
        ValueError: names the numbers of ranks that do.
    """

    if schedule == "ulysses" and options.head_chunks > 1 and n > 1 and num_kv_heads % (n * options.head_chunks):
        legal = ", ".join(str(k) for k in range(1, num_kv_heads + 1) if num_kv_heads % (n * k) == 0) or "1"
        raise ValueError(
            f"parallelism.head_chunks={options.head_chunks}: expected a number that times {n} ranks divides the "
            f"{num_kv_heads} key/value heads. Choose one of {legal}."
        )

    def fits(ranks: int) -> bool:
        return num_heads % ranks == 0 and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)

    sharing = options.inner(n) if schedule == "usp" else n
    if SCHEDULES[schedule].splits_heads and not fits(sharing):
        possible = (k for k in range(1, num_heads + 1) if fits(k) and (schedule != "usp" or n % k == 0))
        legal = ", ".join(map(str, sorted(possible, key=lambda k: (abs(k - sharing), k))[:3]))
        what, remedy = ("inner_size", "Set it to one of them") if schedule == "usp" else ("ranks", "Start as many")
        raise ValueError(
            f"{sharing} context-parallel ranks that share the heads (schedule {schedule}): expected a divisor of the "
            f"{num_heads} query heads that divides the {num_kv_heads} key/value heads or is a multiple of them. "
            f"Nearest {what}: {legal}. {remedy}, or choose a ring schedule."
        )


def num_messages(schedule: str, n: int, length: int, options: PlanOptions) -> int:
    """Roughly the messages of a plan, by which the time and memory that it takes to make it grow."""
    if schedule == "all_gather" and options.max_buffer_tokens is not None:
        return n * (n + 2 * length // options.max_buffer_tokens)
    if schedule == "tasp":
        links = n if options.cluster is None else min(n, options.cluster.ranks_per_node)
        # Rings among more than 128 ranks take minutes to find.
        return n * n * (len(options.rings(n)) if links <= 128 else links)
    return n * n * {"double_ring": options.inner(n), "ulysses": 3 * options.head_chunks}.get(schedule, 1)


def seal(plan: Plan) -> Plan:
    """The same plan, with the buffers it needs stated."""
    return replace(plan, buffers=tuple(sorted(buffer_need(plan).items())))


@lru_cache(maxsize=256)
def build_plan(schedule: str, n: int, length: int, causal: bool = True, options: PlanOptions = DEFAULT_OPTIONS) -> Plan:
    """The forward plan of `schedule` for `n` ranks and a sequence of `length` tokens.

    Raises:
        ValueError: unknown schedule, sizes or options that it refuses, or ranks whose plan would take minutes.
    """
    for name, allowed in ((schedule, tuple(SCHEDULES)), (options.outer_schedule, OUTER_SCHEDULES)):
        if name not in allowed:
            raise ValueError(f"schedule {name!r}: expected one of {', '.join(allowed)}. Choose one of these.")
    layout = build_layout(layout_name(schedule, options), n, length, options.unit)
    if (messages := num_messages(schedule, n, length, options)) > _MOST_MESSAGES:
        expected = f"a plan of at most {_MOST_MESSAGES:,} messages; that of {schedule} would have {messages:,}"
        remedy = "Choose zigzag or fewer ranks, or raise parallelism.max_buffer_tokens where it is set."
        raise refuse("parallelism.context_parallel_size", n, expected, remedy)
    if messages > _MANY_MESSAGES:
        logger.info("planning %s for %d ranks: some %.0f s", schedule, n, messages / _MESSAGES_PER_S)
    with collector_paused():
        return seal(SCHEDULES[schedule].plan(layout, causal, options))
