"""A check of plans token by token, independent of `verify`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import lcm

import numpy as np
from numpy.typing import NDArray

from megatron_longctx.core.plans import RESULTS, Attend, Block, Heads, Kind, Plan
from tests.core.plans.masks import pairs_of

Pairs = NDArray[np.int_]
"""How often each query-key pair contributed to a result."""
Token = tuple[Kind, int, int]
"""Kind, home and slot."""


def parts_of(plan: Plan) -> int:
    """Return a number of parts of the heads of which every block has a multiple."""
    moved = (move.block for step in plan.steps for move in step.moves)
    return lcm(*(block.heads.parts for block in moved), *(a.heads.parts for _, _, a in plan.calls()))


def follow(plan: Plan, forward: Plan | None = None) -> None:
    """Check that ranks hold what they use, and that results come home with each visible pair once.

    This checks the first, the last and a middle part of the heads.

    Args:
        forward: the forward plan of a backward plan that keeps blocks.
    """
    parts = parts_of(plan)
    for part in {0, parts // 2, parts - 1}:
        _Followed(plan, Heads(part, parts), forward).check()


class _Followed:
    """A plan for one part of the heads."""

    def __init__(self, plan: Plan, heads: Heads, forward: Plan | None) -> None:
        self.plan, self.heads = plan, heads
        self.seen = pairs_of(plan.mask.slices, plan.queries.length, plan.keys.length)
        self.numbers = [[list(of.tokens(rank)) for rank in range(plan.n)] for of in (plan.queries, plan.keys)]
        kinds = (Kind.Q, Kind.Q_GRAD, Kind.GRAD), (Kind.KV,)
        self.held = [
            {(kind, rank, slot) for some, of in zip(kinds, self.numbers, strict=True)
             for kind in some for slot in range(len(of[rank]))}
            for rank in range(plan.n)
        ]  # fmt: skip
        self.results: list[list[tuple[Block, Pairs]]] = [[] for _ in range(plan.n)]
        self.home = {kind: np.zeros_like(self.seen) for kind in RESULTS}
        for rank, blocks in enumerate(plan.kept if plan.backward else ()):
            self.held[rank] |= self._kept(rank, blocks, forward)

    def _kept(self, rank: int, blocks: Iterable[Block], forward: Plan | None) -> set[Token]:
        """Return the kept tokens, which must have been received; no other call may have computed kept queries."""
        assert forward is not None
        came = [move.block for step in forward.steps for move in step.moves if move.destination == rank]
        there = {token for block in came for token in self._tokens(block)}
        kept = {token for block in blocks for token in self._tokens(block)}
        assert kept <= there
        times = Counter(token for _, _, a in forward.calls() for q in a.queries for token in self._tokens(q))
        assert all(times[token] == 1 for token in kept if token[0] is Kind.Q)
        return kept

    def check(self) -> None:
        came: list[tuple[int, Block, Pairs]] = []  # gradients that arrived a step ago at ranks that send them on
        for step in self.plan.steps:
            arriving: list[tuple[int, set[Token]]] = []
            results: list[tuple[int, Block, Pairs]] = []
            for block, source, destination in step.moves:
                assert source != destination
                if not block.heads.covers(self.heads):
                    continue
                if block.kind in RESULTS:
                    parts = [part for part in self.results[source] if block.contains(part[0])]
                    assert parts, f"{block} was not computed by {source}, or not since it was last sent"
                    self.results[source] = [part for part in self.results[source] if not block.contains(part[0])]
                    results.append((destination, block, sum(pairs for _, pairs in parts)))
                    continue
                sent = self._tokens(block)
                assert sent <= self.held[source], f"{block} is not on {source}"
                arriving.append((destination, sent))
            computed = [
                (rank, *found)
                for rank, attends in enumerate(step.attends)
                for attend in attends
                if attend.heads.covers(self.heads)
                for found in self._compute(rank, attend)
            ]
            for destination, sent in arriving:
                assert not sent & self.held[destination], "arrives twice"
                self.held[destination] |= sent
            sums = [(rank, block._replace(origin=rank), pairs) for rank, block, pairs in came]
            came = [each for each in results if each[0] != each[1].home and each[1].kind is not Kind.OUT]
            for rank, block, pairs in (*results, *computed, *sums):
                if block.home == rank:
                    self.home[block.kind] += pairs
                elif block.kind is Kind.OUT or block.origin == rank:
                    self.results[rank].append((block, pairs))
        assert not came
        for kind in (Kind.DQ, Kind.DKV) if self.plan.backward else (Kind.OUT,):
            np.testing.assert_array_equal(self.home[kind], self.seen)

    def _compute(self, rank: int, attend: Attend) -> Iterator[tuple[Block, Pairs]]:
        queries, keys = ({token for block in blocks for token in self._tokens(block)}
                         for blocks in (attend.queries, attend.keys))  # fmt: skip
        assert keys <= self.held[rank]
        for kind, home, slot in queries:
            whole = (Kind.Q_GRAD, home, slot) in self.held[rank]
            beside_kept = {(kind, home, slot), (Kind.GRAD, home, slot)} <= self.held[rank]
            assert whole or beside_kept if self.plan.backward else (kind, home, slot) in self.held[rank]
        rows, columns = (
            [of[block.home][slot] for block in blocks for slot in range(block.start, block.stop)]
            for of, blocks in zip(self.numbers, (attend.queries, attend.keys), strict=True)
        )
        pairs = np.zeros_like(self.seen)
        pairs[np.ix_(rows, columns)] = pairs_of(attend.slices, len(rows), len(columns))
        for query in attend.queries:
            kind = Kind.DQ if self.plan.backward else Kind.OUT
            yield self._part(query._replace(kind=kind), rank, pairs, 0)
        for key in attend.keys if self.plan.backward else ():
            yield self._part(key._replace(kind=Kind.DKV), rank, pairs, 1)

    def _part(self, block: Block, rank: int, pairs: Pairs, axis: int) -> tuple[Block, Pairs]:
        """Return a result with the pairs of its rows."""
        of_rows = np.zeros_like(pairs)
        some = [slice(None)] * 2
        some[axis] = self.numbers[axis][block.home][block.start : block.stop]
        of_rows[tuple(some)] = pairs[tuple(some)]
        return block if block.home == rank else block._replace(origin=rank), of_rows

    def _tokens(self, block: Block) -> set[Token]:
        if not block.heads.covers(self.heads):
            return set()
        return {(block.kind, block.home, slot) for slot in range(block.start, block.stop)}
