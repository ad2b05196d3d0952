"""All-gather attention (Llama 3): every rank fetches the keys it needs directly from their homes.

Only visible keys move, and keys that the same queries see are stored side by side. With a buffer for all of them there
are two kernel calls besides the local one on the zigzag layout, for any number of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from ...errors import refuse
from ..plan import Block, Plan, Step, fetch_moves
from ..visibility import Visibility
from .mode import Mode, ModeOptions, SearchContext


@dataclass(frozen=True)
class AllGather(Mode):
    """max_buffer_tokens: the most remote key/value tokens that a rank may hold at a time; None for no bound."""

    max_buffer_tokens: int | None = None

    name = "all_gather"
    layout = "zigzag"

    @classmethod
    def from_options(cls, options: ModeOptions, n: int) -> Mode:
        return cls(options.max_buffer_tokens)

    @classmethod
    def candidates(cls, context: SearchContext) -> Iterator[Mode]:
        """Yield few groups, and also more groups if memory is bounded."""
        n = context.n
        yield cls(context.options.max_buffer_tokens)
        if n > 2:
            tokens = -(-context.length // n)
            groups = {n - 2, 4, 2, 1} if context.bounded_memory else {n - 2}
            yield from (cls(k * tokens) for k in sorted(groups, reverse=True))

    def num_messages(self, n: int, length: int) -> int:
        bound = self.max_buffer_tokens
        return n * n if bound is None or bound < 1 else n * (n + 2 * length // bound)

    def plan(self, visible: Visibility) -> Plan:
        """Attend to the local keys in step 0 and to group g in step g, while the next group arrives.

        Raises ValueError: a bound below 2 tokens, which leaves no room to fetch one group while attending to another.
        """
        n, most = visible.queries.n, self.max_buffer_tokens
        others = [[key for home in range(n) if home != r for key in visible.needed(r, home)] for r in range(n)]
        remote = [visible.in_query_order(r, keys) for r, keys in enumerate(others)]
        total = max((sum(key.tokens for key in keys) for keys in remote), default=0)
        room = total if most is None or most >= total else most // 2
        if total and room < 1:
            raise refuse(
                "max_buffer_tokens", most, "at least 2: one group arrives while another is attended",
                f"Raise it; all remote keys at once would take {total}.",
            )  # fmt: skip
        groups = [(visible.all_keys[r], *_groups(remote[r], room)) for r in range(n)]
        calls = zip_longest(*([visible.attend(r, keys) for keys in groups[r]] for r in range(n)), fillvalue=())
        steps = [Step(tuple(fetch_moves(following)), attends) for attends, following in pairwise([*calls, ()])]
        return Plan(self.name, visible.mask, visible.queries, visible.keys, tuple(steps))


def _groups(keys: list[Block], room: int) -> Iterator[list[Block]]:
    """Cut the keys into groups of at most `room` tokens, splitting blocks at the bound."""
    if keys and sum(key.tokens for key in keys) <= room:  # the usual case, whose blocks stay unchanged
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
