"""Megatron's indexed datasets: written from text, checked, and served as the batches of a training step."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
from torch import Tensor

from .. import files
from ..config import Config, DataConfig
from ..errors import refuse
from .identity import tokenizer_digest

logger = logging.getLogger(__name__)
_REMEDY = "Write it with `megatron-longctx data`, or set data.prefix to another."


@dataclass(frozen=True)
class Corpus:
    """What `<prefix>.json` says beside `<prefix>.bin` and `<prefix>.idx`."""

    tokenizer: str
    vocab_size: int
    tokenizer_sha256: str
    documents: int
    tokens: int


def write_corpus(documents: Iterable[Iterable[str]], prefix: Path, tokenizer: MegatronTokenizerText) -> Corpus:
    """Tokenize documents into Megatron's indexed form.

    Every document is one or more texts (files, say), each closed by the end-of-document token and kept together as one
    sequence of tokens. Files appear under their names only when complete.

    Args:
        documents: the texts of every document.
        prefix: path without suffix; `.bin`, `.idx` and `.json` are written.
        tokenizer: as `build_tokenizer` gives it; recorded for the check at load time.

    Raises:
        ValueError: no document has any text.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    partial = prefix.with_name(prefix.name + ".partial")
    builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=dtype)
    count = tokens = 0
    for texts in documents:
        ids = [token for text in texts for token in (*tokenizer.tokenize(text), tokenizer.eod)]
        if ids:
            builder.add_document(numpy.asarray(ids, dtype=dtype), [len(ids)])
            count, tokens = count + 1, tokens + len(ids)
    builder.finalize(f"{partial}.idx")
    if not count:
        for suffix in (".bin", ".idx"):
            os.remove(f"{partial}{suffix}")
        raise ValueError(f"no text for {prefix}: expected at least one document that is not empty. Check the source.")
    corpus = Corpus(tokenizer.library, tokenizer.vocab_size, tokenizer_digest(tokenizer), count, tokens)
    # Megatron keeps sample indices there under names that do not depend on the text.
    shutil.rmtree(prefix / "cache", ignore_errors=True)
    for suffix in (".bin", ".idx"):
        os.replace(f"{partial}{suffix}", f"{prefix}{suffix}")
    files.write_text(Path(f"{prefix}.json"), json.dumps(asdict(corpus), indent=2) + "\n")
    return corpus


def _check_indices(prefix: str) -> None:
    """Refuse what is no array among the indices that Megatron keeps: it would unpickle that, and so run it."""
    for path in sorted(Path(prefix).glob("cache/*/*.npy")):
        try:
            if not isinstance(numpy.load(path, mmap_mode="r", allow_pickle=False), numpy.ndarray):
                raise ValueError("it holds several")
        except (ValueError, OSError, EOFError) as error:
            expected, remedy = f"an array of numbers in {path} ({error})", f"Delete {path.parent}: it is written again."
            raise refuse("data.prefix", prefix, expected, remedy) from error


class _WholeDataset(IndexedDataset):  # type: ignore[misc]
    """Its base's clean-up complains on standard error of what a failed start has not set."""

    def __del__(self) -> None:
        self.__dict__.setdefault("bin_reader", None)
        self.__dict__.setdefault("index", None)
        super().__del__()


def check_corpus(data: DataConfig) -> int:
    """Refuse an absent, empty, corrupt or mismatched dataset before any rank starts.

    Returns:
        its number of tokens.

    Raises:
        ValueError: names what is wrong with `data.prefix` and what to do.
    """
    sizes = []
    for suffix in (".idx", ".bin"):
        path = Path(data.prefix + suffix)
        if not path.is_file():
            raise refuse(
                "data.prefix", data.prefix, f"the files {data.prefix}.idx and .bin; {path} is missing", _REMEDY
            )
        sizes.append(path.stat().st_size)
    if not all(sizes):
        raise refuse("data.prefix", data.prefix, "files that are not empty", _REMEDY)
    try:
        dataset = _WholeDataset(data.prefix)
        lengths = numpy.asarray(dataset.sequence_lengths, dtype=numpy.int64)
        item = numpy.dtype(dataset.index.dtype).itemsize
    except Exception as error:  # a corrupt index fails in many ways: assertions, struct and numpy errors
        raise refuse(
            "data.prefix", data.prefix, f"a Megatron index file ({error or type(error).__name__})", _REMEDY
        ) from error
    _check_indices(data.prefix)
    tokens = int(lengths.sum())
    if tokens * item != sizes[1]:
        wanted = f"{tokens * item} bytes in {data.prefix}.bin, as its index says; it has {sizes[1]}"
        raise refuse("data.prefix", data.prefix, wanted, f"The file is cut or not of this index. {_REMEDY}")
    if tokens < data.seq_length + 1:
        raise refuse(
            "data.seq_length",
            data.seq_length,
            f"at most {tokens - 1}: {data.prefix} has {tokens} tokens",
            "Lower data.seq_length or use more text.",
        )
    weights = [float(weight) for weight in data.split.split(",")]
    trained = int(lengths[: round(weights[0] / sum(weights) * len(lengths))].sum())  # Megatron splits whole documents
    if trained < data.seq_length + 1:
        part = f"a training part of at least {data.seq_length + 1} tokens; it has {trained} of {tokens}"
        raise refuse("data.split", data.split, part, "Give the first part of data.split more weight.")
    note = _note(data)
    if note and note["tokenizer"] != data.tokenizer:
        wanted = f"{note['tokenizer']}, which {data.prefix} was written with"
        raise refuse("data.tokenizer", data.tokenizer, wanted, _REMEDY)
    return tokens


def check_tokenizer(data: DataConfig, tokenizer: MegatronTokenizerText) -> None:
    """Refuse a tokenizer whose content is not that of the one the dataset was written with.

    Raises:
        ValueError: names both.
    """
    note, found = _note(data), (tokenizer.vocab_size, tokenizer_digest(tokenizer))
    if not note:
        return
    written = (note.get("vocab_size", found[0]), note.get("tokenizer_sha256", found[1]))
    if written != found:
        shown, now = (f"{size} tokens, SHA-256 {str(digest)[:12]}…" for size, digest in (written, found))
        raise refuse(
            "data.tokenizer_path",
            data.tokenizer_path,
            f"the tokenizer that {data.prefix} was written with ({shown}); this one has {now}",
            "Use that one, write the dataset with this one (`megatron-longctx data`), or set train.check_data=false.",
        )
    if "tokenizer_sha256" not in note:
        logger.warning(
            "%s.json does not say which files its tokenizer had: only their number of tokens was compared", data.prefix
        )


def _note(data: DataConfig) -> dict[str, Any]:
    """What `<prefix>.json` says; empty without one, since only this project's datasets have it."""
    path = Path(data.prefix + ".json")
    if not path.is_file():
        return {}
    try:
        note: dict[str, Any] = json.loads(path.read_text())
        note["tokenizer"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise refuse("data.prefix", data.prefix, f"a JSON object with `tokenizer` in {path}", _REMEDY) from error
    return note


class TrainingData:
    """Samples in a fixed order that depends on the seed alone: not on steps, batch sizes or ranks.

    Building is collective: every rank constructs it with the same arguments. So is a pass over the data, each of which
    has a shuffle of its own.

    Args:
        config: `data` and `train.seed` are read.
        tokenizer: the one the data was written with.
        vocab_size: rows of the model's embedding.
    """

    def __init__(self, config: Config, tokenizer: MegatronTokenizerText, vocab_size: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._epochs: dict[int, GPTDataset] = {0: self._epoch(0)}
        self._size = len(self._epochs[0])

    def reach(self, first: int, count: int) -> None:
        """Make ready the passes in which samples `first .. first+count-1` lie, and forget others, whose files are open.

        Collective: every rank calls it with the samples of all ranks, before it takes its own.
        """
        numbers = range(first // self._size, (first + count - 1) // self._size + 1)
        for number in self._epochs.keys() - set(numbers):
            del self._epochs[number]
        for number in numbers:
            if number not in self._epochs:
                self._epochs[number] = self._epoch(number)

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        """Samples `first .. first+count-1`, which `reach` has made ready, as `[count, S]` tensors: tokens, labels,
        loss_mask, position_ids.

        Labels are the next tokens, shifted over the whole sequence.

        Raises:
            ValueError: a token that the model has no embedding for.
        """
        samples = [self._sample(index) for index in range(first, first + count)]
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        highest = int(max(batch["tokens"].max(), batch["labels"].max()))
        if highest >= self._vocab_size:
            raise refuse(
                "data.prefix",
                self._config.data.prefix,
                f"token ids below the vocabulary's {self._vocab_size}; {highest} is there",
                "Use the tokenizer the data was written with, or a model with a larger vocabulary.",
            )
        return batch

    def _sample(self, index: int) -> dict[str, Tensor]:
        sample: dict[str, Tensor] = self._epochs[index // self._size][index % self._size]
        return sample

    def _epoch(self, number: int) -> GPTDataset:
        data = self._config.data
        config = GPTDatasetConfig(
            random_seed=self._config.train.seed + number,
            sequence_length=data.seq_length,
            blend=([data.prefix], None),
            split=data.split,
            tokenizer=self._tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=data.mask_eod_loss,
            create_attention_mask=False,
        )
        train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, config).build()
        return train


def micro_batches(
    data: TrainingData, step: int, config: Config, dp_rank: int, dp_size: int
) -> Iterator[dict[str, Tensor]]:
    """This data-parallel rank's whole (unsharded) micro-batches of one step, in order."""
    train = config.train
    per_rank = train.global_batch_size // dp_size
    data.reach(step * train.global_batch_size, train.global_batch_size)
    first = step * train.global_batch_size + dp_rank * per_rank
    for offset in range(0, per_rank, train.micro_batch_size):
        yield data.batch(first + offset, train.micro_batch_size)
