"""How much memory a rank lays out for its peers to read: what is no longer read makes room for what comes later."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from .cost import Workload
from .plan import RESULTS, Block, Heads, Kind, Plan
from .verify import results_away

_READ_FOR = 2
"""Steps after which a message's memory may be used again: by then its readers are long done, and waiting for their
word costs nothing."""


class Batch(NamedTuple):
    """What is sent together: `num_bytes` that peers read in `step`.

    written: the first step in which it is written. passed: by the messages of that step, which pass on what came from
    other ranks; else by the step's kernel calls, which wait for the messages of the step before.
    """

    step: int
    written: int
    num_bytes: int
    passed: bool

    @property
    def freed(self) -> int:
        """Only what was read up to `_READ_FOR` steps before this step may lie where this batch is to be."""
        return self.written if self.passed else self.written - 1


@dataclass(frozen=True)
class Placement:
    """offsets: by batch. num_bytes: of all. awaited: by a step whose memory is used again, the step in which its
    readers' word has to be awaited."""

    offsets: tuple[int, ...]
    num_bytes: int
    awaited: dict[int, int]


def place(batches: Sequence[Batch]) -> Placement:
    """Each batch at the lowest offset that is free for as long as it is needed."""
    order = sorted(range(len(batches)), key=lambda i: (batches[i].written, batches[i].step))
    offsets = [0] * len(batches)
    placed: list[int] = []
    awaited: dict[int, int] = {}
    for i in order:
        batch = batches[i]
        # What is known to be awaited before anything from here on is freed changes no more: plans of many ranks reuse
        # memory in most steps, so that few batches are left to look at.
        placed = [j for j in placed if awaited.get(batches[j].step, batch.written) >= batch.written]
        over = [j for j in placed if batches[j].step + _READ_FOR <= batch.freed]
        offset = 0
        for j in sorted(set(placed) - set(over), key=lambda j: offsets[j]):
            if offset + batch.num_bytes > offsets[j]:
                offset = max(offset, offsets[j] + batches[j].num_bytes)
        offsets[i] = offset
        for j in over:
            if offset < offsets[j] + batches[j].num_bytes and offsets[j] < offset + batch.num_bytes:
                awaited[batches[j].step] = min(batch.freed, awaited.get(batches[j].step, batch.freed))
        placed.append(i)
    total = max((offset + batch.num_bytes for offset, batch in zip(offsets, batches, strict=True)), default=0)
    return Placement(tuple(offsets), total, awaited)


def published_bytes(plan: Plan, workload: Workload) -> int:
    """Most that a rank lays out for its peers to read in one pass over peer memory: its own tensors that it sends, the
    results it computes for others, and what it passes on."""
    own: list[set[tuple[Kind, Heads]]] = [set() for _ in range(plan.n)]
    sent: list[dict[tuple[int, bool], list[Block]]] = [{} for _ in range(plan.n)]  # by (step, passed on)
    for t, step in enumerate(plan.steps):
        for block, source, _, _ in step.moves:
            if block.kind in RESULTS:
                sent[source].setdefault((t, block.origin != source), []).append(block)
            elif block.home == source:
                own[source].add((block.kind, block.heads))
            else:
                sent[source].setdefault((t, True), []).append(block)
    most = 0
    sizes: dict[tuple[Batch, ...], int] = {}  # ranks are alike
    for rank in range(plan.n):
        home = plan.layout.num_tokens(rank) * sum(workload.token_bytes(kind, heads) for kind, heads in own[rank])
        made = _made(plan, rank) if any(not passed for _, passed in sent[rank]) else {}
        batches = tuple(
            Batch(
                t,
                t if passed else min(_last_before(t, block, made) for block in blocks),
                sum(map(workload.block_bytes, blocks)),
                passed,
            )
            for (t, passed), blocks in sent[rank].items()
        )
        if batches not in sizes:
            sizes[batches] = place(batches).num_bytes
        most = max(most, home + sizes[batches])
    return most


_Made = dict[tuple[Kind, int], list[tuple[int, Block]]]


def _made(plan: Plan, rank: int) -> _Made:
    """By kind and home, what a rank computes for others, with the step."""
    found: _Made = {}
    for t, step in enumerate(plan.steps):
        for attend in step.attends[rank]:
            for block in results_away(attend, rank, plan.backward):
                found.setdefault((block.kind, block.home), []).append((t, block))
    return found


def _last_before(t: int, whole: Block, made: _Made) -> int:
    """The step in which the last part of a result sent in step `t` is computed."""
    found = made[whole.kind, whole.home]  # in the order of steps
    before = bisect_left(found, t, key=itemgetter(0))
    return next(found[i][0] for i in range(before - 1, -1, -1) if whole.contains(found[i][1]))
