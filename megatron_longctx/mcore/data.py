"""The samples of a run as batches: read from Megatron's indexed datasets, labelled, and ended where documents end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
from torch.utils.data import Dataset

from ..config import Config, DataConfig, token_unit
from ..errors import refuse
from .batch import Batch
from .corpus import documents_of, open_dataset
from .identity import mask_of
from .packing import Blend, Order, Packs, Pieces, Stream


class TrainingData(Dataset[Batch]):
    """Samples in an order that depends on the seed alone: not on steps, batch sizes, workers or ranks.

    Args:
        config: `data` and `train.seed` are read, and what a sequence's tokens must be a multiple of.
        tokenizer: the one the data was written with.
        vocab_size: rows of the model's embedding.
        part: of `data.split`: 0 for training, 1 for validation.
    """

    def __init__(self, config: Config, tokenizer: MegatronTokenizerText, vocab_size: int, part: int = 0) -> None:
        self._data, self._unit = config.data, token_unit(config.parallelism)
        self._eod: int = tokenizer.eod
        self._vocab_size = vocab_size
        weights, prefixes = zip(*config.data.datasets, strict=True)
        self._sources = [_Source(config.data, prefix, config.train.seed, part) for prefix in prefixes]
        self._blend = Blend(weights) if len(weights) > 1 else None

    def __getitem__(self, samples: Sequence[int]) -> Batch:
        """These samples, by their numbers in the order of the whole run. Packed, a batch is one of them.

        Raises:
            ValueError: a token that the model has no embedding for.
        """
        rows = [self._row(sample) for sample in samples]
        tokens, labels, mask, positions = (
            torch.from_numpy(numpy.stack(arrays)) for arrays in zip(*(row[:4] for row in rows), strict=True)
        )
        return Batch(tokens, labels, mask, positions, rows[0][4])

    def describe(self) -> Iterator[str]:
        """How full packs are, a line for every dataset; nothing without packs."""
        for source in self._sources:
            if isinstance(source.order, Packs):
                yield source.describe(source.order, self._unit)

    def _row(
        self, sample: int
    ) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray, tuple[int, ...] | None]:
        """Tokens, labels, loss mask and positions, and the lengths of documents."""
        dataset, sample = self._blend.locate(sample) if self._blend else (0, sample)
        source = self._sources[dataset]
        pieces = source.pieces(sample)
        text = read(source.tokens, pieces).astype(numpy.int64)
        self._check(text, source.prefix)
        tokens, following = text[: self._data.seq_length], text[1 : self._data.seq_length + 1]
        labels, mask = numpy.zeros_like(tokens), numpy.zeros(len(tokens), dtype=numpy.float32)
        labels[: len(following)] = following
        mask[: len(following)] = 1 if source.learned is None else read(source.learned, pieces)[1 : len(following) + 1]
        if self._data.mask_eod_loss:
            mask[tokens == self._eod] = 0
        if self._data.packing == "none":
            return tokens, labels, mask, numpy.arange(len(tokens)), None
        ends = numpy.cumsum(pieces.lengths)
        lasts = ends[ends <= len(tokens)] - 1  # what follows them is another document's
        labels[lasts], mask[lasts] = 0, 0
        lengths = numpy.diff(numpy.minimum(ends, len(tokens)), prepend=0)
        if padding := -len(tokens) % self._unit:
            tokens = numpy.append(tokens, numpy.full(padding, self._eod))
            labels, mask = (numpy.append(x, numpy.zeros(padding, x.dtype)) for x in (labels, mask))
            lengths = numpy.append(lengths, padding)
        documents = tuple(length for length in lengths.tolist() if length)
        return tokens, labels, mask, numpy.concatenate([numpy.arange(length) for length in documents]), documents

    def _check(self, text: numpy.ndarray, prefix: str) -> None:
        if (highest := int(text.max())) >= self._vocab_size:
            raise refuse(
                "data.prefix",
                prefix,
                f"token ids below the vocabulary's {self._vocab_size}; {highest} is there",
                "Use the tokenizer the data was written with, or a model with a larger vocabulary.",
            )


class _Source:
    """A part of one dataset, and the order of its samples."""

    def __init__(self, data: DataConfig, prefix: str, seed: int, part: int) -> None:
        self.prefix = prefix
        self.tokens = open_dataset(prefix)
        self.learned = open_dataset(mask) if (mask := mask_of(prefix)) else None
        documents = documents_of(data, part, len(self.tokens.sequence_lengths))
        self._first = documents.start
        lengths = numpy.array(self.tokens.sequence_lengths[documents])
        self.order: Order = (Packs if data.packing == "best_fit" else Stream)(lengths, data.seq_length, seed)
        self._seq_length = data.seq_length

    def pieces(self, sample: int) -> Pieces:
        """By the dataset's own numbers of documents."""
        found = self.order.pieces(sample)
        return found._replace(documents=found.documents + self._first)

    def describe(self, packs: Packs, unit: int) -> str:
        full = 100 * int(packs.tokens.sum()) / packs.size / self._seq_length
        padding = int((-packs.tokens % unit).sum())
        return (
            f"{self.prefix}: {packs.size:,} packs, {full:.2f}% full, the least full of {packs.tokens.min():,} tokens; "
            f"{padding:,} tokens of padding, {packs.num_cut:,} documents longer than data.seq_length cut"
        )


def check_samples(config: Config, part: int, count: int, key: str) -> None:
    """Refuse a part of `data.split` whose first `count` samples are not all different. key: that asks for them.

    Raises:
        ValueError: names the dataset and how many it has.
    """
    weights, prefixes = zip(*config.data.datasets, strict=True)
    blend = Blend(weights) if len(weights) > 1 else None
    asked = Counter(blend.locate(sample)[0] for sample in range(count)) if blend else Counter({0: count})
    for number, prefix in enumerate(prefixes):
        dataset = open_dataset(prefix)  # its end unmaps what it has given
        lengths = dataset.sequence_lengths[documents_of(config.data, part, len(dataset.sequence_lengths))]
        tokens = int(lengths.sum(dtype=numpy.int64))
        least = 2 if config.data.packing == "best_fit" else config.data.seq_length + 1
        found = _Source(config.data, prefix, config.train.seed, part).order.size if tokens >= least else 0
        if found < asked[number]:
            expected = (
                f"at most {found * count // asked[number]}: part {part + 1} of data.split={config.data.split} has "
            )
            expected += f"{found} sequences of {config.data.seq_length} tokens in {prefix}"
            raise refuse(key, count, expected, "Ask for fewer or shorter ones, or give that part more weight or text.")


def read(dataset: IndexedDataset, pieces: Pieces) -> numpy.ndarray:
    """The tokens of pieces, joined; of the dataset's own dtype."""
    spans = zip(*(values.tolist() for values in pieces), strict=True)
    return numpy.concatenate([dataset.get(*span) for span in spans])


def shares(config: Config, step: int, dp_rank: int, dp_size: int) -> Iterator[range]:
    """The samples of every micro-batch of this data-parallel rank from `step` (counted from 0) on."""
    train = config.train
    per_rank = train.global_batch_size // dp_size
    for number in range(step, train.steps):
        first = number * train.global_batch_size + dp_rank * per_rank
        for begin in range(first, first + per_rank, train.micro_batch_size):
            yield range(begin, begin + train.micro_batch_size)
