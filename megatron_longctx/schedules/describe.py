"""A plan in words and numbers: who holds, sends and attends what, per step."""

from __future__ import annotations

from collections.abc import Sequence

from .cost import Workload
from .lower import Lowering, Target
from .plan import Attend, Kind, Plan
from .program import Program

_Moved = dict[Kind, tuple[float, float]]


def moved_tokens(plan: Plan) -> list[_Moved]:
    """By rank, tokens (sent, received) over the whole plan, per kind; part of the heads counts as part of a token."""
    moved: list[_Moved] = [{} for _ in range(plan.n)]
    for step in plan.steps:
        for block, source, destination in step.moves:
            tokens = block.tokens / block.heads.parts
            for rank, sent, received in ((source, tokens, 0), (destination, 0, tokens)):
                before = moved[rank].get(block.kind, (0, 0))
                moved[rank][block.kind] = (before[0] + sent, before[1] + received)
    return moved


def summary(plan: Plan, workload: Workload) -> list[str]:
    """Lines on how even the work is, and on what travels."""
    moves = moved_tokens(plan)
    ways = (
        max(sum(tokens[way] * workload.token_bytes(kind) for kind, tokens in moved.items()) for moved in moves)
        for way in (0, 1)
    )
    sent, received = map(_bytes, ways)
    return [
        f"  balance  the busiest rank computes {plan.imbalance_pct():.1f}% more than the average",
        f"  bytes    a rank sends {sent} and receives {received} at most, in one layer",
    ]


def describe(plan: Plan, target: Target | None = None, beside: Sequence[str] = ()) -> str:
    """The plan as text.

    Args:
        target: what it is lowered for; adds bytes moved and held.
        beside: more lines of the summary that it begins with.
    """
    direction = "backward" if plan.backward else "forward"
    lines = [
        f"{plan.name} {direction}: {plan.n} ranks, {plan.mask.length} tokens ({plan.queries.name}), {plan.mask} mask, "
        f"{len(plan.steps)} steps, {plan.idle_fraction():.1%} of rank-time idle",
        *([f"  nodes    of {plan.sum_in_node} ranks sum what they send of gradients"] if plan.sum_in_node else []),
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
    return f"attend q{queries} x kv {keys}{part} {_seen(attend)}"


def _seen(attend: Attend) -> str:
    if len(attend.slices) > 3:
        return f"in {len(attend.slices)} slices, {attend.pairs} pairs"
    (only, *others) = attend.slices
    whole = not others and (only.num_queries, only.num_keys) == (attend.num_queries, attend.num_keys)
    if whole and (only.is_full or (only.hi == 0 and only.num_queries == only.num_keys)):
        return "full" if only.is_full else "causal"
    return "where " + ", ".join(map(str, attend.slices))


def _totals(plan: Plan, target: Target | None) -> list[str]:
    pairs = [plan.pairs(rank) for rank in range(plan.n)]
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
        lowering = Lowering(plan, target)
        lines += _held([lowering.program(rank) for rank in range(plan.n)], target.workload)
    return lines


def _held(programs: list[Program], workload: Workload) -> list[str]:
    """Buffers and send memory, of the rank with the most."""
    lines = []
    for kind in Kind:
        tokens = max(sum(b.tokens / b.parts for b in p.buffers if b.kind is kind and not b.kept) for p in programs)
        if tokens:
            size = _bytes(tokens * workload.token_bytes(kind))
            lines.append(f"  buffers for other ranks' {kind}: {tokens:.0f} tokens = {size} at most")
    kept = max(sum(b.tokens * workload.token_bytes(b.kind, b.heads) for b in p.buffers if b.kept) for p in programs)
    if kept:
        lines.append(f"  kept of other ranks', for backward: {_bytes(kept)} at most, and the outputs of its queries")
    sent = max(p.sends.num_bytes for p in programs)
    return lines + ([f"  send memory: {_bytes(sent)} at most"] if sent else [])


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
