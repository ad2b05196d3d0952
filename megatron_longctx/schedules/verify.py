"""Proof that a plan computes attention: each visible pair once, nothing used before it arrives, buffers bounded."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from .keep import calls_by_home
from .plan import RESULTS, Attend, Block, Heads, Kind, Move, Plan
from .residency import buffer_need
from .transpose import gradients_away

_NO_DIAGONAL = 1 << 62  # beyond every slot: a full call shows all of its keys


class PlanError(ValueError):
    """A plan that does not compute attention, with what is wrong and where."""


def verify(plan: Plan, forward: Plan | None = None) -> None:
    """Check a forward or backward plan.

    Args:
        forward: the plan that has run before the backward plan `plan`, with what that takes for kept.

    Raises:
        PlanError: a pair computed twice, never, or against the mask; a move from a rank that does not hold the block,
            to itself, or of a block that is there already; a block attended before it arrives; a result that does not
            reach its home exactly once; buffers above `plan.buffers`; something kept that was never received, or
            queries kept whose out is not all computed in one call.
    """
    _check_spans(plan)
    _check_pairs(plan)
    _check_kept(plan, forward)
    _check_flow(plan)
    for kind, need in buffer_need(plan).items():
        if need > plan.buffer_tokens(kind):
            raise PlanError(f"{plan.name}: needs buffers for {need} {kind} tokens, states {plan.buffer_tokens(kind)}")


def _check_spans(plan: Plan) -> None:
    blocks = [(t, move.block) for t, step in enumerate(plan.steps) for move in step.moves]
    for t, step in enumerate(plan.steps):
        for attends in step.attends:
            blocks += [(t, block) for attend in attends for block in (*attend.queries, *attend.keys)]
    blocks += [(0, block) for kept in plan.kept for block in kept]
    for t, block in blocks:
        if not (0 <= block.home < plan.n and 0 <= block.start < block.stop <= plan.num_slots(block.kind, block.home)):
            raise PlanError(f"{plan.name}, step {t}: {block} is not a span of its home rank's tokens")
        if not 0 <= block.heads.part < block.heads.parts:
            raise PlanError(f"{plan.name}, step {t}: {block} has no such part of the heads")


class _Region(NamedTuple):
    """Query slots against key slots of two homes: query i sees key j if `j <= i + diagonal`."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    diagonal: int
    heads: Heads

    def common_pair(self, other: _Region) -> tuple[int, int] | None:
        """A pair that both compute: if there is one, then also the last common query with the first common key."""
        if not (self.heads.covers(other.heads) or other.heads.covers(self.heads)):
            return None
        i, j = min(self.q_stop, other.q_stop) - 1, max(self.k_start, other.k_start)
        inside = i >= max(self.q_start, other.q_start) and j < min(self.k_stop, other.k_stop)
        return (i, j) if inside and j <= i + min(self.diagonal, other.diagonal) else None


def _check_pairs(plan: Plan) -> None:
    """Every call is visible, no two overlap, and their areas add up to the mask's: so each pair is there once."""
    calls: dict[tuple[int, int], list[_Region]] = {}
    total: Counter[int] = Counter()
    for t, step in enumerate(plan.steps):
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                _check_call(plan, attend, f"{plan.name}, step {t}, rank {rank}: {attend}")
                total[attend.heads.parts] += attend.pairs
                for homes, region in _regions(attend):
                    calls.setdefault(homes, []).append(region)
    for (q_home, k_home), regions in calls.items():
        for index, region in enumerate(regions):
            for other in regions[:index]:
                pair = region.common_pair(other)
                if pair:
                    raise PlanError(
                        f"{plan.name}: query slot {pair[0]} of rank {q_home} attends key slot {pair[1]} of rank "
                        f"{k_home} twice"
                    )
    computed = sum((Fraction(pairs, count) for count, pairs in total.items()), Fraction(0))
    if computed != plan.visible_pairs():
        raise PlanError(f"{plan.name}: computes {computed} of {plan.visible_pairs()} visible pairs")


def _regions(attend: Attend) -> Iterator[tuple[tuple[int, int], _Region]]:
    """The call as regions between the homes of its queries and of its keys."""
    q_offset = 0
    for query in attend.queries:
        k_offset = 0
        for key in attend.keys:
            diagonal = q_offset - query.start - (k_offset - key.start) if attend.causal else _NO_DIAGONAL
            if key.start <= query.stop - 1 + diagonal:  # the last query sees the first key, so the region is not empty
                yield (
                    (query.home, key.home),
                    _Region(query.start, query.stop, key.start, key.stop, diagonal, attend.heads),
                )
            k_offset += key.tokens
        q_offset += query.tokens


def _check_call(plan: Plan, attend: Attend, where: str) -> None:
    if any(block.heads != attend.heads for block in (*attend.queries, *attend.keys)):
        raise PlanError(f"{where}: queries and keys of a call must be of the same heads")
    if attend.causal and attend.num_keys != attend.num_queries:
        raise PlanError(f"{where}: a causal call needs as many keys as queries")
    if not plan.causal:
        if attend.causal:
            raise PlanError(f"{where}: a causal call under a full mask")
        return
    queries, keys = _tokens(plan, attend.queries), _tokens(plan, attend.keys)
    if not attend.causal:
        if max(run.last for run in keys) > min(run.first for run in queries):
            raise PlanError(f"{where}: its last key lies after its first query")
        return
    if any(after.first < before.last for before, after in pairwise(keys)):
        raise PlanError(f"{where}: the keys of a causal call must be in the order of their tokens")
    # Key i must not lie after query i. Both rise evenly between the corners, so it is enough to look there.
    for i in sorted({i for run in (*queries, *keys) for i in (run.at, run.at + len(run.tokens) - 1)}):
        if _at(keys, i) > _at(queries, i):
            raise PlanError(f"{where}: key {i} lies after its query")


def _check_kept(plan: Plan, forward: Plan | None) -> None:
    if forward is not None and not plan.backward:
        raise PlanError(f"{plan.name}: a plan before it, {forward.name}, though it is no backward plan")
    if forward is not None and plan.kept != forward.kept:
        raise PlanError(f"{plan.name}: takes something else for kept than {forward.name} keeps")
    if plan.kept and len(plan.kept) != plan.n:
        raise PlanError(f"{plan.name}: says of {len(plan.kept)} ranks what they keep, has {plan.n}")
    for rank, kept in enumerate(plan.kept):
        for block in kept:
            if block.kind not in (Kind.Q, Kind.KV) or block.home == rank:
                raise PlanError(f"{plan.name}: rank {rank} keeps {block}, which is no query or key of another rank")
    if not any(block.kind is Kind.Q for kept in plan.kept for block in kept):
        return
    computed = calls_by_home(plan)
    for step in plan.steps:
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                for query in attend.queries if plan.keeps_queries(attend, rank) else ():
                    if any(call is not attend and query.overlaps(other) for other, call in computed[query.home]):
                        raise PlanError(f"{plan.name}: rank {rank} keeps the out of {query}, some of it from elsewhere")


class _Run(NamedTuple):
    """Evenly spaced tokens from position `at` of a call on."""

    at: int
    tokens: range

    @property
    def first(self) -> int:
        return self.tokens[0]

    @property
    def last(self) -> int:
        return self.tokens[-1]


def _tokens(plan: Plan, blocks: tuple[Block, ...]) -> list[_Run]:
    runs, at = [], 0
    for block in blocks:
        for tokens in plan.runs(block):
            runs.append(_Run(at, tokens))
            at += len(tokens)
    return runs


def _at(runs: list[_Run], i: int) -> int:
    run = runs[bisect.bisect_right([run.at for run in runs], i) - 1]
    return run.tokens[i - run.at]


class _Holdings:
    """What one rank holds: its own tokens, what has arrived, and results it has computed."""

    def __init__(self) -> None:
        self._spans: dict[tuple[Kind, int, int], list[Block]] = {}

    def add(self, block: Block) -> None:
        bisect.insort(self._spans.setdefault((block.kind, block.home, block.origin), []), block)

    def holds(self, block: Block) -> bool:
        return any(held.contains(block) for held in self._spans.get((block.kind, block.home, block.origin), ()))

    def overlaps(self, block: Block) -> bool:
        return any(other.overlaps(block) for other in self._spans.get((block.kind, block.home, block.origin), ()))


def _check_flow(plan: Plan) -> None:
    held = [_Holdings() for _ in range(plan.n)]
    for rank in range(plan.n):
        for kind in (Kind.KV, Kind.Q, Kind.Q_GRAD, Kind.GRAD):
            held[rank].add(Block(kind, rank, 0, plan.num_slots(kind, rank)))
    results = _Results()
    for t, step in enumerate(plan.steps):
        for move in step.moves:
            where = f"{plan.name}, step {t}: {move.block} from {move.source} to {move.destination}"
            _check_move(plan, move, held, where)
            if move.block.kind in RESULTS:
                results.move(move, where)
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                for block in plan.inputs(attend, rank):
                    if not held[rank].holds(block):
                        raise PlanError(f"{plan.name}, step {t}: rank {rank} attends {block} before it arrives")
        for move in step.moves:
            if move.block.kind not in RESULTS and held[move.destination].overlaps(move.block):
                raise PlanError(f"{plan.name}, step {t}: {move.block} reaches rank {move.destination} twice")
            held[move.destination].add(move.block)
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                for result in results_away(attend, rank, plan.backward):
                    results.compute(result)
    for rank, kept in enumerate(plan.kept if not plan.backward else ()):
        for block in kept:
            if not held[rank].holds(block):
                raise PlanError(f"{plan.name}: rank {rank} keeps {block}, which it never receives")
    lost = results.lost()
    if lost:
        raise PlanError(f"{plan.name}: {lost[0]} never reaches its home, nor do {len(lost) - 1} more results")


class _Results:
    """Results computed away from home: each has to leave in one message, and to arrive once."""

    def __init__(self) -> None:
        self._unsent: dict[tuple[Kind, int, int], list[Block]] = {}
        self._travelling: Counter[Block] = Counter()

    def compute(self, result: Block) -> None:
        self._unsent.setdefault((result.kind, result.home, result.origin), []).append(result)

    def move(self, move: Move, where: str) -> None:
        block = move.block
        if move.source == block.origin:  # else it is passed on
            key = (block.kind, block.home, block.origin)
            unsent = self._unsent.get(key, [])
            carried = [result for result in unsent if block.contains(result)]
            if not carried:
                raise PlanError(f"{where}: the source has nothing of it computed that is not sent yet")
            if any(result not in carried and result.overlaps(block) for result in unsent):
                raise PlanError(f"{where}: cuts a result that the source has computed as one")
            self._unsent[key] = [result for result in unsent if result not in carried]
            self._travelling[block] += 1
        if move.destination == block.home:
            self._travelling[block] -= 1
            if self._travelling[block] < 0:
                raise PlanError(f"{where}: reaches its home more often than it was sent")

    def lost(self) -> list[Block]:
        unsent = [result for results in self._unsent.values() for result in results]
        return sorted([*unsent, *self._travelling.elements()])


def _check_move(plan: Plan, move: Move, held: list[_Holdings], where: str) -> None:
    if not (0 <= move.source < plan.n and 0 <= move.destination < plan.n) or move.source == move.destination:
        raise PlanError(f"{where}: source and destination must be two ranks below {plan.n}")
    if not held[move.source].holds(move.block) and move.source != move.block.origin:
        raise PlanError(f"{where}: the source does not hold it yet")


def results_away(attend: Attend, rank: int, backward: bool) -> list[Block]:
    """What `rank` computes in `attend` for other ranks, and so has to send."""
    if backward:
        return gradients_away(attend, rank)
    return [query._replace(kind=Kind.OUT, origin=rank) for query in attend.queries if query.home != rank]
