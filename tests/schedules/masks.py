"""Random masks, and what they show by the definition in the docstring of `mask.documents`, not by slices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_longctx.layout import Layout
from megatron_longctx.schedules import Block, Kind, Mask, Plan, Slice
from megatron_longctx.schedules.mask import documents
from megatron_longctx.schedules.visibility import Visibility

Arguments = dict[str, Any]
"""Of `mask.documents`."""
Seen = NDArray[np.bool_]
"""Queries x keys."""


def dense(said: Arguments) -> Seen:
    """What `mask.documents(**said)` says that every token sees."""
    lengths = said["lengths"]
    count = len(lengths)
    document = np.repeat(np.arange(count), lengths)
    within = np.concatenate([np.arange(length) for length in lengths])
    family, first = np.eye(count, dtype=bool), np.zeros(count, dtype=int)
    for number, parent in enumerate(said.get("parents") or [-1] * count):
        if parent >= 0:
            family[number] |= family[parent]
            first[number] = first[parent] + lengths[parent]
    position = first[document] + within
    p, r = position[:, None], position[None, :]
    seen = family[document[:, None], document]
    before, after = said.get("window", (None, None))
    if before is not None:
        seen &= p - before <= r
    if after is not None:
        seen &= r <= p + after
    if said.get("causal", True):
        in_prefix = within < np.array(said.get("prefixes") or [0] * count)[document]
        seen &= (r <= p) | (in_prefix & (document[:, None] == document))
    return seen


def pairs_of(slices: Iterable[Slice], queries: int, keys: int) -> NDArray[np.int_]:
    """How many of some slices show each pair."""
    i, j = np.arange(queries)[:, None], np.arange(keys)
    found = np.zeros((queries, keys), dtype=int)
    for each in slices:
        inside = (each.q_start <= i) & (i < each.q_stop) & (each.k_start <= j) & (j < each.k_stop)
        found += inside & (each.lo <= j - i) & (j - i <= each.hi)
    return found


def shown(mask: Mask) -> Seen:
    """What a mask's slices show; no pair is in two."""
    found = pairs_of(mask.slices, mask.length, mask.length)
    assert found.max(initial=0) <= 1
    return found.astype(bool)


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
    said: Arguments = {"lengths": lengths, "window": (draw(bounds), draw(bounds)), "causal": draw(st.booleans())}
    if said["causal"] and draw(st.integers(0, 2)) == 0:
        said["prefixes"] = [draw(st.integers(0, length)) for length in lengths]
    if draw(st.integers(0, 2)) == 0:
        said["parents"] = [draw(st.integers(-1, number - 1)) for number in range(len(lengths))]
    return said


def masks(most: int = 40) -> st.SearchStrategy[Mask]:
    return arguments(most).map(lambda said: documents(**said))


def tokens_of(plan: Plan, blocks: Iterable[Any], keys: bool) -> list[int]:
    """The tokens of some blocks, one after the other."""
    layout = plan.keys if keys else plan.queries
    return [token for block in blocks for token in list(layout.tokens(block.home))[block.start : block.stop]]


Cache = tuple[Visibility, list[list[Block]]]
"""What new tokens see, and by rank its keys in the order of their positions: arguments of a mode over a cache."""


def cache_of(said: Arguments, new: Sequence[int], runs: Sequence[int], n: int, free: int = 0) -> Cache:
    """The last `new[i]` tokens of each sequence over the caches of `n` ranks, in which all tokens lie in turn: the next
    `runs[j]` of them on rank j modulo n, after `free` slots of nothing."""
    seen, ends = dense(said), np.cumsum(said["lengths"])
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
    of_queries = Layout("new", len(queries), tuple((range(a, b),) for a, b in pairwise(share)))
    of_keys = Layout("cache", n * slots, tuple((range(r * slots, (r + 1) * slots),) for r in range(n)))
    return Visibility(Mask(len(queries), tuple(slices), ()), of_queries, of_keys), blocks


@st.composite
def caches(draw: st.DrawFn) -> Cache:
    said = draw(arguments(30).filter(lambda said: said["causal"]))
    new = [draw(st.integers(1, min(length, 9))) for length in said["lengths"]]
    cuts = sorted(draw(st.lists(st.integers(0, sum(said["lengths"])), max_size=9)))
    runs = [b - a for a, b in pairwise([0, *cuts, sum(said["lengths"])])]
    return cache_of(said, new, runs, draw(st.integers(1, 5)), draw(st.integers(0, 2)))
