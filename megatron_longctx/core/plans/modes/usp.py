"""USP: Ulysses inside groups of ranks, any ring mode between the groups (Fang and Zhao 2024).

The ranks of a group exchange tokens for heads. Then rank i of every group runs, for its part of the heads, the plan of
a ring whose members are groups. So a ring has fewer, larger blocks, and only the ranks of a group share the heads.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from ...errors import refuse
from ...layout import Layout
from ..plan import RESULTS, Attend, Block, Heads, Kind, Move, Plan, Step, return_moves, trim
from ..visibility import Visibility, visibility
from .mode import MODES, Mode, ModeOptions, SearchContext, check_divides, check_shared_heads, outer_modes


@dataclass(frozen=True)
class Usp(Mode):
    """inner_size: the number of (neighbouring) ranks of a group, which share the heads. outer: the mode between groups,
    whose layout must give a group adjacent tokens."""

    inner_size: int = 1
    outer: Mode = field(default_factory=lambda: MODES["zigzag"](), repr=False)

    name = "usp"
    takes_any_layout = False
    splits_heads = True

    @classmethod
    def from_options(cls, options: ModeOptions, n: int) -> Mode:
        if options.outer_schedule not in outer_modes():
            expected = "one of " + ", ".join(outer_modes())
            raise refuse("outer_schedule", options.outer_schedule, expected, "Choose one of these.")
        inner = options.resolve_inner_size(n)
        check_divides(inner, n)
        outer_options = replace(options, inner_size=None, cluster=None)
        return cls(inner, MODES[options.outer_schedule].from_options(outer_options, n // inner))

    @classmethod
    def candidates(cls, context: SearchContext) -> Iterator[Mode]:
        n = context.n
        yield from (cls.from_options(replace(context.options, inner_size=k), n) for k in range(2, n) if n % k == 0)

    @property
    def layout(self) -> str:  # type: ignore[override]
        return self.outer.layout

    def plan(self, visible: Visibility) -> Plan:
        """Exchange queries and keys inside the groups, run the outer plan, and return the outputs."""
        layout, n, sharing = visible.queries, visible.queries.n, self.inner_size
        check_divides(sharing, n)
        if sharing == 1:
            return replace(self.outer.plan(visible), name=self.name)
        groups = [_Group(layout, range(first, first + sharing)) for first in range(0, n, sharing)]
        group_layout = Layout(layout.name, layout.length, tuple(group.spans for group in groups))
        outer = self.outer.plan(visibility(visible.mask, group_layout))
        idle: tuple[tuple[Attend, ...], ...] = ((),) * n
        steps = (Step(tuple(_exchange(groups)), idle), *(_expand(step, groups, sharing) for step in outer.steps))
        returns = (move for move in return_moves(steps) if move.source // sharing == move.destination // sharing)
        steps = (*steps, Step(tuple(returns), idle))
        return trim(Plan(self.name, visible.mask, layout, visible.keys, steps))

    def check_heads(self, n: int, num_heads: int, num_kv_heads: int) -> None:
        divisors = (k for k in range(1, n + 1) if n % k == 0)
        check_shared_heads(self.inner_size, num_heads, num_kv_heads, "schedule usp, set inner_size", divisors)


class _Group:
    """Ranks that hold their tokens together, as one rank of the outer plan.

    segments: (start, stop, member, shift): slots `start..stop-1` of the group are the slots from `start + shift` on of
        rank `member`.
    """

    def __init__(self, layout: Layout, ranks: range) -> None:
        self.ranks, self.num_tokens = ranks, 0
        self.segments: list[tuple[int, int, int, int]] = []
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
                at, self.num_tokens = self.num_tokens, self.num_tokens + len(piece)
                self.segments.append((at, self.num_tokens, rank, offset[rank] - at))
                offset[rank] += len(piece)
            spans.append(span)
        self.spans = tuple(spans)
        self._split: dict[tuple[Block, Heads, int], tuple[Block, ...]] = {}

    def split(self, block: Block, heads: Heads, origin: int = -1) -> tuple[Block, ...]:
        """Split a block of the group into blocks of its members, in the order of its slots."""
        key = block, heads, origin
        if key not in self._split:  # many ranks split the same block
            self._split[key] = tuple(
                Block(block.kind, member, max(start, block.start) + shift, min(stop, block.stop) + shift, origin, heads)
                for start, stop, member, shift in self.segments
                if start < block.stop and block.start < stop
            )
        return self._split[key]


def _expand(step: Step, groups: list[_Group], sharing: int) -> Step:
    """Convert a step of groups to a step of ranks, in which member i of each group does it for part i of the heads."""
    moves = []
    for i in range(sharing):
        heads = Heads(i, sharing)
        for block, source, destination in step.moves:
            sender, receiver = groups[source].ranks[i], groups[destination].ranks[i]
            is_result = block.kind in RESULTS  # results go directly to the members whose tokens they are
            for piece in groups[block.home].split(block, heads, sender if is_result else -1):
                moves.append(Move(piece, sender, piece.home if is_result else receiver))

    def split(blocks: Iterable[Block], heads: Heads) -> tuple[Block, ...]:
        return tuple(piece for block in blocks for piece in groups[block.home].split(block, heads))

    parts = [Heads(i, sharing) for i in range(sharing)]
    attends = (
        tuple(Attend(split(call.queries, part), split(call.keys, part), call.slices) for call in calls)
        for calls in step.attends
        for part in parts
    )
    return Step(tuple(moves), tuple(attends))


def _exchange(groups: list[_Group]) -> Iterator[Move]:
    """Yield the moves that exchange all queries and keys of each group for the members' heads."""
    for group in groups:
        for i, rank in enumerate(group.ranks):
            for kind in (Kind.Q, Kind.KV):
                pieces = group.split(Block(kind, -1, 0, group.num_tokens), Heads(i, len(group.ranks)))
                yield from (Move(piece, piece.home, rank) for piece in pieces if piece.home != rank)
