"""DeepSpeed-Ulysses: ranks exchange tokens for heads, attend to whole sequences, and exchange back.

One all-to-all gives every rank an n-th of the heads for all tokens, so that it computes attention as one rank alone
would; a second one returns the outputs. If there are fewer KV heads than ranks, several ranks hold the same one.
"""

from dataclasses import dataclass

from ..plan import Attend, Block, Heads, Kind, Move, Plan, Step
from ..visibility import Visibility
from .mode import Mode, check_shared_heads


@dataclass(frozen=True)
class Ulysses(Mode):
    name = "ulysses"
    layout = "contiguous"
    takes_any_layout = False
    splits_heads = True

    def num_messages(self, n: int, length: int) -> int:
        return 3 * n * n

    def plan(self, visible: Visibility) -> Plan:
        layout, n = visible.queries, visible.queries.n
        if n == 1 or not visible.mask.slices:
            own = tuple(visible.attend(rank, visible.all_keys[rank]) for rank in range(n))
            return Plan(self.name, visible.mask, layout, visible.keys, (Step((), own),))
        spans = [(rank, 0, layout.num_tokens(rank)) for rank in range(n) if layout.num_tokens(rank)]
        sent: list[Move] = []
        attends: list[tuple[Attend, ...]] = []
        returned: list[Move] = []
        for rank in range(n):
            part = Heads(rank, n)
            queries = tuple(Block(Kind.Q, *span, heads=part) for span in spans)
            keys = tuple(Block(Kind.KV, *span, heads=part) for span in spans)
            sent += [Move(block, block.home, rank) for block in (*queries, *keys) if block.home != rank]
            # The concatenated tokens of all ranks are the sequence, so the slices are the mask's.
            attends.append((Attend(queries, keys, visible.mask.slices),))
            returned += [
                Move(query.result(Kind.OUT, rank), rank, query.home) for query in queries if query.home != rank
            ]
        steps = Step(tuple(sent), ((),) * n), Step((), tuple(attends)), Step(tuple(returned), ((),) * n)
        return Plan(self.name, visible.mask, layout, visible.keys, steps)

    def check_heads(self, n: int, num_heads: int, num_kv_heads: int) -> None:
        check_shared_heads(n, num_heads, num_kv_heads, "schedule ulysses", range(1, num_heads + 1))
