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
from itertools import accumulate

from ..config import refuse
from ..layout import Layout, zigzag
from ..schedules import Attend, Block, Kind, Move, Plan, PlanError, Step, seal, verify
from ..schedules.prune import prune
from ..schedules.visibility import Region, visible_regions
from .ledger import Turn

LONG_RUN = 2048
"""Runs of at least so many slots get a kernel call of their own; shorter ones of a call are copied together."""


@dataclass(frozen=True)
class Batch:
    """The turns of several sequences, computed together on `n` ranks with `slots` cache slots each."""

    n: int
    slots: int
    turns: tuple[Turn, ...]

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """By rank, the first row of every turn's new tokens, and the number of rows."""
        return tuple(tuple(accumulate((t.num_new(r) for t in self.turns), initial=0)) for r in range(self.n))

    @cached_property
    def bases(self) -> tuple[int, ...]:
        """By turn, the number of its first token when all tokens, cached and new, are numbered turn after turn."""
        return tuple(accumulate((turn.cached + turn.new for turn in self.turns), initial=0))

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
        pieces = (self._key_pieces if block.kind is Kind.KV else self._row_pieces)[block.home]
        first = max(bisect.bisect_right(pieces, block.start, key=lambda piece: piece[0]) - 1, 0)
        runs = []
        for start, tokens, _ in pieces[first:]:
            if start >= block.stop:
                break
            run = tokens[max(block.start - start, 0) : block.stop - start]
            runs += [run] if run else []
        return runs

    def turns_of(self, block: Block) -> set[int]:
        """The numbers of the turns that own the block's rows or slots; -1 for slots that none does."""
        pieces = (self._key_pieces if block.kind is Kind.KV else self._row_pieces)[block.home]
        found = [(turn, start, start + len(t)) for start, t, turn in pieces]
        inside = [(turn, min(b, block.stop) - max(a, block.start)) for turn, a, b in found]
        covered = sum(size for _, size in inside if size > 0)
        return {turn for turn, size in inside if size > 0} | ({-1} if covered < block.tokens else set())

    def visible_pairs(self) -> int:
        return sum(turn.new * turn.cached + turn.new * (turn.new + 1) // 2 for turn in self.batch.turns)

    @cached_property
    def _row_pieces(self) -> list[list[tuple[int, range, int]]]:
        """By rank: (first row, tokens, turn) of every stretch of rows with consecutive tokens."""
        pieces: list[list[tuple[int, range, int]]] = [[] for _ in range(self.n)]
        for index, turn in enumerate(self.batch.turns):
            base = self.batch.bases[index] + turn.cached
            for rank in range(self.n):
                row = self.batch.rows[rank][index]
                for span in turn.new_spans(rank):
                    pieces[rank].append((row, range(base + span.start, base + span.stop), index))
                    row += len(span)
        return pieces

    @cached_property
    def _key_pieces(self) -> list[list[tuple[int, range, int]]]:
        """By rank: (first slot, tokens, turn) of every stretch of slots with evenly spaced tokens, by slot."""
        pieces: list[list[tuple[int, range, int]]] = [[] for _ in range(self.n)]
        for index, turn in enumerate(self.batch.turns):
            base = self.batch.bases[index]
            for rank in range(self.n):
                new = [range(s.start + turn.cached, s.stop + turn.cached) for s in turn.new_spans(rank)]
                runs = [*turn.cached_runs[rank], *turn.new_runs[rank]]
                for slot, positions in _matched(runs, [*turn.positions[rank], *new]):
                    tokens = range(positions.start + base, positions.stop + base, positions.step)
                    pieces[rank].append((slot, tokens, index))
        return [sorted(found, key=lambda piece: piece[0]) for found in pieces]


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


def _keys(batch: Batch, turn: Turn, rank: int, start: int, stop: int) -> tuple[Block, ...]:
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


def _num_keys(turn: Turn, rank: int) -> int:
    return sum(map(len, turn.cached_runs[rank])) + turn.num_new(rank)


def calls(batch: Batch, q_rank: int, k_rank: int) -> tuple[Attend, ...]:
    """The kernel calls of all of `q_rank`'s new queries over all that `k_rank` has cached or gets now."""
    attends: list[Attend] = []
    for index, turn in enumerate(batch.turns):
        row = batch.rows[q_rank][index]
        for region in _regions(batch, turn, q_rank, k_rank):
            query = Block(Kind.Q, q_rank, row + region.q_start, row + region.q_stop)
            keys = _keys(batch, turn, k_rank, region.k_start, region.k_stop)
            attends += _split(query, keys, region.causal)
    return tuple(attends)


def _regions(batch: Batch, turn: Turn, q_rank: int, k_rank: int) -> list[Region]:
    """What of a turn's keys on `k_rank` its queries on `q_rank` see: all that is cached, causally what is new."""
    num_queries, num_cached = turn.num_new(q_rank), sum(map(len, turn.cached_runs[k_rank]))
    if not num_queries:
        return []
    layout = zigzag(batch.n, turn.new)
    found = [Region(0, num_queries, 0, num_cached, False)] if num_cached else []
    for region in visible_regions(layout, turn.shares[q_rank], turn.shares[k_rank], True):
        size = region.q_stop - region.q_start
        moved = region._replace(k_start=region.k_start + num_cached, k_stop=region.k_stop + num_cached)
        moved = moved._replace(causal=moved.causal and size > 1)
        last = found[-1] if found else None
        if last and not moved.causal and last[:2] == moved[:2] and last.k_stop == moved.k_start:
            found[-1] = last._replace(k_stop=moved.k_stop)
        else:
            found.append(moved)
    return found


def _split(query: Block, keys: tuple[Block, ...], causal: bool) -> Iterator[Attend]:
    """A call for every long run, which is read where it lies, and one for all short ones together."""
    if causal or len(keys) == 1:
        yield Attend((query,), keys, causal)
        return
    short = tuple(key for key in keys if key.tokens < LONG_RUN)
    yield from (Attend((query,), (key,), False) for key in keys if key.tokens >= LONG_RUN)
    if short:
        yield Attend((query,), short, False)


def pass_kv(batch: Batch) -> CachePlan:
    """Step t: rank r attends to what rank r-t has, and passes it on to r+1."""
    n = batch.n
    held = [
        [block for turn in batch.turns for block in _keys(batch, turn, rank, 0, _num_keys(turn, rank))]
        for rank in range(n)
    ]
    steps = []
    for t in range(n):
        moves = [Move(block, r, (r + 1) % n) for r in range(n) for block in held[(r - t) % n]] if t < n - 1 else []
        steps.append(Step(tuple(moves), tuple(calls(batch, r, (r - t) % n) for r in range(n))))
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
        steps.append(Step(tuple(moves), tuple(calls(batch, (r - t) % n, r) for r in range(n))))
    return _finished("pass_q", batch, [*steps, *_homeward(steps, n)])


def one_hop(batch: Batch) -> CachePlan:
    """Queries go to all ranks while each attends its own; then each attends for the others; then results go home."""
    n = batch.n
    own = tuple(calls(batch, r, r) for r in range(n))
    others = tuple(tuple(c for t in range(1, n) for c in calls(batch, (r - t) % n, r)) for r in range(n))
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
    """The plan of `mode` for a batch.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in MODES:
        raise refuse("inference.mode", mode, "one of " + ", ".join(MODES), "Choose one of these.")
    return MODES[mode](batch)


def _homeward(steps: Sequence[Step], n: int) -> list[Step]:
    """One step in which every rank sends home what it has computed for others."""
    moves = []
    for rank in range(n):
        rows: dict[int, list[tuple[int, int]]] = {}
        for step in steps:
            for attend in step.attends[rank]:
                for query in attend.queries:
                    if query.home != rank:
                        rows.setdefault(query.home, []).append((query.start, query.stop))
        for home, spans in sorted(rows.items()):
            moves += [Move(Block(Kind.OUT, home, *span, origin=rank), rank, home) for span in _united(spans)]
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
                turns = set[int]().union(*(plan.turns_of(block) for block in (*attend.queries, *attend.keys)))
                if len(turns) != 1 or -1 in turns:
                    raise PlanError(f"{plan.name}, step {t}, rank {rank}: {attend} is not of one sequence")
    verify(plan)
