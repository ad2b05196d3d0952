"""A plan in words and numbers: who holds, sends and attends what, per step."""

from __future__ import annotations

from collections.abc import Mapping

from .plan import Attend, Kind, Plan

_Moved = dict[Kind, tuple[float, float]]


def moved_tokens(plan: Plan, rank: int) -> _Moved:
    """Tokens (sent, received) by `rank` over the whole plan, per kind; part of the heads counts as part of a token."""
    return _moved_tokens(plan)[rank]


def _moved_tokens(plan: Plan) -> list[_Moved]:
    """By rank."""
    moved: list[_Moved] = [{} for _ in range(plan.n)]
    for step in plan.steps:
        for block, source, destination, _ in step.moves:
            tokens = block.tokens / block.heads.parts
            for rank, sent, received in ((source, tokens, 0), (destination, 0, tokens)):
                before = moved[rank].get(block.kind, (0, 0))
                moved[rank][block.kind] = (before[0] + sent, before[1] + received)
    return moved


def describe(plan: Plan, bytes_per_token: Mapping[Kind, int] | None = None) -> str:
    """The plan as text.

    Args:
        bytes_per_token: bytes of one token of a block, per kind; adds bytes moved and buffer bytes.
    """
    widths = bytes_per_token or {}
    direction = "backward" if plan.backward else "forward"
    mask = "causal" if plan.causal else "full"
    lines = [
        f"{plan.name} {direction}: {plan.n} ranks, {plan.layout.length} tokens ({plan.layout.name}), {mask} mask, "
        f"{len(plan.steps)} steps, {plan.idle_fraction():.1%} of rank-time idle",
        "",
        "who holds what",
        *(f"  rank {r}: {_spans(plan, r)}  ({plan.layout.num_tokens(r)} tokens)" for r in range(plan.n)),
    ]
    for t, step in enumerate(plan.steps):
        lines += ["", f"step {t}"]
        parts = [[_attend(attend, rank) for attend in step.attends[rank]] or ["idle"] for rank in range(plan.n)]
        for move in step.moves:
            parts[move.source].append(f"send {move.block} -> {move.destination}")
        for move in step.moves:
            parts[move.destination].append(f"receive {move.block} <- {move.source}")
        lines += [f"  rank {rank}: " + "; ".join(parts[rank]) for rank in range(plan.n)]
    return "\n".join([*lines, "", *_totals(plan, widths)])


def _spans(plan: Plan, rank: int) -> str:
    return " + ".join(
        f"{span.start}:{span.stop}" + (f":{span.step}" if span.step != 1 else "") if len(span) else "nothing"
        for span in plan.layout.spans[rank]
    )


def _attend(attend: Attend, rank: int) -> str:
    keys = "+".join(f"{'own' if k.home == rank else k.home}[{k.start}:{k.stop}]" for k in attend.keys)
    queries = "+".join(f"[{q.start}:{q.stop}]" + f" of rank {q.home}" * (q.home != rank) for q in attend.queries)
    part = f" heads {attend.heads.part + 1}/{attend.heads.parts}" if attend.heads.parts > 1 else ""
    return f"attend q{queries} x kv {keys}{part} {'causal' if attend.causal else 'full'}"


def _totals(plan: Plan, widths: Mapping[Kind, int]) -> list[str]:
    pairs = [plan.pairs(rank) for rank in range(plan.n)]
    mean, moves = sum(pairs) / plan.n or 1, _moved_tokens(plan)
    lines = ["totals", f"  {'rank':>4} {'pairs':>16} {'load':>7}  tokens sent / received"]
    for rank in range(plan.n):
        text = ", ".join(
            f"{kind} {sent:.0f} / {received:.0f}"
            + (f" ({_bytes((sent + received) * widths[kind])})" if kind in widths else "")
            for kind, (sent, received) in sorted(moves[rank].items())
        )
        lines.append(f"  {rank:>4} {pairs[rank]:>16,.0f} {pairs[rank] / mean:>7.1%}  {text or 'nothing'}")
    for kind, tokens in plan.buffers:
        size = f" = {_bytes(tokens * widths[kind])}" if kind in widths else ""
        lines.append(f"  buffers for other ranks' {kind}: {tokens} tokens{size} at most")
    for kind in (Kind.Q, Kind.KV):
        kept = [sum(b.tokens / b.heads.parts for b in blocks if b.kind is kind) for blocks in plan.kept]
        if any(kept):
            size = f" = {_bytes(max(kept) * widths[kind])}" if kind in widths else ""
            what = "q, with their out" if kind is Kind.Q else "kv"
            lines.append(f"  kept of other ranks' {what}, for backward: {max(kept):.0f} tokens{size} at most")
    return lines


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
