"""Plans over a cache: new queries against cached and new keys, as data that the executor runs and `verify` proves.

Queries are numbered by the rows of the new tokens that a rank holds, sequence after sequence; keys by the slots of its
cache. So a key block is a run of slots in place: nothing is gathered before a plan runs, and no length is padded.

- `pass_kv` (Alg. 2 of "Context Parallelism for Scalable Million-Token Inference"): keys travel around a ring.
- `pass_q` (Alg. 3): queries travel around a ring, partial results go home in one exchange.
- `one_hop`: queries go straight to every rank, partial results back: two exchanges whatever the number of ranks.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, product

from ..config import refuse
from ..kernels.planned import PlannedShapes
from ..layout import Layout
from ..schedules import Attend, Block, Kind, Move, Plan, PlanError, Step, seal, verify
from ..schedules.prune import prune
from ..schedules.visibility import Region, visible_regions
from .ledger import Turn
from .pieces import pieces

LONG_RUN = 2048
"""Runs of at least so many slots get a kernel call of their own; shorter ones of a call are copied together."""


@dataclass(frozen=True)
class Batch:
    """The turns of several sequences, computed together on `n` ranks with `slots` cache slots each.

    joined: one kernel call for all keys of a region, copied together if they lie apart, so that results do not depend,
    bit for bit, on where in the cache tokens lie. shapes: into which large calls are cut; None for whole calls.
    """

    n: int
    slots: int
    turns: tuple[Turn, ...]
    joined: bool = False
    shapes: PlannedShapes | None = None

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """By rank, the first row of every turn's new tokens, and the number of rows."""
        return tuple(tuple(accumulate((t.num_new(r) for t in self.turns), initial=0)) for r in range(self.n))

    @cached_property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """By rank, the slots that begin or end a turn's runs; none where no two turns share slots.

        Keys that are cut there are of the same turns as a whole, so that shared ones travel once.
        """
        found = []
        for rank in range(self.n):
            runs = sorted((b.start, b.stop) for turn in self.turns for b in _keys(turn, rank, 0, _num_keys(turn, rank)))
            shared = any(after[0] < before[1] for before, after in pairwise(runs))
            found.append(tuple(sorted({edge for run in runs for edge in run})) if shared else ())
        return tuple(found)

    @cached_property
    def calls(self) -> tuple[tuple[tuple[Attend, ...], ...], ...]:
        """By the rank of the queries, then that of the keys: the kernel calls of all of the first's new queries over
        all that the second has cached or gets now. Every mode makes these, on one rank or another."""
        found: list[list[list[Attend]]] = [[[] for _ in range(self.n)] for _ in range(self.n)]
        for index, turn in enumerate(self.turns):
            for q_rank, k_rank in product(range(self.n), repeat=2):
                for region in _regions(turn, q_rank, k_rank):
                    found[q_rank][k_rank] += _attends(self, region, index, q_rank, k_rank)
        return tuple(tuple(map(tuple, of_rank)) for of_rank in found)

    @cached_property
    def plans(self) -> dict[str, CachePlan]:
        """Those that `build` has made, by mode."""
        return {}

    @property
    def new(self) -> int:
        return sum(turn.new for turn in self.turns)

    @property
    def cached(self) -> int:
        return sum(turn.cached for turn in self.turns)

    def num_rows(self, rank: int) -> int:
        return self.rows[rank][-1]

    def layout(self) -> Layout:
        """Which rank has which of the new tokens, numbered turn after turn."""
        starts = tuple(accumulate((turn.new for turn in self.turns), initial=0))
        spans = tuple(
            tuple(
                range(span.start + start, span.stop + start)
                for turn, start in zip(self.turns, starts, strict=False)
                for span in turn.new_spans(rank)
            )
            for rank in range(self.n)
        )
        return Layout("new tokens", self.new, spans)

    def last_row(self, index: int) -> tuple[int, int]:
        """(rank, row) of the last token of turn number `index`."""
        turn = self.turns[index]
        for rank in range(self.n):
            spans = turn.new_spans(rank)
            if spans and spans[-1].stop == turn.new:
                return rank, self.rows[rank][index + 1] - 1
        raise AssertionError("some rank holds the last token")


@dataclass(frozen=True)
class CachePlan(Plan):
    """A plan over `batch`; its layout is that of the new tokens."""

    batch: Batch = field(default_factory=lambda: Batch(1, 0, ()))

    def num_slots(self, kind: Kind, rank: int) -> int:
        return self.batch.slots if kind is Kind.KV else self.batch.num_rows(rank)

    def runs(self, block: Block) -> list[range]:
        """Positions in their sequence, which are the same for all turns that own the block."""
        found = (_within(own, block) for own in self._pieces(block))
        return next((runs for runs in found if sum(map(len, runs)) == block.tokens), [])

    def owners(self, block: Block) -> set[int]:
        """The numbers of the turns that own all of the block's rows or slots."""
        pieces = enumerate(self._pieces(block))
        return {turn for turn, own in pieces if sum(map(len, _within(own, block))) == block.tokens}

    def _pieces(self, block: Block) -> list[list[tuple[int, range]]]:
        return (self._key_pieces if block.kind is Kind.KV else self._row_pieces)[block.home]

    def visible_pairs(self) -> int:
        return sum(turn.new * turn.cached + turn.new * (turn.new + 1) // 2 for turn in self.batch.turns)

    @cached_property
    def _row_pieces(self) -> list[list[list[tuple[int, range]]]]:
        """By rank and turn: (first row, positions) of every stretch of rows with consecutive tokens."""
        pieces: list[list[list[tuple[int, range]]]] = [[] for _ in range(self.n)]
        for index, turn in enumerate(self.batch.turns):
            for rank in range(self.n):
                row, own = self.batch.rows[rank][index], []
                for span in turn.new_spans(rank):
                    own.append((row, range(turn.cached + span.start, turn.cached + span.stop)))
                    row += len(span)
                pieces[rank].append(own)
        return pieces

    @cached_property
    def _key_pieces(self) -> list[list[list[tuple[int, range]]]]:
        """By rank and turn: (first slot, positions) of every stretch of slots with evenly spaced tokens, by slot."""
        pieces: list[list[list[tuple[int, range]]]] = [[] for _ in range(self.n)]
        for turn in self.batch.turns:
            for rank in range(self.n):
                new = [range(s.start + turn.cached, s.stop + turn.cached) for s in turn.new_spans(rank)]
                runs = [*turn.cached_runs[rank], *turn.new_runs[rank]]
                own = _matched(runs, [*turn.positions[rank], *new])
                pieces[rank].append(sorted(own, key=lambda piece: piece[0]))
        return pieces


def _within(pieces: Sequence[tuple[int, range]], block: Block) -> list[range]:
    """The positions of a block's slots, as far as the pieces have them; pieces are in the order of their slots."""
    first = max(bisect.bisect_right(pieces, block.start, key=lambda piece: piece[0]) - 1, 0)
    runs = []
    for start, positions in pieces[first:]:
        if start >= block.stop:
            break
        run = positions[max(block.start - start, 0) : block.stop - start]
        runs += [run] if run else []
    return runs


def _matched(runs: Sequence[range], positions: Sequence[range]) -> Iterator[tuple[int, range]]:
    """Runs of slots and of positions, both cut where either ends: (first slot, positions)."""
    slots = iter(runs)
    left = range(0)
    for span in positions:
        while span:
            if not left:
                left = next(slots)
            size = min(len(left), len(span))
            yield left.start, span[:size]
            left, span = left[size:], span[size:]


def _keys(turn: Turn, rank: int, start: int, stop: int) -> tuple[Block, ...]:
    """The cache blocks of the turn's tokens number `start..stop-1` on `rank`, cached ones first."""
    blocks: list[Block] = []
    at = 0
    for run in (*turn.cached_runs[rank], *turn.new_runs[rank]):
        piece = run[max(start - at, 0) : max(stop - at, 0)]
        at += len(run)
        if piece and blocks and blocks[-1].stop == piece.start:
            blocks[-1] = blocks[-1]._replace(stop=piece.stop)
        elif piece:
            blocks.append(Block(Kind.KV, rank, piece.start, piece.stop))
    return tuple(blocks)


def _cut(block: Block, edges: Sequence[int]) -> Iterator[Block]:
    """The block in pieces that end at every edge within."""
    start = block.start
    for edge in edges[bisect.bisect_right(edges, start) : bisect.bisect_left(edges, block.stop)]:
        yield block._replace(start=start, stop=edge)
        start = edge
    yield block._replace(start=start)


def _num_keys(turn: Turn, rank: int) -> int:
    return sum(map(len, turn.cached_runs[rank])) + turn.num_new(rank)


def _attends(batch: Batch, region: Region, index: int, q_rank: int, k_rank: int) -> Iterator[Attend]:
    """The kernel calls of a region of turn number `index`."""
    row = batch.rows[q_rank][index] + region.q_start
    keys = _keys(batch.turns[index], k_rank, region.k_start, region.k_stop)
    num_queries = region.q_stop - region.q_start
    whole = region.causal or batch.joined or len(keys) == 1
    for together in [keys] if whole else _split(keys):
        num_keys = sum(key.tokens for key in together)
        for q0, q1, k0, k1, causal in pieces(num_queries, num_keys, region.causal, batch.shapes):
            query = Block(Kind.Q, q_rank, row + q0, row + q1)
            cut = tuple(piece for key in _part(together, k0, k1) for piece in _cut(key, batch.cuts[k_rank]))
            yield Attend((query,), cut, causal)


def _part(keys: tuple[Block, ...], start: int, stop: int) -> Iterator[Block]:
    """The tokens number `start..stop-1` of some keys."""
    at = 0
    for key in keys:
        first, last = max(start - at, 0), min(stop - at, key.tokens)
        if first < last:
            yield key._replace(start=key.start + first, stop=key.start + last)
        at += key.tokens


def _regions(turn: Turn, q_rank: int, k_rank: int) -> list[Region]:
    """What of a turn's keys on `k_rank` its queries on `q_rank` see: all that is cached, causally what is new."""
    num_queries, num_cached = turn.num_new(q_rank), sum(map(len, turn.cached_runs[k_rank]))
    if not num_queries:
        return []
    found = [Region(0, num_queries, 0, num_cached, False)] if num_cached else []
    for region in visible_regions(turn.layout, turn.shares[q_rank], turn.shares[k_rank], True):
        size = region.q_stop - region.q_start
        moved = region._replace(k_start=region.k_start + num_cached, k_stop=region.k_stop + num_cached)
        moved = moved._replace(causal=moved.causal and size > 1)
        last = found[-1] if found else None
        if last and not moved.causal and last[:2] == moved[:2] and last.k_stop == moved.k_start:
            found[-1] = last._replace(k_stop=moved.k_stop)
        else:
            found.append(moved)
    return found


def _split(keys: tuple[Block, ...]) -> Iterator[tuple[Block, ...]]:
    """A call for every long run, which is read where it lies, and one for all short ones together."""
    short = tuple(key for key in keys if key.tokens < LONG_RUN)
    yield from ((key,) for key in keys if key.tokens >= LONG_RUN)
    if short:
        yield short


def pass_kv(batch: Batch) -> CachePlan:
    """Step t: rank r attends to what rank r-t has, and passes it on to r+1."""
    n = batch.n
    held = [
        dict.fromkeys(
            piece
            for turn in batch.turns
            for block in _keys(turn, rank, 0, _num_keys(turn, rank))
            for piece in _cut(block, batch.cuts[rank])
        )
        for rank in range(n)
    ]
    steps = []
    for t in range(n):
        moves = [Move(block, r, (r + 1) % n) for r in range(n) for block in held[(r - t) % n]] if t < n - 1 else []
        steps.append(Step(tuple(moves), tuple(batch.calls[r][(r - t) % n] for r in range(n))))
    return _finished("pass_kv", batch, steps)


def pass_q(batch: Batch) -> CachePlan:
    """Step t: rank r attends for the queries of rank r-t, and passes them on to r+1; at the end all results go home."""
    n = batch.n
    steps = []
    for t in range(n):
        moves = [
            Move(Block(Kind.Q, home, 0, batch.num_rows(home)), r, (r + 1) % n)
            for r in range(n)
            if batch.num_rows(home := (r - t) % n) and t < n - 1
        ]
        steps.append(Step(tuple(moves), tuple(batch.calls[(r - t) % n][r] for r in range(n))))
    return _finished("pass_q", batch, [*steps, *_homeward(steps, n)])


def one_hop(batch: Batch) -> CachePlan:
    """Queries go to all ranks while each attends its own; then each attends for the others; then results go home."""
    n = batch.n
    own = tuple(batch.calls[r][r] for r in range(n))
    others = tuple(tuple(c for t in range(1, n) for c in batch.calls[(r - t) % n][r]) for r in range(n))
    moves = [
        Move(Block(Kind.Q, home, 0, batch.num_rows(home)), home, (home + t) % n)
        for t in range(1, n)
        for home in range(n)
        if batch.num_rows(home)
    ]
    steps = [Step(tuple(moves), own)] + ([Step((), others)] if n > 1 else [])
    return _finished("one_hop", batch, [*steps, *_homeward(steps, n)])


MODES: dict[str, Callable[[Batch], CachePlan]] = {"pass_kv": pass_kv, "pass_q": pass_q, "one_hop": one_hop}


def build(mode: str, batch: Batch) -> CachePlan:
    """The plan of `mode` for a batch, made once.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in MODES:
        raise refuse("inference.mode", mode, "one of " + ", ".join(MODES), "Choose one of these.")
    if mode not in batch.plans:
        batch.plans[mode] = MODES[mode](batch)
    return batch.plans[mode]


def _homeward(steps: Sequence[Step], n: int) -> list[Step]:
    """One step in which every rank sends home what it has computed for others.

    Nearest ranks first, as seen from home: the order of merging is then the same whichever rank a sequence begins on.
    """
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for step in steps:
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                for query in attend.queries:
                    if query.home != rank:
                        rows.setdefault((rank, query.home), []).append((query.start, query.stop))
    moves = [
        Move(Block(Kind.OUT, home, *span, origin=rank), rank, home)
        for rank, home in sorted(rows, key=lambda pair: ((pair[0] - pair[1]) % n, pair))
        for span in _united(rows[rank, home])
    ]
    return [Step(tuple(moves), ((),) * n)] if moves else []


def _united(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans that touch or overlap, as one."""
    united: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(stop, united[-1][1]))
        else:
            united.append((start, stop))
    return united


def _finished(name: str, batch: Batch, steps: Sequence[Step]) -> CachePlan:
    plan = prune(CachePlan(name, batch.layout(), True, tuple(steps), batch=batch))
    assert isinstance(plan, CachePlan)
    sealed = seal(plan)
    assert isinstance(sealed, CachePlan)
    return sealed


def verify_over_cache(plan: CachePlan) -> None:
    """Prove that every new token attends each of its sequence's tokens up to itself once, and nothing else.

    Raises:
        PlanError: it does not; names the call, move or block.
    """
    for t, step in enumerate(plan.steps):
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                if not set.intersection(*(plan.owners(block) for block in (*attend.queries, *attend.keys))):
                    raise PlanError(f"{plan.name}, step {t}, rank {rank}: {attend} is not of one sequence")
    verify(plan)
