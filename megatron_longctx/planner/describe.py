"""Plans in words and numbers: who holds, sends and attends to what in every step, and where documents are placed."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..core.plans.plan import Attend, Kind, Plan
from ..core.plans.recorder import Recorder
from ..core.plans.recording import Recording
from ..core.plans.slices import indices_within
from ..core.plans.workload import Target
from .cost import Workload
from .footprint import row_bytes
from .simulate import Simulation


def moved_tokens(plan: Plan) -> list[dict[Kind, tuple[float, float]]]:
    """Return the tokens (sent, received) of every kind over the whole plan, indexed by rank.

    A part of the heads counts as a part of a token.
    """
    moved: list[dict[Kind, tuple[float, float]]] = [{} for _ in range(plan.n)]
    for step in plan.steps:
        for block, source, destination in step.moves:
            tokens = block.tokens / block.heads.parts
            for rank, sent, received in ((source, tokens, 0), (destination, 0, tokens)):
                before = moved[rank].get(block.kind, (0, 0))
                moved[rank][block.kind] = (before[0] + sent, before[1] + received)
    return moved


def summary(plan: Plan, workload: Workload) -> list[str]:
    """Return lines with the balance of the work and the bytes that move."""
    moves = moved_tokens(plan)
    sent, received = (
        _bytes(max(sum(tokens[way] * workload.token_bytes(kind) for kind, tokens in moved.items()) for moved in moves))
        for way in (0, 1)
    )
    return [
        f"  balance  the busiest rank computes {imbalance_pct(plan):.1f}% more than the average",
        f"  bytes    a rank sends {sent} and receives {received} at most, in one layer",
    ]


def describe(
    plan: Plan, target: Target | None = None, beside: Sequence[str] = (), idle_share: float | None = None
) -> str:
    """Return the plan as text.

    Args:
        target: the target for which the plan is recorded; adds the bytes moved and held.
        beside: additional lines for the summary at the beginning.
        idle_share: the simulated share of rank-time that is not spent on computing; None if it is not known.
    """
    direction = "backward" if plan.backward else "forward"
    nodes = f"  nodes    {plan.sum_in_node} ranks each sum their gradients for other nodes before they send them"
    idle = "" if idle_share is None else f", {idle_share:.1%} of rank-time idle"
    lines = [
        f"{plan.name} {direction}: {plan.n} ranks, {plan.mask.length} tokens ({plan.queries.name}), {plan.mask} mask, "
        f"{len(plan.steps)} steps{idle}",
        *([nodes] if plan.sum_in_node else []),
        *beside,
        "",
        "who holds what",
        *(f"  rank {r}: {_spans(plan, r)}  ({plan.queries.num_tokens(r)} tokens)" for r in range(plan.n)),
    ]
    for t, step in enumerate(plan.steps):
        lines += ["", f"step {t}"]
        parts = [[_attend(attend, rank) for attend in step.attends[rank]] or ["idle"] for rank in range(plan.n)]
        for move in step.moves:
            parts[move.source].append(f"send {move.block} -> {move.destination}")
        for move in step.moves:
            parts[move.destination].append(f"receive {move.block} <- {move.source}")
        lines += [f"  rank {rank}: " + "; ".join(parts[rank]) for rank in range(plan.n)]
    return "\n".join([*lines, "", *_totals(plan, target)])


def _spans(plan: Plan, rank: int) -> str:
    return " + ".join(
        f"{span.start}:{span.stop}" + (f":{span.step}" if span.step != 1 else "") if len(span) else "nothing"
        for span in plan.queries.spans[rank]
    )


def _attend(attend: Attend, rank: int) -> str:
    keys = "+".join(f"{'own' if k.home == rank else k.home}[{k.start}:{k.stop}]" for k in attend.keys)
    queries = "+".join(f"[{q.start}:{q.stop}]" + f" of rank {q.home}" * (q.home != rank) for q in attend.queries)
    part = f" heads {attend.heads.part + 1}/{attend.heads.parts}" if attend.heads.parts > 1 else ""
    return f"attend q{queries} x kv {keys}{part} {_visible(attend)}"


def _visible(attend: Attend) -> str:
    if len(attend.slices) > 3:
        return f"in {len(attend.slices)} slices, {attend.pairs} pairs"
    (only, *others) = attend.slices
    whole = not others and (only.num_queries, only.num_keys) == (attend.num_queries, attend.num_keys)
    if whole and (only.is_full or (only.hi == 0 and only.num_queries == only.num_keys)):
        return "full" if only.is_full else "causal"
    return "where " + ", ".join(map(str, attend.slices))


def _totals(plan: Plan, target: Target | None) -> list[str]:
    pairs = rank_pairs(plan)
    mean, moves = sum(pairs) / plan.n or 1, moved_tokens(plan)
    lines = ["totals", f"  {'rank':>4} {'pairs':>16} {'load':>7}  tokens sent / received"]
    workload = target.workload if target else None
    for rank in range(plan.n):
        text = ", ".join(
            f"{kind} {sent:.0f} / {received:.0f}"
            + (f" ({_bytes((sent + received) * workload.token_bytes(kind))})" if workload else "")
            for kind, (sent, received) in sorted(moves[rank].items())
        )
        lines.append(f"  {rank:>4} {pairs[rank]:>16,.0f} {pairs[rank] / mean:>7.1%}  {text or 'nothing'}")
    if target is not None:
        recorder = Recorder(plan, target)
        lines += _memory([recorder.record(rank) for rank in range(plan.n)], target.workload)
    return lines


def _memory(recordings: list[Recording], workload: Workload) -> list[str]:
    """Return lines on the buffers and send memory of the rank with the most."""
    lines = []
    for kind in Kind:
        tokens = max(sum(each.tokens / each.parts for each in r.slots if each.kind is kind) for r in recordings)
        if tokens:
            size = _bytes(tokens * workload.token_bytes(kind))
            lines.append(f"  buffers for other ranks' {kind}: {tokens:.0f} tokens = {size} at most")
    kept = max(sum(row_bytes(memory.rows(), workload) for memory in r.kept_memory) for r in recordings)
    if kept:
        lines.append(f"  kept from other ranks, for backward: {_bytes(kept)} at most, and the outputs of its queries")
    sent = max(r.sends.num_bytes for r in recordings)
    return lines + ([f"  send memory: {_bytes(sent)} at most"] if sent else [])


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


class DocumentShard(NamedTuple):
    """Tokens of document number `document` on a rank. is_whole: they are the whole document."""

    rank: int
    document: int
    tokens: int
    is_whole: bool


def document_shards(plan: Plan) -> Iterator[DocumentShard]:
    """Yield the parts of documents on every rank, in the order of its slots."""
    for rank in range(plan.n):
        held: Counter[int] = Counter()
        for _, span in plan.queries.slot_spans(rank):
            for number, document in enumerate(plan.mask.documents):
                if tokens := len(indices_within(span, document.start, document.stop)):
                    held[number] += tokens
        for number, tokens in held.items():
            start, stop, _ = plan.mask.documents[number]
            yield DocumentShard(rank, number, tokens, tokens == stop - start)


def describe_placement(plan: Plan, workload: Workload, simulation: Simulation | None = None) -> str:
    """Return a table of every rank's tokens, documents, pairs, bytes sent and simulated time, and their imbalance."""
    blocks = [[move.block for moves in plan.sends(rank) for move in moves] for rank in range(plan.n)]
    sent = [sum(b.tokens * workload.token_bytes(b.kind, b.heads) for b in some) for some in blocks]
    tokens, pairs = map(plan.queries.num_tokens, range(plan.n)), rank_pairs(plan)
    columns: dict[str, list[float]] = {"tokens": [*tokens], "pairs": pairs, "MiB sent": [each / 2**20 for each in sent]}
    if simulation is not None:
        columns["computing ms"] = [1e3 * seconds for seconds in simulation.compute_s]
    shards = list(document_shards(plan))
    lines = ["  rank " + "".join(f"{name:>16}" for name in columns) + "  documents whole, in part"]
    for rank in range(plan.n):
        values = "".join(f"{column[rank]:>16,.{3 if '.' in str(column[rank]) else 0}f}" for column in columns.values())
        whole = [each.is_whole for each in shards if each.rank == rank]
        lines.append(f"  {rank:>4} {values}  {sum(whole)}, {len(whole) - sum(whole)}")
    excess = (100 * (max(c) * plan.n / sum(c) - 1) if sum(c) else 0.0 for c in columns.values())
    above = ", ".join(f"{name} {by:.1f}%" for name, by in zip(columns, excess, strict=True) if name != "MiB sent")
    count = f"{len(plan.mask.documents)} documents in the {plan.queries.name} layout"
    return "\n".join([f"{count}; the maximum above the average: {above}", *lines])


def weighted_pairs(attend: Attend) -> float:
    """Return the pairs of a call, multiplied by its share of the heads."""
    return attend.pairs / attend.heads.parts


def rank_pairs(plan: Plan) -> list[float]:
    """Return the query-key pairs that each rank computes, weighted by its share of the heads."""
    return [
        sum(weighted_pairs(attend) for step in plan.steps for attend in step.attends[rank]) for rank in range(plan.n)
    ]


def imbalance_pct(plan: Plan) -> float:
    """Return by how many percent the work of the busiest rank exceeds the average."""
    work = rank_pairs(plan)
    return 100 * (max(work) * plan.n / sum(work) - 1) if sum(work) else 0.0


def idle_fraction(plan: Plan) -> float:
    """Return the share of rank-time spent waiting if every step lasts as long as its busiest rank."""
    busiest = sum(max(sum(weighted_pairs(a) for a in attends) for attends in step.attends) for step in plan.steps)
    return 1 - sum(rank_pairs(plan)) / (plan.n * busiest) if busiest else 0.0
