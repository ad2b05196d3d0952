"""Proof that a plan computes attention: each visible pair once, nothing used before it arrives, buffers bounded."""

from __future__ import annotations

import bisect
from collections import Counter
from itertools import accumulate

from ..layout import Layout
from .plan import RESULTS, Attend, Block, Kind, Move, Plan
from .residency import buffer_need
from .transpose import gradients_away


class PlanError(ValueError):
    """A plan that does not compute attention, with what is wrong and where."""


def verify(plan: Plan) -> None:
    """Check a forward or backward plan.

    Raises:
        PlanError: a pair computed twice, never, or against the mask; a move from a rank that does not hold the block,
            to itself, or of a block that is there already; a block attended before it arrives; a result that does not
            reach its home exactly once; buffers above `plan.buffers`.
    """
    _check_spans(plan)
    _check_pairs(plan)
    _check_flow(plan)
    for kind, need in buffer_need(plan).items():
        if need > plan.buffer_tokens(kind):
            raise PlanError(f"{plan.name}: needs buffers for {need} {kind} tokens, states {plan.buffer_tokens(kind)}")


def _check_spans(plan: Plan) -> None:
    blocks = [(t, move.block) for t, step in enumerate(plan.steps) for move in step.moves]
    for t, step in enumerate(plan.steps):
        for attends in step.attends:
            blocks += [(t, block) for attend in attends for block in (attend.query, *attend.keys)]
    for t, block in blocks:
        if not (0 <= block.home < plan.n and 0 <= block.start < block.stop <= plan.layout.num_tokens(block.home)):
            raise PlanError(f"{plan.name}, step {t}: {block} is not a span of its home rank's tokens")


def _check_pairs(plan: Plan) -> None:
    """Every call is visible, no two overlap, and their areas add up to the mask's: so each pair is there once."""
    calls: dict[tuple[int, int], list[tuple[int, int, int, int, int]]] = {}
    total = 0
    for t, step in enumerate(plan.steps):
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                _check_mask(plan, attend, f"{plan.name}, step {t}, rank {rank}: {attend}")
                total += attend.pairs
                offset = 0
                for key in attend.keys:
                    # query slot i sees key slot j if j <= i + diagonal (full: a diagonal beyond the end)
                    diagonal = key.start - offset - attend.query.start if attend.causal else plan.layout.length
                    region = (attend.query.start, attend.query.stop, key.start, key.stop, diagonal)
                    calls.setdefault((attend.query.home, key.home), []).append(region)
                    offset += key.tokens
    for (q_home, k_home), regions in calls.items():
        for index, a in enumerate(regions):
            for b in regions[:index]:
                i, j = min(a[1], b[1]) - 1, max(a[2], b[2])  # the likeliest common pair: last query, first key
                inside = i >= max(a[0], b[0]) and j < min(a[3], b[3])
                if inside and j <= i + min(a[4], b[4]):
                    raise PlanError(
                        f"{plan.name}: query slot {i} of rank {q_home} attends key slot {j} of rank {k_home} twice"
                    )
    if total != plan.visible_pairs():
        raise PlanError(f"{plan.name}: computes {total} of {plan.visible_pairs()} visible pairs")


def _check_mask(plan: Plan, attend: Attend, where: str) -> None:
    query, layout = attend.query, plan.layout
    if attend.causal and attend.num_keys != query.tokens:
        raise PlanError(f"{where}: a causal call needs as many keys as queries")
    if not plan.causal:
        if attend.causal:
            raise PlanError(f"{where}: a causal call under a full mask")
        return
    offset = 0
    for key in attend.keys:
        if attend.causal:  # key i must not come after query i: enough to look where either starts a new span
            for i in _corners(layout, query, key, offset):
                if layout.token(key.home, key.start + i) > layout.token(query.home, query.start + offset + i):
                    raise PlanError(f"{where}: key {i} of {key} lies after its query")
        elif layout.token(key.home, key.stop - 1) > layout.token(query.home, query.start):
            raise PlanError(f"{where}: the last key of {key} lies after the first query")
        offset += key.tokens


def _corners(layout: Layout, query: Block, key: Block, offset: int) -> set[int]:
    """Positions in `key` where tokens stop being evenly spaced, on its side or on the queries'."""
    corners = {0, key.tokens - 1}
    for block, start in ((key, key.start), (query, query.start + offset)):
        for cut in accumulate(map(len, layout.spans[block.home])):
            corners |= {cut - start, cut - start - 1}
    return {i for i in corners if 0 <= i < key.tokens}


class _Holdings:
    """What one rank holds: its own tokens, what has arrived, and results it has computed."""

    def __init__(self) -> None:
        self._spans: dict[tuple[Kind, int, int], list[Block]] = {}

    def add(self, block: Block) -> None:
        bisect.insort(self._spans.setdefault((block.kind, block.home, block.origin), []), block)

    def holds(self, block: Block) -> bool:
        return any(held.contains(block) for held in self._spans.get((block.kind, block.home, block.origin), ()))

    def overlaps(self, block: Block) -> bool:
        held = self._spans.get((block.kind, block.home, block.origin), ())
        return any(other.start < block.stop and block.start < other.stop for other in held)


def _check_flow(plan: Plan) -> None:
    held = [_Holdings() for _ in range(plan.n)]
    for rank in range(plan.n):
        tokens = plan.layout.num_tokens(rank)
        for kind in (Kind.KV, Kind.Q, Kind.Q_GRAD):
            held[rank].add(Block(kind, rank, 0, tokens))
    owed: Counter[Block] = Counter()  # results computed away from home and not delivered yet
    for t, step in enumerate(plan.steps):
        for move in step.moves:
            _check_move(
                plan, move, held, f"{plan.name}, step {t}: {move.block} from {move.source} to {move.destination}"
            )
            if move.block.kind in RESULTS and move.destination == move.block.home:
                owed[move.block] -= 1
                if owed[move.block] < 0:
                    raise PlanError(f"{plan.name}, step {t}: {move.block} reaches its home more often than computed")
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                query = attend.query._replace(kind=Kind.Q_GRAD) if plan.backward else attend.query
                for block in (query, *attend.keys):
                    if not held[rank].holds(block):
                        raise PlanError(f"{plan.name}, step {t}: rank {rank} attends {block} before it arrives")
        for move in step.moves:
            if move.block.kind not in RESULTS and held[move.destination].overlaps(move.block):
                raise PlanError(f"{plan.name}, step {t}: {move.block} reaches rank {move.destination} twice")
            held[move.destination].add(move.block)
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                for result in results_away(attend, rank, plan.backward):
                    held[rank].add(result)
                    owed[result] += 1
    lost = sorted(owed.elements())
    if lost:
        raise PlanError(f"{plan.name}: {lost[0]} never reaches its home, nor do {len(lost) - 1} more results")


def _check_move(plan: Plan, move: Move, held: list[_Holdings], where: str) -> None:
    if not (0 <= move.source < plan.n and 0 <= move.destination < plan.n) or move.source == move.destination:
        raise PlanError(f"{where}: source and destination must be two ranks below {plan.n}")
    if not held[move.source].holds(move.block):
        raise PlanError(f"{where}: the source does not hold it yet")


def results_away(attend: Attend, rank: int, backward: bool) -> list[Block]:
    """What `rank` computes in `attend` for other ranks, and so has to send."""
    if backward:
        return gradients_away(attend, rank)
    query = attend.query
    return [Block(Kind.OUT, query.home, query.start, query.stop, rank)] if query.home != rank else []
