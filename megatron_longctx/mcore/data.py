"""A run's samples as batches, read from Megatron's indexed datasets, labelled and divided into documents; and what
identifies them: the datasets, the tokenizer and the keys that their order depends on.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
from torch import Tensor
from torch.utils.data import Dataset

from ..config import Config, DataConfig, configured_mode, token_unit
from ..core.errors import refuse
from ..core.layout import build_layout
from ..core.plans.mask import documents as pack_mask
from ..models.trees import following
from ..planner.flops import Work, training_flops
from .corpus import SIDES, TokenDataset, check_corpus, check_labels, side_prefix, source_of, split_part, tree_of
from .packing import Blend, BranchTooLong, Dealer, DealRule, Packs, SampleOrder, Spans, Stream, TreePacks
from .tokenizer import add_files, tokenizer_digest


@dataclass(frozen=True)
class TrainingBatch:
    """One whole micro-batch, before it is sharded.

    tokens, labels: int64 `[b, S]`. Labels are the next tokens of the same document.
    loss_mask: fp32 `[b, S]`.
    documents: the lengths of a pack's documents, which sum to S; b is 1. None: every row is one causal sequence.
    parents: for each document, the number of an earlier one that it continues, or -1; None: none does.
    advantages, old_logprobs, ref_logprobs: fp32 `[b, S]`, of the labels; None where the data have none.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    documents: tuple[int, ...] | None = None
    parents: tuple[int, ...] | None = None
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the documents in a row; a row that is not a pack is one document."""
        return self.documents or (self.tokens.shape[1],)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def pin_memory(self) -> TrainingBatch:
        """Return a copy in pinned memory. PyTorch's `DataLoader` calls it by this name."""
        pinned = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return TrainingBatch(**pinned, documents=self.documents, parents=self.parents)


class TrainingData(Dataset[TrainingBatch]):
    """Samples in an order that depends on the seed alone, not on steps, batch sizes, workers or ranks.

    Args:
        config: `data`, `train.seed` and what the number of a sequence's tokens must be a multiple of are read.
        tokenizer: the one that the data was written with.
        vocab_size: the rows of the model's embedding.
        part: the part of `data.split`: 0 for training, 1 for validation.
    """

    def __init__(self, config: Config, tokenizer: MegatronTokenizerText, vocab_size: int, part: int = 0) -> None:
        self._data, self._unit = config.data, token_unit(config)
        self._eod: int = tokenizer.eod
        self._vocab_size = vocab_size
        weights, prefixes = zip(*config.data.datasets, strict=True)
        self._sources = [_Source(config.data, prefix, config.train.seed, part) for prefix in prefixes]
        self._blend = Blend(weights)

    def __getitem__(self, samples: Sequence[int]) -> TrainingBatch:
        """Return the samples with these numbers in the order of the whole run. A packed batch is one sample.

        Refuse a token for which the model has no embedding.
        """
        rows = [self._row(sample) for sample in samples]
        stacked = {name: torch.from_numpy(numpy.stack([arrays[name] for arrays, *_ in rows])) for name in rows[0][0]}
        return TrainingBatch(**stacked, documents=rows[0][1], parents=rows[0][2])

    @property
    def size(self) -> int:
        """The number of samples in one pass over a single dataset."""
        (source,) = self._sources
        return source.order.size

    def dealer(self, config: Config, rule: DealRule | None) -> Dealer | None:
        """Return what deals out packs by a rule."""
        if rule is None:
            return None
        orders = [source.order for source in self._sources if isinstance(source.order, Packs)]
        for order in orders:
            order.weigh(rule.token_flops, rule.pair_flops, config.model.layer_windows)
        return Dealer(orders, self._blend, config.train.global_batch_size, config.train.seed, rule.max_wait_steps)

    def describe(self) -> Iterator[str]:
        """Yield a line for every dataset that says how full its packs are; nothing without packs."""
        for source in self._sources:
            if isinstance(packs := source.order, Packs):
                full = 100 * int(packs.tokens.sum()) / packs.size / self._data.seq_length
                padding = int((-packs.tokens % self._unit).sum())
                cut = f"{packs.num_cut:,} documents longer than data.seq_length cut"
                if isinstance(packs, TreePacks):
                    cut += f", which repeats {packs.num_repeated:,} tokens of their prefixes"
                yield (
                    f"{source.prefix}: {packs.size:,} packs, {full:.2f}% full, the least full of "
                    f"{packs.tokens.min():,} tokens; {padding:,} tokens of padding, {cut}"
                )

    def _row(self, sample: int) -> tuple[dict[str, numpy.ndarray], tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return a sample's tensors, named as in `TrainingBatch`, and the lengths and parents of its documents.

        The label of a document's last token is the first token of its first child, if there is one.
        """
        dataset, sample = self._blend.locate(sample)
        source = self._sources[dataset]
        spans = source.spans(sample)
        text = read_tokens(source.tokens, spans).astype(numpy.int64)
        _check_ids(text, spans, source.prefix, self._vocab_size)
        own, packed = min(len(text), self._data.seq_length), self._data.packing != "none"
        documents, parents = _documents(spans, own, self._unit) if packed else ((own,), None)
        places = following(documents, parents or [-1] * len(documents))
        places[own:] = -1  # padding learns nothing
        if len(text) > own and not (packed and own in numpy.cumsum(spans.lengths)):
            places[own - 1] = own  # the last document goes on in another sample
        learns = numpy.repeat(~numpy.array(spans.repeated), spans.lengths) if spans.repeated else 1

        def of_labels(values: numpy.ndarray) -> numpy.ndarray:
            return numpy.where(places < 0, 0, values[places])

        values = {name: read_tokens(dataset, spans) for name, dataset in source.sides.items()}
        values = {"mask": numpy.ones(len(text)), **values}
        sides = {name: of_labels(each * learns).astype(numpy.float32) for name, each in values.items()}
        row = {"tokens": numpy.append(text[:own], numpy.full(len(places) - own, self._eod)), "labels": of_labels(text)}
        row["loss_mask"] = sides.pop("mask")
        if self._data.mask_eod_loss:
            row["loss_mask"][row["tokens"] == self._eod] = 0
        return row | sides, documents if packed else None, parents


def _check_ids(text: numpy.ndarray, spans: Spans, prefix: str, vocab_size: int) -> None:
    """Refuse a token for which the model has no embedding."""
    wrong = (text < 0) | (text >= vocab_size)
    if wrong.any():
        at = int(wrong.argmax())
        span = int(numpy.searchsorted(ends := numpy.cumsum(spans.lengths), at, side="right"))
        position = spans.offsets[span] + at - (ends - spans.lengths)[span]
        where = f"token {position} of document {spans.documents[span]} in {prefix}.bin, both counted from 0,"
        expected = f"token ids from 0 to {vocab_size - 1}, the vocabulary's last; {where} is {text[at]}"
        remedy = "Use the tokenizer the data was written with, or a model with a larger vocabulary."
        raise refuse("data.prefix", prefix, expected, remedy)


class _Source:
    """A part of one dataset, and the order of its samples."""

    def __init__(self, data: DataConfig, prefix: str, seed: int, part: int) -> None:
        self.prefix = prefix
        self.tokens = TokenDataset(prefix)
        found = {side: TokenDataset(beside) for side in SIDES if (beside := side_prefix(prefix, side))}
        trees = found.pop("tree", None)
        self.sides = found
        documents = split_part(data, part, len(self.tokens.sequence_lengths))
        self._first = documents.start
        lengths = numpy.array(self.tokens.sequence_lengths[documents])
        self.order: SampleOrder
        if trees is None:
            self.order = (Packs if data.packing == "best_fit" else Stream)(lengths, data.seq_length, seed)
            return
        nodes = [tree_of(trees, number) for number in range(documents.start, documents.stop)]
        try:
            self.order = TreePacks([each[1:] for each in nodes], data.seq_length, seed)
        except BranchTooLong as error:
            line = nodes[error.document][0]
            where = source_of(prefix) + f":{line}" * (line > 0)  # 0: of several lines
            expected = f"{str(error).removeprefix('expected ')} ({where})"
            remedy = "Raise data.seq_length, or shorten the response."
            raise refuse("data.seq_length", data.seq_length, expected, remedy) from None

    def spans(self, sample: int) -> Spans:
        """Return a sample's spans, with the dataset's own numbers of documents."""
        spans = self.order.spans(sample)
        return spans._replace(documents=spans.documents + self._first)


def check_samples(config: Config, part: int, count: int, key: str) -> None:
    """Refuse a part of `data.split` whose first `count` samples are not all different, or have no label.

    key: the configuration key that asks for the samples.
    """
    weights, prefixes = zip(*config.data.datasets, strict=True)
    blend = Blend(weights)
    requested = Counter(blend.locate(sample)[0] for sample in range(count))
    for number, prefix in enumerate(prefixes):
        source = _Source(config.data, prefix, config.train.seed, part)
        check_labels(config.data, prefix, source.tokens.sequence_lengths, part)
        if (size := source.order.size) < requested[number]:
            text = f"{size} sequences of {config.data.seq_length} tokens in {prefix}"
            most = size * count // requested[number]
            expected = f"at most {most}: part {part + 1} of data.split={config.data.split} has {text}"
            raise refuse(key, count, expected, "Ask for fewer or shorter ones, or give that part more weight or text.")


def first_pack(config: Config) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the lengths and parents of the documents in the first micro-batch of the first data-parallel rank, whose
    datasets are checked first."""
    check_corpus(config.data)
    weights, prefixes = zip(*config.data.datasets, strict=True)
    dataset, sample = Blend(weights).locate(0)
    spans = _Source(config.data, prefixes[dataset], config.train.seed, 0).order.spans(sample)
    return _documents(spans, config.data.seq_length, token_unit(config))


def _documents(spans: Spans, seq_length: int, unit: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the lengths of the documents in a sample, including padding, and their parents."""
    ends = numpy.minimum(numpy.cumsum(spans.lengths), seq_length)
    lengths = _padded(numpy.diff(ends, prepend=0).tolist(), unit)
    return lengths, None if spans.parents is None else (*spans.parents, *[-1] * (len(lengths) - len(spans.parents)))


def _padded(lengths: Sequence[int], unit: int) -> tuple[int, ...]:
    """Return the documents of a pack, with padding to a multiple of `unit` tokens as one more."""
    return tuple(length for length in (*lengths, -sum(lengths) % unit) if length)


def check_packs(config: Config) -> None:
    """Refuse a pack that leaves a context-parallel rank without tokens, which Megatron's layers require."""
    par, data = config.parallelism, config.data
    n, unit = par.context_parallel_size, token_unit(config)
    parts = (0,) if config.train.eval_interval is None else (0, 1)  # for training, and for validation
    if data.packing != "best_fit" or n == 1:
        return
    mode, enough = configured_mode(par), 2 * n * unit  # two pieces per rank, enough in any layout
    for (_, prefix), part in product(data.datasets, parts):
        order = _Source(data, prefix, config.train.seed, part).order
        assert isinstance(order, Packs)
        sizes = order.longest() if config.layout == "per_document" else order.tokens
        for pack in numpy.flatnonzero(sizes < enough).tolist():
            mask = pack_mask(_padded(order.lengths(pack), unit))
            layout = build_layout(mode.layout_of(mask, config.layout), n, mask.length, unit, mask.documents)
            if isinstance(order, TreePacks) or not all(map(layout.num_tokens, range(n))):
                least = f"packs of {enough} tokens, enough for each of the {n} context-parallel ranks to have some"
                remedy = "Leave such short documents out, set data.packing=documents, or take fewer ranks."
                expected = f"{least}; {prefix} has one of {order.tokens[pack]}"
                raise refuse("data.packing", data.packing, expected, remedy)


def read_tokens(dataset: IndexedDataset, spans: Spans) -> numpy.ndarray:
    """Return the tokens of spans, concatenated, with the dataset's own dtype."""
    places = spans.documents, spans.offsets, spans.lengths
    pieces = zip(*(values.tolist() for values in places), strict=True)
    return numpy.concatenate([dataset.get(*piece) for piece in pieces])


def deal_rule(config: Config, vocab_size: int, earlier: Mapping[str, Any] | None = None) -> DealRule | None:
    """Return how packs are dealt out to replicas; None: in random order.

    earlier: the `extra` of the checkpoint that the run resumes from; None for a new run. A run goes on as it began,
        even if an earlier version predicted other work, or moved no packs.
    """
    steps, known = config.data.max_wait_steps, {"order": None} if earlier is None else earlier
    several = config.data.packing == "best_fit" and config.train.global_batch_size > 1
    if steps is None or not several or "order" not in known:
        return None
    if (order := known["order"]) and order[0] == steps:
        return DealRule(*order)
    ones = Work(1, 0, 0), Work(0, 1, 0)
    return DealRule(steps, *(training_flops(config.model, vocab_size, one).causal for one in ones))


def micro_batches(
    config: Config, step: int, dp_rank: int, dp_size: int, dealer: Dealer | None = None
) -> Iterator[Sequence[int]]:
    """Yield the samples of every micro-batch of a data-parallel rank from `step`, counted from 0, on."""
    train = config.train
    per_rank = train.global_batch_size // dp_size
    for number in range(step, train.steps):
        if dealer is not None:
            yield from ([sample] for sample in dealer.replicas(number, dp_size)[dp_rank])
            continue
        first = number * train.global_batch_size + dp_rank * per_rank
        for begin in range(first, first + per_rank, train.micro_batch_size):
            yield range(begin, begin + train.micro_batch_size)


_SAMPLES, _SAMPLE_BYTES = 256, 4096  # of a dataset's tokens that enter its digest

Identity = dict[str, dict[str, Any]]
"""The `value` of each configuration key, and the `sha256` of the content if the value only names it."""


def identity(config: Config, tokenizer: MegatronTokenizerText) -> Identity:
    """Return what a run's samples, and their order, depend on."""
    data = config.data
    digests = [dataset_digest(prefix) for _, prefix in data.datasets]
    blend = repr(([weight for weight, _ in data.datasets], digests))
    digest = digests[0] if len(digests) == 1 else hashlib.sha256(blend.encode()).hexdigest()
    return {
        "data.prefix": {"value": data.prefix, "sha256": digest},
        "data.packing": {"value": data.packing},
        **({"data.max_wait_steps": {"value": data.max_wait_steps}} if data.packing == "best_fit" else {}),
        "data.tokenizer": tokenizer_identity(config, tokenizer),
        "data.seq_length": {"value": data.seq_length},
        "data.split": {"value": data.split},
        "train.seed": {"value": config.train.seed},
    }


def dataset_digest(prefix: str) -> str:
    """Return the SHA-256 of a dataset's index, and of the size and 256 evenly spread samples of its tokens.

    The datasets beside it (`SIDES`) are included in the same way.
    """
    digest = hashlib.sha256()
    for each in filter(None, (prefix, *(side_prefix(prefix, side) for side in SIDES))):
        add_files(digest, [Path(f"{each}.idx")])
        with Path(f"{each}.bin").open("rb") as stream:
            size = stream.seek(0, 2)
            digest.update(str(size).encode())
            for number in range(_SAMPLES):
                stream.seek(number * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def tokenizer_identity(config: Config, tokenizer: MegatronTokenizerText) -> dict[str, Any]:
    """Return the part of `identity` that `generate` and `serve` compare."""
    name = config.data.tokenizer_path or config.data.tokenizer
    return {"value": name, "sha256": tokenizer_digest(tokenizer)}


def identity_error(earlier: Mapping[str, Any], now: Identity, run: Path) -> ValueError | None:
    """Return why `run` may not continue with data that differ from what it was trained with; None if it may.

    Keys that `earlier` lacks are not compared: an earlier version did not write them.
    """
    for key, here in now.items():
        there = earlier.get(key, here)
        if there.get("sha256", there["value"]) != here.get("sha256", here["value"]):
            expected = f"{_shown(there)}, with which {run} has been trained so far; this is {_shown(here)}"
            remedy = "Set it back, start a run of another run.name, or set train.check_data=false to go on with this."
            return refuse(key, here["value"], expected, remedy)
    return None


def _shown(entry: Mapping[str, Any]) -> str:
    return f"{entry['value']} (SHA-256 {entry['sha256'][:12]}…)" if "sha256" in entry else str(entry["value"])
