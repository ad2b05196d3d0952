"""Which tokens make a sample: documents in an order of the seed alone, joined and cut, packed, or blended.

An order is the same for every number of ranks and workers, and any sample of it is found without those before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index

_PERIOD = 2**16  # samples after which a blend repeats: so its order is known at any sample


class Pieces(NamedTuple):
    """What a sample is read from, in its order: `length` tokens of each document from `offset` on. int64 `[pieces]`."""

    documents: numpy.ndarray
    offsets: numpy.ndarray
    lengths: numpy.ndarray


class Order(ABC):
    """The samples of a dataset without end: pass after pass over its documents, each with a shuffle of its own.

    size: samples of a pass.
    """

    size: int

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._number = -1
        self._pass: tuple[numpy.ndarray, ...] = ()

    def pieces(self, sample: int) -> Pieces:
        """Where its tokens are, and the token after its last where that is of the sample, too; then they sum to one
        more than the sequence has."""
        number, index = divmod(sample, self.size)
        if number != self._number:
            random = numpy.random.RandomState((self._seed + number) % 2**32)
            self._number, self._pass = number, self._begin(random)
        return self._pieces(index)

    @abstractmethod
    def _begin(self, random: numpy.random.RandomState) -> tuple[numpy.ndarray, ...]:
        """What `_pieces` goes by in a pass."""

    @abstractmethod
    def _pieces(self, index: int) -> Pieces:
        """Of a sample of the pass under way."""


class Stream(Order):
    """Megatron's `GPTDataset`: the documents in random order are one stream, cut every `seq_length` tokens.

    Its indices are kept in memory instead of in files, so that no rank waits for another when a pass begins.

    Args:
        lengths: tokens of every document, int32.
    """

    def __init__(self, lengths: numpy.ndarray, seq_length: int, seed: int) -> None:
        super().__init__(seed)
        self._lengths, self._seq_length = lengths, seq_length
        self._tokens = int(lengths.sum(dtype=numpy.int64))
        self.size = (self._tokens - 1) // seq_length

    def _pieces(self, index: int) -> Pieces:
        documents, cuts, shuffled = self._pass
        at = int(shuffled[index])
        (first, begin), (last, end) = cuts[at].tolist(), cuts[at + 1].tolist()
        found = documents[first : last + 1].astype(numpy.int64)
        offsets, ends = numpy.zeros_like(found), self._lengths[found].astype(numpy.int64)
        offsets[0], ends[-1] = begin, end + 1
        some = ends > offsets
        return Pieces(found[some], offsets[some], (ends - offsets)[some])

    def _begin(self, random: numpy.random.RandomState) -> tuple[numpy.ndarray, ...]:
        documents = _build_document_index(numpy.arange(len(self._lengths), dtype=numpy.int32), 1, random, False)
        cuts = helpers.build_sample_idx(self._lengths, documents, self._seq_length, 1, self._tokens, True, True)
        return documents, cuts, _build_shuffle_index(self.size, self.size, random)


class Packs(Order):
    """Whole documents, packed by `best_fit`; one longer than `seq_length` is cut into pieces of that and a rest.

    The lengths in a pack are the same in every pass; which documents of these lengths, and which pack when, is not.

    Args:
        lengths: tokens of every document, int32.
    """

    def __init__(self, lengths: numpy.ndarray, seq_length: int, seed: int) -> None:
        super().__init__(seed)
        self._whole = lengths
        counts = -(-lengths // seq_length)
        self.num_cut = int((counts > 1).sum())
        self._documents = numpy.repeat(numpy.arange(len(lengths), dtype=numpy.int32), counts)
        before = numpy.repeat(numpy.cumsum(counts) - counts, counts)
        self._offsets = (numpy.arange(len(before)) - before) * seq_length
        self._lengths = numpy.minimum(lengths[self._documents] - self._offsets, seq_length).astype(numpy.int32)
        self._longest_first = -numpy.sort(-self._lengths)
        packs = best_fit(self._longest_first, seq_length)
        self.tokens = numpy.bincount(packs, self._longest_first).astype(numpy.int64)
        self.size = len(self.tokens)
        self._places = numpy.argsort(packs, kind="stable").astype(numpy.int32)
        self._ends = numpy.cumsum(numpy.bincount(packs))

    def _pieces(self, index: int) -> Pieces:
        found, order = self._pass
        taken = found[self._places_of(int(order[index]))]
        documents, offsets, lengths = self._documents[taken], self._offsets[taken], self._lengths[taken]
        goes_on = offsets + lengths < self._whole[documents]  # in its next piece: this one is a pack of its own
        return Pieces(documents.astype(numpy.int64), offsets, lengths + goes_on.astype(numpy.int64))

    def documents(self, pack: int) -> list[int]:
        """The lengths of documents in a pack, the longest first. Packs are counted as `tokens` counts them."""
        lengths: list[int] = self._longest_first[self._places_of(pack)].tolist()
        return lengths

    def longest(self) -> numpy.ndarray:
        """Tokens of the longest document of every pack."""
        return self._longest_first[self._places[self._ends - numpy.diff(self._ends, prepend=0)]]

    def _places_of(self, pack: int) -> numpy.ndarray:
        return self._places[self._ends[pack - 1] if pack else 0 : self._ends[pack]]

    def _begin(self, random: numpy.random.RandomState) -> tuple[numpy.ndarray, ...]:
        """What takes each place, the places being in the order of their lengths; and the order of packs."""
        shuffled = _build_shuffle_index(len(self._lengths), len(self._lengths), random)
        found = shuffled[numpy.argsort(-self._lengths[shuffled], kind="stable")]
        return found, _build_shuffle_index(self.size, self.size, random)


def best_fit(lengths: numpy.ndarray, capacity: int) -> numpy.ndarray:
    """The pack of every document: each goes where it leaves least room, into a new one where it fits nowhere.

    Packs of equal room are taken together, and so are documents of equal length: ten million documents take seconds.

    Args:
        lengths: in descending order, each from 1 to `capacity`.

    Returns:
        int64 of the same length, from 0 on.
    """
    packs, num_packs = numpy.empty(len(lengths), dtype=numpy.int64), 0
    rooms: list[int] = []  # in ascending order
    by_room: dict[int, list[numpy.ndarray]] = {}
    begins = numpy.flatnonzero(numpy.diff(lengths, prepend=capacity + 1)).tolist()
    for at, end in zip(begins, [*begins[1:], len(lengths)], strict=True):
        length = int(lengths[at])
        while at < end:
            if (place := bisect_left(rooms, length)) < len(rooms):
                room = rooms.pop(place)
                found = by_room.pop(room)
                open_packs = numpy.concatenate(found) if len(found) > 1 else found[0]
            else:
                room, needed = capacity, -(-(end - at) // (capacity // length))
                open_packs = numpy.arange(num_packs, num_packs + needed)
                num_packs += needed
            each = room // length  # one after the other: after the first it is the one with least room
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
    """Which dataset a sample comes from, and its place in that one's own order, by Megatron's rule: always the dataset
    that is furthest behind its weight."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._datasets = numpy.zeros(_PERIOD, dtype=numpy.int16)
        self._samples = numpy.zeros(_PERIOD, dtype=numpy.int64)
        shares = numpy.asarray(weights, dtype=numpy.float64) / sum(weights)
        helpers.build_blending_indices(self._datasets, self._samples, shares, len(weights), _PERIOD, False)
        self._counts = numpy.bincount(self._datasets, minlength=len(weights))

    def locate(self, sample: int) -> tuple[int, int]:
        period, at = divmod(sample, _PERIOD)
        dataset = int(self._datasets[at])
        return dataset, period * int(self._counts[dataset]) + int(self._samples[at])
