"""Which packs make up a step, and which replica computes each: packs of similar work, so that replicas finish together.

Best fit makes packs of nearly equal tokens, but a long document has many more visible pairs than short ones. If a step
has one such pack, all replicas wait for its replica. So long documents may wait for each other, as in WLB-LLM (Wang et
al., OSDI 2025): a number of steps are filled with their packs in the order of work, and then come in random order.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy

from .packing import Blend, Packs


class DealRule(NamedTuple):
    """What the packs of a step depend on besides the data, the seed and the batch size. Checkpoints have it.

    max_wait_steps: how many steps a pack may be moved.
    token_flops, pair_flops: the work of a token, and of a visible pair in one layer.
    """

    max_wait_steps: int
    token_flops: int
    pair_flops: int


class Dealer:
    """Deals the packs of every step out to data-parallel replicas. Steps do not depend on the number of replicas.
    A pass over a single dataset ends before the next begins. In a blend, packs of two passes may be exchanged.

    orders: the packs of every dataset in `blend`, weighed.
    batch: packs per step.
    """

    def __init__(self, orders: Sequence[Packs], blend: Blend, batch: int, seed: int, max_wait_steps: int) -> None:
        self._orders, self._blend, self._batch, self._seed = orders, blend, batch, seed
        self._steps, self._window = max_wait_steps + 1, -1

    def replicas(self, step: int, count: int) -> list[list[int]]:
        """Return the samples of each of `count` replicas in a step, in the order of its micro-batches."""
        samples, work = self.step(step)
        return [samples[share].tolist() for share in deal(work, count)]

    def step(self, number: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return the samples of a step, int64, and the work of each, float64."""
        window, at = divmod(number, self._steps)
        if window != self._window:
            self._window, (self._samples, self._work) = window, self._plan(window)
        here = slice(at * self._batch, (at + 1) * self._batch)
        return self._samples[here], self._work[here]

    def _plan(self, window: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        length = self._steps * self._batch
        samples = numpy.arange(window * length, (window + 1) * length)
        work = numpy.empty(length)
        datasets, places = self._blend.locate_all(samples)
        for number, order in enumerate(self._orders):
            work[datasets == number] = order.work(places[datasets == number])
        begins = numpy.flatnonzero(places % self._orders[0].size == 0) if len(self._orders) == 1 else ()
        passes = [part for part in numpy.split(numpy.arange(length), begins) if len(part)]
        arranged = [part[arrange(work[part], int(samples[part[0]]), self._batch, self._seed)] for part in passes]
        everything = numpy.concatenate(arranged)
        return samples[everything], work[everything]


def arrange(work: numpy.ndarray, first: int, batch: int, seed: int) -> numpy.ndarray:
    """Return an order of consecutive samples, as indices into `work`, in which those of a step have similar work.

    first: the number of the first sample. Steps begin at multiples of `batch`, and parts of a step get least work.
    """
    ascending = numpy.argsort(work, kind="stable")
    head = min(-first % batch, len(work))
    parts = head + (len(work) - head) % batch
    steps = ascending[parts:].reshape(-1, batch)
    random = numpy.random.RandomState([seed, first % 2**32])
    return numpy.concatenate([ascending[:head], steps[random.permutation(len(steps))].ravel(), ascending[head:parts]])


def deal(work: numpy.ndarray, replicas: int) -> list[list[int]]:
    """Deal packs out, equally many to each replica: the one with most work first, to the replica with least work that
    has room. Return the indices into `work` of each replica.

    The packs with least work are the first and the last, because pipeline stages wait while these pass. Packs at the
    same place of different replicas have similar work.
    """
    each, shares = len(work) // replicas, [list[int]() for _ in range(replicas)]
    least = [(0.0, replica) for replica in range(replicas)]
    for pack in numpy.argsort(-work, kind="stable").tolist():
        total, replica = heappop(least)
        shares[replica].append(pack)
        if len(shares[replica]) < each:
            heappush(least, (total + float(work[pack]), replica))
    return [[*reversed(share[::2]), *share[1::2]] for share in shares]
