"""All-gather attention (Llama 3): every rank fetches the keys it needs straight from their homes.

Only visible keys move, and sources that the same queries see are one kernel call: with room for all of them there are
two calls beside the local one on the zigzag layout, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..layout import Layout
from .calls import attends_on
from .plan import Attend, Block, Move, Plan, Step


def all_gather(layout: Layout, causal: bool, max_buffer_tokens: int | None = None) -> Plan:
    """Step 0 attends the local keys while the first group arrives; step g attends group g while g+1 arrives.

    Args:
        max_buffer_tokens: most remote key/value tokens a rank may hold at once; None for no bound.

    Raises:
        ValueError: a bound below 2 tokens, which leaves no room to fetch one group while attending another.
    """
    n = layout.n
    wanted = [_remote_attends(layout, r, causal) for r in range(n)]
    total = max((sum(a.num_keys for a in attends) for attends in wanted), default=0)
    room = total if max_buffer_tokens is None or max_buffer_tokens >= total else max_buffer_tokens // 2
    if total and room < 1:
        raise ValueError(
            f"max_buffer_tokens={max_buffer_tokens}: expected at least 2 (one group arrives while "
            "another is attended). "
            f"All remote keys at once would take {total}."
        )
    groups = [list(_groups(attends, room)) for attends in wanted]
    num_groups = max(map(len, groups), default=0)
    steps = []
    for step in range(num_groups + 1):
        arriving = [groups[r][step] if step < len(groups[r]) else () for r in range(n)]
        present = [groups[r][step - 1] if 0 < step <= len(groups[r]) else () for r in range(n)]
        moves = tuple(Move(key, key.home, r) for r in range(n) for attend in arriving[r] for key in attend.keys)
        attends = [attends_on(layout, r, r, causal) for r in range(n)] if step == 0 else present
        steps.append(Step(moves, tuple(map(tuple, attends))))
    return Plan("all_gather", layout, causal, tuple(steps))


def _remote_attends(layout: Layout, rank: int, causal: bool) -> list[Attend]:
    """One call per set of queries, over all remote keys that exactly those queries see."""
    keys: dict[tuple[Block, ...], list[Block]] = {}
    diagonal: list[Attend] = []
    for other in range(layout.n):
        for attend in attends_on(layout, rank, other, causal) if other != rank else ():
            if attend.causal:  # stripes: every source has a diagonal of its own
                diagonal.append(attend)
            else:
                keys.setdefault(attend.queries, []).extend(attend.keys)
    return [Attend(queries, tuple(blocks), False) for queries, blocks in keys.items()] + diagonal


def _groups(attends: list[Attend], room: int) -> Iterator[tuple[Attend, ...]]:
    """Cut the calls into groups of at most `room` keys, splitting sources where the bound falls."""
    group: list[Attend] = []
    left = room
    for attend in attends:
        if attend.causal and attend.num_keys > room:
            raise ValueError(
                f"max_buffer_tokens leaves {room} tokens a group: expected {attend.num_keys} at least, since a causal "
                f"block cannot be split. Raise max_buffer_tokens to {2 * attend.num_keys}."
            )
        pieces: list[Block] = []
        for key in attend.keys:
            start = key.start
            while start < key.stop:
                if left == 0 or (attend.causal and left < key.tokens):
                    yield (*group, attend._replace(keys=tuple(pieces))) if pieces else tuple(group)
                    group, pieces, left = [], [], room
                stop = min(key.stop, start + left)
                pieces.append(key._replace(start=start, stop=stop))
                left -= stop - start
                start = stop
        if pieces:
            group.append(attend._replace(keys=tuple(pieces)))
    if group:
        yield tuple(group)
