"""A proof that a plan computes attention: every visible pair once, and nothing is used before it arrives."""

import bisect
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate

from ..core.layout import Layout
from ..core.plans.backward import calls_by_home
from ..core.plans.plan import GRADIENTS, RESULTS, Attend, Block, Heads, Kind, Move, Plan, collector_paused
from ..core.plans.slices import Slice, band_between


class PlanError(ValueError):
    """A plan that does not compute attention. The message says what is wrong and where."""


@collector_paused()
def verify(plan: Plan, forward: Plan | None = None) -> None:
    """Prove that a forward or backward plan is correct.

    Args:
        forward: the forward plan that runs before the backward plan `plan` and keeps the blocks that `plan` expects.

    Raises:
        PlanError: a pair computed twice, never, or against the mask; a move from a rank that does not hold the block,
            to itself, or of a block that the receiver holds already; a block attended before it arrives; a result that
            does not reach its home exactly once; a kept block that was never received, or kept queries whose out is not
            computed in one call; a partial gradient that crosses between nodes beside another one for the same rows,
            although the plan sums them.
    """
    _check_spans(plan)
    _check_pairs(plan)
    _check_kept(plan, forward)
    _check_flow(plan)
    _check_sums(plan)


def _check_spans(plan: Plan) -> None:
    blocks = [(t, move.block) for t, step in enumerate(plan.steps) for move in step.moves]
    blocks += [(t, block) for t, _, attend in plan.calls() for block in (*attend.queries, *attend.keys)]
    blocks += [(0, block) for kept in plan.kept for block in kept]
    for t, block in blocks:
        layout = plan.layout_of(block.kind)
        if not (0 <= block.home < plan.n and 0 <= block.start < block.stop <= layout.num_tokens(block.home)):
            raise PlanError(f"{plan.name}, step {t}: {block} is not a span of its home rank's tokens")
        if not 0 <= block.heads.part < block.heads.parts:
            raise PlanError(f"{plan.name}, step {t}: {block} has no such part of the heads")


def _check_pairs(plan: Plan) -> None:
    """Check that all calls are visible, no two overlap, and their areas add up to the mask's. So each pair is computed
    once."""
    calls: dict[tuple[int, int], list[tuple[Slice, Heads]]] = {}
    total: Counter[int] = Counter()
    for t, rank, attend in plan.calls():
        where = f"{plan.name}, step {t}, rank {rank}: {attend}"
        if any(block.heads != attend.heads for block in (*attend.queries, *attend.keys)):
            raise PlanError(f"{where}: queries and keys of a call must be of the same heads")
        total[attend.heads.parts] += attend.pairs
        inside = 0
        for homes, region in _regions(attend):
            inside += region.pairs
            if _visible_pairs(plan, homes, region) != region.pairs:
                raise PlanError(f"{where}: {region} of ranks {homes} is not all visible")
            calls.setdefault(homes, []).append((region, attend.heads))
        if inside != attend.pairs:
            raise PlanError(f"{where}: a slice is not within its queries and keys")
    for homes, regions in calls.items():
        _check_disjoint(plan, homes, regions)
    computed = sum((Fraction(pairs, count) for count, pairs in total.items()), Fraction(0))
    if computed != plan.mask.pairs:
        raise PlanError(f"{plan.name}: computes {computed} of {plan.mask.pairs} visible pairs")


def _regions(attend: Attend) -> Iterator[tuple[tuple[int, int], Slice]]:
    """Yield the slices of a call, cut by the homes of queries and keys and in slots of these, with the homes."""
    queries = list(zip(attend.queries, accumulate((q.tokens for q in attend.queries), initial=0), strict=False))
    keys = list(zip(attend.keys, accumulate((k.tokens for k in attend.keys), initial=0), strict=False))
    for each in attend.slices:
        for query, q_at in queries:
            for key, k_at in keys:
                region = each.cut(q_at, q_at + query.tokens, k_at, k_at + key.tokens)
                if region is not None:
                    yield (query.home, key.home), region.moved(query.start - q_at, key.start - k_at)


def _visible_pairs(plan: Plan, homes: tuple[int, int], region: Slice) -> int:
    """Return how many pairs of a region the mask shows. It does not use `Visibility`, which made the plan."""
    total = 0
    for q_slot, queries in _spans_within(plan.queries, homes[0], region.q_start, region.q_stop):
        near = plan.mask.slices_of(queries[0], queries[-1] + 1)
        for k_slot, keys in _spans_within(plan.keys, homes[1], region.k_start, region.k_stop):
            for each in near:
                for band in band_between(each, queries, keys):
                    common = band.moved(q_slot, k_slot).overlap(region)
                    total += common.pairs if common else 0
    return total


def _spans_within(layout: Layout, rank: int, start: int, stop: int) -> Iterator[tuple[int, range]]:
    """Yield (first slot, tokens) of the parts of a rank's spans in its slots `start..stop-1`."""
    for slot, span in layout.slot_spans(rank):
        if slot < stop and start < slot + len(span):
            first = max(start - slot, 0)
            yield slot + first, span[first : stop - slot]


def _check_disjoint(plan: Plan, homes: tuple[int, int], regions: list[tuple[Slice, Heads]]) -> None:
    regions.sort()
    open_regions: list[tuple[Slice, Heads]] = []
    for region, heads in regions:
        open_regions = [(other, part) for other, part in open_regions if other.q_stop > region.q_start]
        for other, part in open_regions:
            common = region.overlap(other) if heads.covers(part) or part.covers(heads) else None
            if common is not None:
                raise PlanError(
                    f"{plan.name}: query slot {common.q_start} of rank {homes[0]} attends some of the key slots "
                    f"{common.k_start}..{common.k_stop - 1} of rank {homes[1]} twice"
                )
        open_regions.append((region, heads))


def _check_kept(plan: Plan, forward: Plan | None) -> None:
    if forward is not None and not plan.backward:
        raise PlanError(f"{plan.name}: expected a backward plan to follow {forward.name}, not a forward plan")
    if forward is not None and plan.kept != forward.kept:
        raise PlanError(f"{plan.name}: expects other kept blocks than {forward.name} keeps")
    if plan.kept and len(plan.kept) != plan.n:
        raise PlanError(f"{plan.name}: lists the kept blocks of {len(plan.kept)} ranks, has {plan.n}")
    for rank, kept in enumerate(plan.kept):
        for block in kept:
            if block.kind not in (Kind.Q, Kind.KV) or block.home == rank:
                raise PlanError(f"{plan.name}: rank {rank} keeps {block}, which is not a query or key of another rank")
    if not any(block.kind is Kind.Q for kept in plan.kept for block in kept):
        return
    computed = calls_by_home(plan)
    for _, rank, attend in plan.calls():
        for query in attend.queries if plan.keeps(rank, attend.queries) else ():
            if any(call is not attend and query.overlaps(other) for other, call in computed[query.home]):
                raise PlanError(f"{plan.name}: rank {rank} keeps the out of {query}, some of it from elsewhere")


class _Holdings:
    """The blocks that one rank holds: its own tokens and what has arrived."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[Kind, int, int], list[Block]] = {}

    def add(self, block: Block) -> None:
        bisect.insort(self._blocks.setdefault((block.kind, block.home, block.origin), []), block)

    def holds(self, block: Block) -> bool:
        return any(held.contains(block) for held in self._blocks.get((block.kind, block.home, block.origin), ()))

    def overlaps(self, block: Block) -> bool:
        return any(held.overlaps(block) for held in self._blocks.get((block.kind, block.home, block.origin), ()))


def _check_flow(plan: Plan) -> None:
    held = [_Holdings() for _ in range(plan.n)]
    for rank in range(plan.n):
        for kind in (Kind.KV, Kind.Q, Kind.Q_GRAD, Kind.GRAD):
            held[rank].add(Block(kind, rank, 0, plan.layout_of(kind).num_tokens(rank)))
    results = _Results()
    previous: tuple[Move, ...] = ()
    for t, step in enumerate(plan.steps):
        for move in step.moves:
            where = f"{plan.name}, step {t}: {move.block} from {move.source} to {move.destination}"
            if not (0 <= move.source < plan.n and 0 <= move.destination < plan.n) or move.source == move.destination:
                raise PlanError(f"{where}: source and destination must be two ranks below {plan.n}")
            if not held[move.source].holds(move.block) and move.source != move.block.origin:
                raise PlanError(f"{where}: the source does not hold it yet")
            if move.block.kind in RESULTS:
                results.move(move, where)
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                for block in (block for blocks in plan.inputs(attend, rank) for block in blocks):
                    if not held[rank].holds(block):
                        raise PlanError(f"{plan.name}, step {t}: rank {rank} attends {block} before it arrives")
                for result in plan.remote_results(attend, rank):
                    results.compute(result)
        for move in step.moves:
            if move.block.kind not in RESULTS and held[move.destination].overlaps(move.block):
                raise PlanError(f"{plan.name}, step {t}: {move.block} reaches rank {move.destination} twice")
            held[move.destination].add(move.block)
        results.add_arrived(previous)
        previous = step.moves
    results.add_arrived(previous)
    for rank, kept in enumerate(plan.kept if not plan.backward else ()):
        for block in kept:
            if not held[rank].holds(block):
                raise PlanError(f"{plan.name}: rank {rank} keeps {block}, which it never receives")
    if lost := results.lost():
        raise PlanError(f"{plan.name}: {lost[0]} never reaches its home, nor do {len(lost) - 1} more results")


class _Results:
    """Results that are computed away from home. Each must leave in one message and arrive once; gradients as part of
    one or several sums."""

    def __init__(self) -> None:
        self._unsent: dict[tuple[Kind, int, int], list[Block]] = {}
        self._in_flight: Counter[Block] = Counter()

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
            self._in_flight[block] += 1
        elif block.kind in GRADIENTS:
            raise PlanError(f"{where}: what has arrived there is part of a sum, and is not passed on by itself")
        if move.destination == block.home or block.kind in GRADIENTS:
            self._in_flight[block] -= 1
            if self._in_flight[block] < 0:
                raise PlanError(f"{where}: reaches its home more often than it was sent")

    def add_arrived(self, moves: tuple[Move, ...]) -> None:
        """Count gradients that have arrived at a rank other than their home as computed there."""
        for block, _, rank in moves:
            if block.kind in GRADIENTS and rank != block.home:
                self.compute(block.result(block.kind, rank))

    def lost(self) -> list[Block]:
        unsent = [result for results in self._unsent.values() for result in results]
        return sorted([*unsent, *self._in_flight.elements()])


def _check_sums(plan: Plan) -> None:
    node = plan.sum_in_node
    crossing: dict[tuple[int, Kind, int], list[Move]] = {}
    for step in plan.steps if plan.backward else ():
        for move in step.moves:
            block, source, destination = move
            if block.kind not in GRADIENTS:
                continue
            to_relay = node and source // node == destination // node != block.home // node
            if destination != block.home and not to_relay:
                where = f"{block} goes from {source} to {destination}"
                raise PlanError(f"{plan.name}: {where}: expected its home, or a rank of the node that sums for another")
            if node and source // node != destination // node:
                others = crossing.setdefault((source // node, block.kind, block.home), [])
                for other in others:
                    if other.source != source and other.block.overlaps(block):
                        what = f"{block} and {other.block} both leave the node of ranks {source} and {other.source}"
                        raise PlanError(f"{plan.name}: {what}: expected their sum")
                others.append(move)
