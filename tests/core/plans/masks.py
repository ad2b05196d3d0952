"""Random masks and caches, and the pairs that they show, computed without slices."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_longctx.core.layout import Layout
from megatron_longctx.core.plans import Block, Kind, Mask, Plan, Slice
from megatron_longctx.core.plans.mask import documents
from megatron_longctx.core.plans.visibility import Visibility
from megatron_longctx.testing.references import visible

Arguments = dict[str, Any]
"""Arguments of `mask.documents`."""


def pairs_of(slices: Iterable[Slice], queries: int, keys: int) -> NDArray[np.int_]:
    """Return how many of some slices show each pair."""
    i, j = np.arange(queries)[:, None], np.arange(keys)
    count = np.zeros((queries, keys), dtype=int)
    for each in slices:
        inside = (each.q_start <= i) & (i < each.q_stop) & (each.k_start <= j) & (j < each.k_stop)
        count += inside & (each.lo <= j - i) & (j - i <= each.hi)
    return count


@st.composite
def lengths_of(draw: st.DrawFn, most: int) -> list[int]:
    """A pack of up to `most` tokens: one document, few, or one of every token."""
    length = draw(st.integers(1, most))
    few = st.lists(st.integers(0, length), max_size=5)
    cuts = draw(st.one_of(st.just([]), few, st.just(range(min(length, 60)))))
    return [b - a for a, b in pairwise(sorted({0, *cuts, length}))]


bounds = st.sampled_from([None, None, 0, 1, 2, 3, 7, 1000])


@st.composite
def arguments(draw: st.DrawFn, most: int = 64) -> Arguments:
    """Packs with windows, prefixes and trees, and mixes of these."""
    lengths = draw(lengths_of(most))
    drawn: Arguments = {"lengths": lengths, "window": (draw(bounds), draw(bounds)), "causal": draw(st.booleans())}
    if drawn["causal"] and draw(st.integers(0, 2)) == 0:
        drawn["prefixes"] = [draw(st.integers(0, length)) for length in lengths]
    if draw(st.integers(0, 2)) == 0:
        drawn["parents"] = [draw(st.integers(-1, number - 1)) for number in range(len(lengths))]
    return drawn


def masks(most: int = 40) -> st.SearchStrategy[Mask]:
    return arguments(most).map(lambda drawn: documents(**drawn))


def tokens_of(plan: Plan, blocks: Iterable[Any], keys: bool) -> list[int]:
    """Return the tokens of some blocks, one block after the other."""
    layout = plan.keys if keys else plan.queries
    return [token for block in blocks for token in list(layout.tokens(block.home))[block.start : block.stop]]


def parts_of(plan: Plan) -> int:
    """Return a number of parts of the heads of which every block has a multiple."""
    moved = (move.block for step in plan.steps for move in step.moves)
    return lcm(*(block.heads.parts for block in moved), *(a.heads.parts for _, _, a in plan.calls()))


Cache = tuple[Visibility, list[list[Block]]]
"""The arguments of a cache mode: a visibility, and the keys of each rank in the order of their positions."""


def cache_of(mask: Arguments, new: Sequence[int], runs: Sequence[int], n: int, free: int = 0) -> Cache:
    """Return the last `new[i]` tokens of each sequence over the caches of `n` ranks.

    All tokens are stored in turn: the next `runs[j]` of them on rank j modulo n, after `free` empty slots.
    """
    seen, ends = visible(**mask).numpy(), np.cumsum(mask["lengths"])
    queries = [i for end, count in zip(ends, new, strict=True) for i in range(end - count, end)]
    slots = len(seen) + free * len(runs)
    held = np.zeros((len(queries), n * slots), dtype=bool)
    blocks: list[list[Block]] = [[] for _ in range(n)]
    for number, (stop, count) in enumerate(zip(accumulate(runs), runs, strict=True)):
        home = number % n
        start = free + (blocks[home][-1].stop if blocks[home] else 0)
        if count:
            blocks[home].append(Block(Kind.KV, home, start, start + count))
        held[:, home * slots + start : home * slots + start + count] = seen[queries, stop - count : stop]
    slices = [Slice(i, i + 1, j, j + 1) for i, j in zip(*(each.tolist() for each in np.nonzero(held)), strict=True)]
    share = [len(queries) * rank // n for rank in range(n + 1)]
    q_layout = Layout("new", len(queries), tuple((range(a, b),) for a, b in pairwise(share)))
    k_layout = Layout("cache", n * slots, tuple((range(r * slots, (r + 1) * slots),) for r in range(n)))
    return Visibility(Mask(len(queries), tuple(slices), ()), q_layout, k_layout), blocks
