"""Which tokens make up a sample, and which samples a step: documents, joined, packed or blended, in an order by seed.

The order is the same for every number of ranks and workers, and any sample is found without those before it.

Best fit makes packs of nearly equal tokens, but a long document has many more visible pairs than short ones. If a step
has one such pack, all replicas wait for its replica. So long documents may wait for each other, as in WLB-LLM (Wang et
al., OSDI 2025): a number of steps are filled with their packs in the order of work, and then come in random order.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index

from ..core.plans.mask import Window, documents
from ..models.trees import Part, parts

_PERIOD = 2**16  # samples after which a blend repeats, so that any sample's place is known


class Spans(NamedTuple):
    """The spans of documents that a sample is read from, in its order. int64 `[spans]` each.

    parents: for each span, the number of the one that it continues, or -1; None: none does.
    repeated: for each span, whether another sample learns its tokens.
    """

    documents: numpy.ndarray
    offsets: numpy.ndarray
    lengths: numpy.ndarray
    parents: tuple[int, ...] | None = None
    repeated: tuple[bool, ...] = ()


class SampleOrder(ABC):
    """An endless order of a dataset's samples: pass after pass over its documents, each shuffled differently.

    size: the number of samples in a pass.
    """

    size: int

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._passes: dict[int, tuple[numpy.ndarray, ...]] = {}
        self._pass: tuple[numpy.ndarray, ...] = ()

    def spans(self, sample: int) -> Spans:
        """Return where a sample's tokens are. If the token after its last one belongs to it too, they include that one,
        and their lengths sum to one more than the sequence's."""
        number, index = divmod(sample, self.size)
        self._pass = self._begun(number)
        return self._spans(index)

    def _begun(self, number: int) -> tuple[numpy.ndarray, ...]:
        """Return the arrays of a pass. Two passes are kept, because a step may alternate between their samples."""
        if number not in self._passes:
            self._passes = dict([*self._passes.items()][-1:])
            random = numpy.random.RandomState((self._seed + number) % 2**32)
            self._passes[number] = self._begin_pass(random)
        return self._passes[number]

    @abstractmethod
    def _begin_pass(self, random: numpy.random.RandomState) -> tuple[numpy.ndarray, ...]:
        """Return the arrays that `_spans` uses during a pass, as `self._pass`."""

    @abstractmethod
    def _spans(self, index: int) -> Spans:
        """Return the spans of a sample of the current pass."""


class Stream(SampleOrder):
    """The order of Megatron's `GPTDataset`: documents in random order form one stream, cut every `seq_length` tokens.

    Its indices are kept in memory and not in files, so that no rank waits for another when a pass begins.

    lengths: the tokens of every document, int32.
    """

    def __init__(self, lengths: numpy.ndarray, seq_length: int, seed: int) -> None:
        super().__init__(seed)
        self._lengths, self._seq_length = lengths, seq_length
        self._tokens = int(lengths.sum(dtype=numpy.int64))
        self.size = max(0, self._tokens - 1) // seq_length

    def _spans(self, index: int) -> Spans:
        documents, cuts, shuffled = self._pass
        at = int(shuffled[index])
        (first, begin), (last, end) = cuts[at].tolist(), cuts[at + 1].tolist()
        numbers = documents[first : last + 1].astype(numpy.int64)
        offsets, ends = numpy.zeros_like(numbers), self._lengths[numbers].astype(numpy.int64)
        offsets[0], ends[-1] = begin, end + 1
        some = ends > offsets
        return Spans(numbers[some], offsets[some], (ends - offsets)[some])

    def _begin_pass(self, random: numpy.random.RandomState) -> tuple[numpy.ndarray, ...]:
        documents = _build_document_index(numpy.arange(len(self._lengths), dtype=numpy.int32), 1, random, False)
        cuts = helpers.build_sample_idx(self._lengths, documents, self._seq_length, 1, self._tokens, True, True)
        return documents, cuts, _build_shuffle_index(self.size, self.size, random)


class Packs(SampleOrder):
    """Whole documents packed by `best_fit`. A longer document is cut into pieces of `seq_length` tokens and a rest.

    The lengths in a pack are the same in every pass. The documents with these lengths, and the order of packs, change.

    lengths: the tokens of every document, int32.
    """

    def __init__(self, lengths: numpy.ndarray, seq_length: int, seed: int) -> None:
        super().__init__(seed)
        self._whole = lengths
        counts = -(-lengths // seq_length)
        self._documents = numpy.repeat(numpy.arange(len(lengths), dtype=numpy.int32), counts)
        before = numpy.repeat(numpy.cumsum(counts) - counts, counts)
        self._offsets = (numpy.arange(len(before)) - before) * seq_length
        pieces = numpy.minimum(lengths[self._documents] - self._offsets, seq_length).astype(numpy.int32)
        self._pack(pieces, seq_length, int((counts > 1).sum()))

    def _pack(self, lengths: numpy.ndarray, seq_length: int, num_cut: int) -> None:
        """Pack pieces of these lengths. num_cut: the number of documents that are several pieces."""
        self._lengths, self.num_cut, self._work = lengths, num_cut, numpy.empty(0)
        self._longest_first = -numpy.sort(-self._lengths)
        self._packs = best_fit(self._longest_first, seq_length).astype(numpy.int32)
        self.tokens = numpy.bincount(self._packs, self._longest_first).astype(numpy.int64)
        self.size = len(self.tokens)
        self._places = numpy.argsort(self._packs, kind="stable").astype(numpy.int32)
        self._ends = numpy.cumsum(numpy.bincount(self._packs))

    def _spans(self, index: int) -> Spans:
        pieces, order, _ = self._pass
        return self._spans_of(pieces[self._places_of(int(order[index]))])

    def _spans_of(self, taken: numpy.ndarray) -> Spans:
        """Return the spans of some pieces."""
        documents, offsets, lengths = self._documents[taken], self._offsets[taken], self._lengths[taken]
        continues = offsets + lengths < self._whole[documents]  # the document has a next piece; this one fills its pack
        return Spans(documents.astype(numpy.int64), offsets, lengths + continues.astype(numpy.int64))

    def lengths(self, pack: int) -> list[int]:
        """Return the lengths of pieces in a pack, the longest first. Packs are numbered as in `tokens`."""
        lengths: list[int] = self._longest_first[self._places_of(pack)].tolist()
        return lengths

    def longest(self) -> numpy.ndarray:
        """Return the tokens of the longest document of every pack."""
        return self._longest_first[self._places[self._ends - numpy.diff(self._ends, prepend=0)]]

    def weigh(self, per_token: int, per_pair: int, windows: Mapping[Window, int]) -> None:
        """Set the work of every piece: its tokens' and its visible pairs' in all layers, whose windows are counted."""
        self._work = numpy.array(self._pairs(windows), numpy.float64) * per_pair + self._lengths * float(per_token)
        self._passes = {}

    def work(self, samples: numpy.ndarray) -> numpy.ndarray:
        """Return the work of samples, float64; `weigh` comes first."""
        numbers, indices = numpy.divmod(samples, self.size)
        work = numpy.empty(len(samples))
        for number in numpy.unique(numbers).tolist():
            here = numbers == number
            work[here] = self._begun(number)[2][indices[here]]
        return work

    def _pairs(self, windows: Mapping[Window, int]) -> Sequence[int]:
        by_length = {length: visible_pairs([length], None, windows) for length in numpy.unique(self._lengths).tolist()}
        return [by_length[length] for length in self._lengths.tolist()]

    def _places_of(self, pack: int) -> numpy.ndarray:
        return self._places[self._ends[pack - 1] if pack else 0 : self._ends[pack]]

    def _begin_pass(self, random: numpy.random.RandomState) -> tuple[numpy.ndarray, ...]:
        """Return the piece at each place, where places are ordered by length, the order of packs, and their work."""
        shuffled = _build_shuffle_index(len(self._lengths), len(self._lengths), random)
        pieces = shuffled[numpy.argsort(-self._lengths[shuffled], kind="stable")]
        order = _build_shuffle_index(self.size, self.size, random)
        return pieces, order, numpy.bincount(self._packs, self._work[pieces])[order] if len(self._work) else order


class BranchTooLong(ValueError):
    """A branch that no pack holds, of the tree with the number `document`."""

    def __init__(self, message: str, document: int) -> None:
        super().__init__(message)
        self.document = document


class TreePacks(Packs):
    """Whole trees packed by `best_fit`. A larger tree is cut between branches, and its parts repeat what they share.

    trees: the lengths and parents of the nodes of every document.

    Raises:
        ValueError: a branch that is longer than a sequence; the error's `document` is its number.
    """

    def __init__(self, trees: Sequence[tuple[Sequence[int], Sequence[int]]], seq_length: int, seed: int) -> None:
        SampleOrder.__init__(self, seed)
        self._trees = trees
        self._parts: list[tuple[int, Part]] = []
        num_cut, whole = 0, 0
        for number, (lengths, parents) in enumerate(trees):
            try:
                found = parts(lengths, parents, seq_length)
            except ValueError as error:
                raise BranchTooLong(str(error), number) from None
            self._parts += [(number, part) for part in found]
            num_cut, whole = num_cut + (len(found) > 1), whole + sum(lengths)
        sizes = [sum(trees[number][0][node] for node in part.nodes) for number, part in self._parts]
        self.num_repeated = sum(sizes) - whole
        self._pack(numpy.array(sizes, dtype=numpy.int32), seq_length, num_cut)

    def _pairs(self, windows: Mapping[Window, int]) -> Sequence[int]:
        lengths = ([self._trees[number][0][node] for node in part.nodes] for number, part in self._parts)
        return [visible_pairs(of, part.parents, windows) for of, (_, part) in zip(lengths, self._parts, strict=True)]

    def _spans_of(self, taken: numpy.ndarray) -> Spans:
        rows: list[tuple[int, int, int]] = []
        parents: list[int] = []
        repeated: list[bool] = []
        for piece in taken.tolist():
            number, part = self._parts[piece]
            lengths = self._trees[number][0]
            starts = [0, *accumulate(lengths)]
            parents += [parent if parent < 0 else parent + len(rows) for parent in part.parents]
            rows += [(number, starts[node], lengths[node]) for node in part.nodes]
            repeated += part.repeated
        documents, offsets, sizes = numpy.array(rows, dtype=numpy.int64).T
        return Spans(documents, offsets, sizes, tuple(parents), tuple(repeated))


def visible_pairs(lengths: Sequence[int], parents: Sequence[int] | None, windows: Mapping[Window, int]) -> int:
    """Return the visible pairs of a document, or of a tree's nodes, summed over layers."""
    return sum(n * documents(lengths, parents=parents, window=each).pairs for each, n in windows.items())


def best_fit(lengths: numpy.ndarray, capacity: int) -> numpy.ndarray:
    """Return the pack of every document, int64: the one that it fills best, or a new one if it fits into none.

    Packs with equal room are filled together by documents of equal length: ten million documents take seconds.

    lengths: in descending order, each from 1 to `capacity`.
    """
    packs, num_packs = numpy.empty(len(lengths), dtype=numpy.int64), 0
    rooms: list[int] = []  # in ascending order
    by_room: dict[int, list[numpy.ndarray]] = {}
    begins = numpy.flatnonzero(numpy.diff(lengths, prepend=capacity + 1)).tolist()
    for at, end in pairwise([*begins, len(lengths)]):
        length = int(lengths[at])
        while at < end:
            if (place := bisect_left(rooms, length)) < len(rooms):
                room = rooms.pop(place)
                same_room = by_room.pop(room)
                open_packs = numpy.concatenate(same_room) if len(same_room) > 1 else same_room[0]
            else:
                room, needed = capacity, -(-(end - at) // (capacity // length))
                open_packs = numpy.arange(num_packs, num_packs + needed)
                num_packs += needed
            each = room // length  # fill one pack after another: once begun, a pack has the least room
            placed = min(end - at, each * len(open_packs))
            full, more = divmod(placed, each)
            packs[at : at + placed] = numpy.repeat(open_packs[: full + 1], each)[:placed]
            at += placed
            used = full + bool(more)
            for left, those in (
                (room - each * length, open_packs[:full]),
                (room - more * length, open_packs[full:used]),
                (room, open_packs[used:]),
            ):
                if left and len(those):
                    if left not in by_room:
                        insort(rooms, left)
                    by_room.setdefault(left, []).append(those)
    return packs


class Blend:
    """A blend of datasets by Megatron's rule: the next sample is from the dataset furthest behind its weight."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._datasets = numpy.zeros(_PERIOD, dtype=numpy.int16)
        self._samples = numpy.zeros(_PERIOD, dtype=numpy.int64)
        fractions = numpy.asarray(weights, dtype=numpy.float64) / sum(weights)
        helpers.build_blending_indices(self._datasets, self._samples, fractions, len(weights), _PERIOD, False)
        self._counts = numpy.bincount(self._datasets, minlength=len(weights))

    def locate(self, sample: int) -> tuple[int, int]:
        """Return a sample's dataset, and its place in that dataset's own order."""
        (dataset,), (place,) = self.locate_all(numpy.array([sample]))
        return int(dataset), int(place)

    def locate_all(self, samples: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return the same as `locate` for many samples."""
        periods, at = numpy.divmod(samples, _PERIOD)
        datasets = self._datasets[at]
        return datasets, periods * self._counts[datasets] + self._samples[at]


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
