"""The samples of a run as batches: read from Megatron's indexed datasets, labelled, and ended where documents end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
from torch import Tensor
from torch.utils.data import Dataset

from ..config import Config, DataConfig, configured_mode, token_unit
from ..errors import refuse
from ..layout import build_layout
from ..schedules.mask import documents as pack_mask
from .corpus import TokenDataset, check_corpus, documents_of
from .identity import mask_of
from .packing import Blend, Order, Packs, Pieces, Stream


@dataclass(frozen=True)
class Batch:
    """One whole micro-batch, before it is sharded.

    tokens, labels, position_ids: int64 `[b, S]`. labels are the next tokens of the same document. loss_mask: fp32
    `[b, S]`. documents: lengths of a pack's documents, which sum to S; then b is 1. None: every row is one causal
    sequence.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    documents: tuple[int, ...] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the documents of a row, which is one where it is no pack."""
        return self.documents or (self.tokens.shape[1],)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory; PyTorch's `DataLoader` asks for it by this name."""
        pinned = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return Batch(**pinned, documents=self.documents)


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
        self._blend = Blend(weights)

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
        dataset, sample = self._blend.locate(sample)
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
        if padding := -len(tokens) % self._unit:
            tokens = numpy.append(tokens, numpy.full(padding, self._eod))
            labels, mask = (numpy.append(x, numpy.zeros(padding, x.dtype)) for x in (labels, mask))
        documents = _documents(pieces, self._data.seq_length, self._unit)
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
        self.tokens = TokenDataset(prefix)
        self.learned = TokenDataset(mask) if (mask := mask_of(prefix)) else None
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


def _lengths(data: DataConfig, prefix: str, part: int) -> numpy.ndarray:
    """Tokens of every document in a part of `data.split`."""
    dataset = TokenDataset(prefix)  # its end unmaps what it has given
    return numpy.array(dataset.sequence_lengths[documents_of(data, part, len(dataset.sequence_lengths))])


def check_samples(config: Config, part: int, count: int, key: str) -> None:
    """Refuse a part of `data.split` whose first `count` samples are not all different. key: that asks for them.

    Raises:
        ValueError: names the dataset and how many it has.
    """
    weights, prefixes = zip(*config.data.datasets, strict=True)
    blend = Blend(weights)
    asked = Counter(blend.locate(sample)[0] for sample in range(count))
    for number, prefix in enumerate(prefixes):
        tokens = int(_lengths(config.data, prefix, part).sum(dtype=numpy.int64))
        least = 2 if config.data.packing == "best_fit" else config.data.seq_length + 1
        found = _Source(config.data, prefix, config.train.seed, part).order.size if tokens >= least else 0
        if found < asked[number]:
            text = f"{found} sequences of {config.data.seq_length} tokens in {prefix}"
            most = found * count // asked[number]
            expected = f"at most {most}: part {part + 1} of data.split={config.data.split} has {text}"
            raise refuse(key, count, expected, "Ask for fewer or shorter ones, or give that part more weight or text.")


def padded(lengths: Sequence[int], unit: int) -> tuple[int, ...]:
    """The documents of a pack whose tokens are a multiple of `unit`: padding is one more."""
    return tuple(length for length in (*lengths, -sum(lengths) % unit) if length)


def first_pack(config: Config) -> tuple[int, ...]:
    """The lengths of the documents in the first micro-batch of the first data-parallel rank.

    Raises:
        ValueError: datasets that are not there, or cannot serve the configuration.
    """
    check_corpus(config.data)
    weights, prefixes = zip(*config.data.datasets, strict=True)
    dataset, sample = Blend(weights).locate(0)
    pieces = _Source(config.data, prefixes[dataset], config.train.seed, 0).order.pieces(sample)
    return _documents(pieces, config.data.seq_length, token_unit(config.parallelism))


def _documents(pieces: Pieces, seq_length: int, unit: int) -> tuple[int, ...]:
    """The lengths of the documents in a sample, padding included."""
    ends = numpy.minimum(numpy.cumsum(pieces.lengths), seq_length)
    return padded(numpy.diff(ends, prepend=0).tolist(), unit)


def _check_multiples(data: DataConfig, parts: Sequence[int], unit: int, baseline: str) -> None:
    for (_, prefix), part in product(data.datasets, parts):
        lengths = _lengths(data, prefix, part)
        if odd := lengths[lengths % unit != 0][:1].tolist():
            expected = f"null for documents that are no multiples of {unit} tokens; {prefix} has one of {odd[0]}"
            raise refuse("attention.baseline", baseline, expected, "Pad them, or leave it null: ours takes any.")


def check_packs(config: Config) -> None:
    """Refuse datasets with a pack that leaves a context-parallel rank without tokens, which Megatron's layers need, or
    that TransformerEngine does not take where it is the baseline.

    Raises:
        ValueError: names the dataset, the pack's tokens and how many are enough.
    """
    par, data = config.parallelism, config.data
    n, unit = par.context_parallel_size, token_unit(par)
    parts = (0,) if config.train.eval_interval is None else (0, 1)  # trained on, and evaluated
    if n > 1 and data.packing != "none" and config.attention.baseline is not None:
        _check_multiples(data, parts, 2 * n, config.attention.baseline)
        return
    if data.packing != "best_fit" or n == 1:
        return
    mode, enough = configured_mode(par), 2 * n * unit  # whatever the layout: two pieces a rank
    for (_, prefix), part in product(data.datasets, parts):
        order = _Source(data, prefix, config.train.seed, part).order
        assert isinstance(order, Packs)
        sizes = order.longest() if par.layout == "per_document" else order.tokens
        for pack in numpy.flatnonzero(sizes < enough).tolist():
            seen = pack_mask(padded(order.documents(pack), unit))
            layout = build_layout(mode.layout_of(seen, par.layout), n, seen.length, unit, seen.documents)
            if not all(map(layout.num_tokens, range(n))):
                least = f"packs of {enough} tokens, enough for each of the {n} context-parallel ranks to have some"
                remedy = "Leave such short documents out, set data.packing=documents, or take fewer ranks."
                found = f"{least}; {prefix} has one of {order.tokens[pack]}"
                raise refuse("data.packing", data.packing, found, remedy)


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
