"""USP: Ulysses inside groups of ranks, any ring mode between the groups (Fang and Zhao 2024).

The ranks of a group exchange tokens for heads; then rank i of every group runs, for its part of the heads, the plan of
a ring whose members are groups. So a ring has fewer, larger blocks, and no more ranks share the heads than there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ...errors import refuse
from ...layout import Layout
from ..plan import RESULTS, Attend, Block, Heads, Kind, Move, Plan, Step
from ..trim import trim
from ..visibility import Visibility, visibility
from .double_ring import check_divides
from .mode import MODES, Choices, Mode, ModeOptions, check_shared_heads, outer_modes


@dataclass(frozen=True)
class Usp(Mode):
    """inner_size: ranks of a group, neighbours in rank order, that share the heads. outer: the mode between groups: one
    whose layout gives a group neighbouring tokens."""

    inner_size: int = 1
    outer: Mode = field(default_factory=lambda: MODES["zigzag"](), repr=False)

    name = "usp"
    about = "Ulysses inside groups of ranks, a ring of groups around them"
    takes_any_layout = False
    splits_heads = True

    @classmethod
    def of(cls, options: ModeOptions, n: int) -> Mode:
        if options.outer_schedule not in outer_modes():
            expected = "one of " + ", ".join(outer_modes())
            raise refuse("parallelism.outer_schedule", options.outer_schedule, expected, "Choose one of these.")
        inner = options.inner(n)
        check_divides(inner, n)
        said_of_groups = replace(options, inner_size=None, head_chunks=1, cluster=None)
        return cls(inner, MODES[options.outer_schedule].of(said_of_groups, n // inner))

    @classmethod
    def candidates(cls, choices: Choices) -> Iterator[Mode]:
        n = choices.n
        yield from (cls.of(replace(choices.options, inner_size=k), n) for k in range(2, n) if n % k == 0)

    @property
    def layout(self) -> str:  # type: ignore[override]
        return self.outer.layout

    def plan(self, seen: Visibility) -> Plan:
        """Step 0 exchanges queries and keys inside the groups, the outer plan runs, the last step returns the outputs.

        Raises:
            ValueError: `inner_size` does not divide the ranks, or a group's tokens are not neighbours.
        """
        layout, n, sharing = seen.queries, seen.queries.n, self.inner_size
        check_divides(sharing, n)
        if sharing == 1:
            return replace(self.outer.plan(seen), name=self.name)
        groups = [_Group(layout, range(first, first + sharing)) for first in range(0, n, sharing)]
        of_groups = Layout(layout.name, layout.length, tuple(group.spans for group in groups))
        plan = self.outer.plan(visibility(seen.mask, of_groups))
        lifted = (_lifted(step, groups, sharing) for step in plan.steps)
        idle: tuple[tuple[Attend, ...], ...] = ((),) * n
        steps = (Step(tuple(_exchange(groups)), idle), *lifted)
        steps = (*steps, Step(tuple(_returns(steps, sharing)), idle))
        return trim(Plan(self.name, seen.mask, layout, seen.keys, steps))

    def check_heads(self, n: int, num_heads: int, num_kv_heads: int) -> None:
        divisors = (k for k in range(1, n + 1) if n % k == 0)
        check_shared_heads(self.inner_size, num_heads, num_kv_heads, "schedule usp, set inner_size", divisors)


class _Segment(NamedTuple):
    """Slots `start..stop-1` of a group are slots from `member_start` on of rank `member`."""

    start: int
    stop: int
    member: int
    member_start: int


class _Group:
    """Ranks that hold their tokens together, as one rank of the outer plan."""

    def __init__(self, layout: Layout, ranks: range) -> None:
        self.ranks = ranks
        self.segments: list[_Segment] = []
        spans = []
        offset = dict.fromkeys(ranks, 0)
        for pieces in zip(*(layout.spans[rank] for rank in ranks), strict=True):
            held = sorted((piece.start, rank, piece) for rank, piece in zip(ranks, pieces, strict=True) if len(piece))
            span = range(held[0][2].start, held[-1][2].stop) if held else range(0)
            if len(span) != sum(map(len, pieces)):
                raise ValueError(
                    f"layout {layout.name}: expected ranks {ranks[0]}..{ranks[-1]} to hold neighbouring tokens. "
                    "Use the contiguous or the zigzag layout."
                )
            for _, rank, piece in held:
                at = self.num_tokens
                self.segments.append(_Segment(at, at + len(piece), rank, offset[rank]))
                offset[rank] += len(piece)
            spans.append(span)
        self.spans = tuple(spans)
        self._split: dict[tuple[Block, Heads, int], tuple[Block, ...]] = {}

    @property
    def num_tokens(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    def split(self, block: Block, heads: Heads, origin: int = -1) -> tuple[Block, ...]:
        """A block of the group as blocks of its members, in the order of its slots."""
        key = block, heads, origin
        if key not in self._split:  # many ranks ask for it
            self._split[key] = tuple(self._pieces(*key))
        return self._split[key]

    def _pieces(self, block: Block, heads: Heads, origin: int) -> Iterator[Block]:
        for start, stop, member, member_start in self.segments:
            low, high = max(start, block.start), min(stop, block.stop)
            if low < high:
                at = member_start - start
                yield Block(block.kind, member, at + low, at + high, origin, heads)

    def everything(self, kind: Kind, heads: Heads) -> tuple[Block, ...]:
        return self.split(Block(kind, -1, 0, self.num_tokens), heads)


def _lifted(step: Step, groups: list[_Group], sharing: int) -> Step:
    """A step of groups as one of ranks: member i of each does it for part i of the heads."""
    moves, attends = [], []
    for i in range(sharing):
        heads = Heads(i, sharing)
        for block, source, destination in step.moves:
            sender, receiver = groups[source].ranks[i], groups[destination].ranks[i]
            away = block.kind in RESULTS  # these go straight to the members whose tokens they are
            for piece in groups[block.home].split(block, heads, sender if away else -1):
                moves.append(Move(piece, sender, piece.home if away else receiver))
    for group, calls in zip(groups, step.attends, strict=True):
        for i in range(len(group.ranks)):
            heads = Heads(i, sharing)
            attends.append(
                tuple(
                    Attend(_split(groups, call.queries, heads), _split(groups, call.keys, heads), call.slices)
                    for call in calls
                )
            )
    return Step(tuple(moves), tuple(attends))


def _split(groups: list[_Group], blocks: Iterable[Block], heads: Heads) -> tuple[Block, ...]:
    return tuple(piece for block in blocks for piece in groups[block.home].split(block, heads))


def _exchange(groups: list[_Group]) -> Iterable[Move]:
    for group in groups:
        for i, rank in enumerate(group.ranks):
            for kind in (Kind.Q, Kind.KV):
                pieces = group.everything(kind, Heads(i, len(group.ranks)))
                yield from (Move(piece, piece.home, rank) for piece in pieces if piece.home != rank)


def _returns(steps: Iterable[Step], sharing: int) -> Iterator[Move]:
    """Results for other members of a group, once all are computed: the rows of each that were attended for it."""
    computed: dict[tuple[int, int, Heads], tuple[int, int]] = {}
    for step in steps:
        for rank, attends in enumerate(step.attends):
            for _, home, start, stop, _, heads in (query for attend in attends for query in attend.queries):
                if home != rank and home // sharing == rank // sharing:
                    low, high = computed.get((rank, home, heads), (start, stop))
                    computed[rank, home, heads] = min(start, low), max(stop, high)
    for (rank, home, heads), (start, stop) in sorted(computed.items()):
        yield Move(Block(Kind.OUT, home, start, stop, rank, heads), rank, home)
