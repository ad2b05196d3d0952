"""All-gather attention (Llama 3): every rank fetches the keys it needs straight from their homes.

Only visible keys move, and keys that the same queries see lie side by side: with room for all of them there are two
kernel calls beside the local one on the zigzag layout, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import refuse
from ..plan import Attend, Block, Move, Plan, Step
from ..visibility import Visibility
from .mode import Choices, Mode, ModeOptions


@dataclass(frozen=True)
class AllGather(Mode):
    """max_buffer_tokens: most remote key/value tokens a rank may hold at once; None for no bound."""

    max_buffer_tokens: int | None = None

    name = "all_gather"
    about = "fetch needed keys from their homes, few long kernel calls"
    layout = "zigzag"

    @classmethod
    def of(cls, options: ModeOptions, n: int) -> Mode:
        return cls(options.max_buffer_tokens)

    @classmethod
    def candidates(cls, choices: Choices) -> Iterator[Mode]:
        """In a few groups, or in more where memory is bounded."""
        n = choices.n
        yield cls(choices.options.max_buffer_tokens)
        if n > 2:
            tokens = -(-choices.length // n)
            groups = {n - 2, 4, 2, 1} if choices.bounded else {n - 2}
            yield from (cls(k * tokens) for k in sorted(groups, reverse=True))

    def num_messages(self, n: int, length: int) -> int:
        bound = self.max_buffer_tokens
        return n * n if bound is None or bound < 1 else n * (n + 2 * length // bound)

    def plan(self, seen: Visibility) -> Plan:
        """Step 0 attends the local keys while the first group arrives; step g attends group g while g+1 arrives.

        Raises:
            ValueError: a bound below 2 tokens, which leaves no room to fetch one group while attending another.
        """
        n, most = seen.queries.n, self.max_buffer_tokens
        wanted = [_remote_keys(seen, r) for r in range(n)]
        total = max((sum(key.tokens for key in keys) for keys in wanted), default=0)
        room = total if most is None or most >= total else most // 2
        if total and room < 1:
            raise refuse(
                "parallelism.max_buffer_tokens", most, "at least 2: one group arrives while another is attended",
                f"Raise it; all remote keys at once would take {total}.",
            )  # fmt: skip
        groups = [[_attend(seen, r, some) for some in _groups(keys, room)] for r, keys in enumerate(wanted)]
        steps = []
        for step in range(max(map(len, groups), default=0) + 1):
            arriving = [groups[r][step] if step < len(groups[r]) else None for r in range(n)]
            present = [groups[r][step - 1] if 0 < step <= len(groups[r]) else None for r in range(n)]
            moves = tuple(Move(key, key.home, r) for r, call in enumerate(arriving) if call for key in call.keys)
            own = (seen.attend_all(r, r) if step == 0 else (call,) if call else () for r, call in enumerate(present))
            steps.append(Step(moves, tuple(own)))
        return Plan(self.name, seen.mask, seen.queries, seen.keys, tuple(steps))


def _remote_keys(seen: Visibility, rank: int) -> list[Block]:
    """What a rank sees of other ranks' keys; keys that the same queries see lie side by side."""
    keys = [
        (seen.first_query(rank, key), key)
        for home in range(seen.keys.n)
        if home != rank
        for key in seen.needed(rank, home)
    ]
    return [key for _, key in sorted(keys)]


def _attend(seen: Visibility, rank: int, keys: list[Block]) -> Attend:
    found = seen.attend(rank, keys)
    assert found is not None, "these keys are seen"
    return found


def _groups(keys: list[Block], room: int) -> Iterator[list[Block]]:
    """Cut the keys into groups of at most `room`, splitting blocks where the bound falls."""
    if keys and sum(key.tokens for key in keys) <= room:  # the most, whose blocks stay as they are
        yield keys
        return
    group: list[Block] = []
    left = room
    for key in keys:
        while key.tokens:
            if not left:
                yield group
                group, left = [], room
            first = key._replace(stop=min(key.stop, key.start + left))
            group.append(first)
            left -= first.tokens
            key = key._replace(start=first.stop)
    if group:
        yield group
