"""Megatron's indexed datasets: written from tokens, with a mask where only some are learned, and checked."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

from .. import files
from ..config import DataConfig
from ..errors import refuse
from .identity import mask_of, tokenizer_digest

logger = logging.getLogger(__name__)
_REMEDY = "Write it with `megatron-longctx data`, or set data.prefix to another."


Document = tuple[Sequence[int], Sequence[bool] | None]
"""Its tokens, and which of them are learned: those that a model is to say. None: all."""


@dataclass(frozen=True)
class Corpus:
    """What `<prefix>.json` says beside `<prefix>.bin` and `<prefix>.idx`.

    learned: of the tokens, those that `<prefix>.mask.bin` has 1 for; None without such files: all.
    """

    tokenizer: str
    vocab_size: int
    tokenizer_sha256: str
    documents: int
    tokens: int
    learned: int | None = None


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
    ids = ([token for text in texts for token in (*tokenizer.tokenize(text), tokenizer.eod)] for texts in documents)
    return write_documents(((tokens, None) for tokens in ids), prefix, tokenizer, masked=False)


def write_documents(
    documents: Iterable[Document], prefix: Path, tokenizer: MegatronTokenizerText, masked: bool
) -> Corpus:
    """As `write_corpus`, from tokens. masked: documents say what is learned, and `<prefix>.mask.*` is written too: an
    indexed dataset of the same lengths, with a byte for every token."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    partial = f"{prefix}.partial"
    kinds = {"": DType.optimal_dtype(tokenizer.vocab_size)} | ({".mask": numpy.uint8} if masked else {})
    builders = {kind: IndexedDatasetBuilder(f"{partial}{kind}.bin", dtype=dtype) for kind, dtype in kinds.items()}
    count = tokens = learned = 0
    try:
        for ids, mask in documents:
            if not ids:
                continue
            builders[""].add_document(numpy.asarray(ids, dtype=kinds[""]), [len(ids)])
            if masked:
                builders[".mask"].add_document(numpy.asarray(mask, dtype=numpy.uint8), [len(ids)])
                learned += sum(mask or ())
            count, tokens = count + 1, tokens + len(ids)
        if not count:
            raise ValueError(
                f"no text for {prefix}: expected at least one document that is not empty. Check the source."
            )
        for kind, builder in builders.items():
            builder.finalize(f"{partial}{kind}.idx")
        _take_their_names(partial, prefix, kinds)
    finally:  # of a source that turned out bad half-way
        for file in prefix.parent.glob(f"{prefix.name}.partial.*"):
            file.unlink()
    digest = tokenizer_digest(tokenizer)
    corpus = Corpus(tokenizer.library, tokenizer.vocab_size, digest, count, tokens, learned if masked else None)
    note = {key: value for key, value in asdict(corpus).items() if value is not None}
    files.write_text(Path(f"{prefix}.json"), json.dumps(note, indent=2) + "\n")
    return corpus


def _take_their_names(partial: str, prefix: Path, kinds: Iterable[str]) -> None:
    """The mask first: without one all tokens would be learned, with another's the dataset is refused."""
    for stale in (".json", ".mask.bin", ".mask.idx"):
        Path(f"{prefix}{stale}").unlink(missing_ok=True)
    for kind in sorted(kinds, reverse=True):
        for suffix in (".bin", ".idx"):
            os.replace(f"{partial}{kind}{suffix}", f"{prefix}{kind}{suffix}")


class TokenDataset(IndexedDataset):  # type: ignore[misc]
    """By its prefix. Its base's clean-up complains on standard error of what a failed start has not set."""

    def __del__(self) -> None:
        self.__dict__.setdefault("bin_reader", None)
        self.__dict__.setdefault("index", None)
        super().__del__()


def documents_of(data: DataConfig, part: int, count: int) -> slice:
    """Of `count` documents those of a part of `data.split`: 0 for training, 1 for validation. Megatron splits whole
    documents."""
    weights = [*map(float, data.split.split(",")), 0.0]
    bounds = [round(sum(weights[:parts]) / sum(weights) * count) for parts in (part, part + 1)]
    return slice(*bounds)


def check_corpus(data: DataConfig) -> int:
    """Refuse absent, empty, corrupt or mismatched datasets before any rank starts.

    Returns:
        their tokens.

    Raises:
        ValueError: names what is wrong with `data.prefix` and what to do.
    """
    return sum(_check_dataset(data, prefix) for _, prefix in data.datasets)


def _check_dataset(data: DataConfig, prefix: str) -> int:
    lengths = _lengths(data, prefix)
    tokens, trained = int(lengths.sum()), int(lengths[documents_of(data, 0, len(lengths))].sum())
    least = data.seq_length + 1 if data.packing != "best_fit" else 2
    if tokens < least:
        raise refuse(
            "data.seq_length",
            data.seq_length,
            f"at most {tokens - 1}: {prefix} has {tokens} tokens",
            "Lower data.seq_length or use more text.",
        )
    if trained < least:
        part = f"a training part of at least {least} tokens; it has {trained} of {tokens}"
        raise refuse("data.split", data.split, part, "Give the first part of data.split more weight.")
    if data.packing != "none" and not lengths.all():
        expected = f"documents that are not empty with data.packing={data.packing}; number {lengths.argmin()} of "
        raise refuse("data.prefix", data.prefix, f"{expected}{prefix}.idx is", _REMEDY)
    note = _note(data, prefix)
    if note and note["tokenizer"] != data.tokenizer:
        wanted = f"{note['tokenizer']}, which {prefix} was written with"
        raise refuse("data.tokenizer", data.tokenizer, wanted, _REMEDY)
    if (mask := mask_of(prefix)) and not numpy.array_equal(_lengths(data, mask), lengths):
        expected = f"in {prefix}.mask.idx the lengths of {prefix}.idx: a mask for every token"
        raise refuse("data.prefix", data.prefix, expected, _REMEDY)
    return tokens


def _lengths(data: DataConfig, prefix: str) -> numpy.ndarray:
    """The lengths of a dataset's documents, int64, if its files are what its index says."""
    sizes = []
    for suffix in (".idx", ".bin"):
        path = Path(prefix + suffix)
        if not path.is_file():
            raise refuse("data.prefix", data.prefix, f"the files {prefix}.idx and .bin; {path} is missing", _REMEDY)
        sizes.append(path.stat().st_size)
    if not all(sizes):
        raise refuse("data.prefix", data.prefix, "files that are not empty", _REMEDY)
    try:
        dataset = TokenDataset(prefix)
        lengths = numpy.asarray(dataset.sequence_lengths, dtype=numpy.int64)
        item = numpy.dtype(dataset.index.dtype).itemsize
    except Exception as error:  # a corrupt index fails in many ways: assertions, struct and numpy errors
        expected = f"a Megatron index file ({error or type(error).__name__})"
        raise refuse("data.prefix", data.prefix, expected, _REMEDY) from error
    tokens = int(lengths.sum())
    if tokens * item != sizes[1]:
        wanted = f"{tokens * item} bytes in {prefix}.bin, as its index says; it has {sizes[1]}"
        raise refuse("data.prefix", data.prefix, wanted, f"The file is cut or not of this index. {_REMEDY}")
    return lengths


def check_tokenizer(data: DataConfig, tokenizer: MegatronTokenizerText) -> None:
    """Refuse a tokenizer whose content is not that of the one the datasets were written with.

    Raises:
        ValueError: names both.
    """
    found = (tokenizer.vocab_size, tokenizer_digest(tokenizer))
    for _, prefix in data.datasets:
        if not (note := _note(data, prefix)):
            continue
        written = (note.get("vocab_size", found[0]), note.get("tokenizer_sha256", found[1]))
        if written != found:
            shown, now = (f"{size} tokens, SHA-256 {str(digest)[:12]}…" for size, digest in (written, found))
            raise refuse(
                "data.tokenizer_path",
                data.tokenizer_path,
                f"the tokenizer that {prefix} was written with ({shown}); this one has {now}",
                "Use that one, write it with this one (`megatron-longctx data`), or set train.check_data=false.",
            )
        if "tokenizer_sha256" not in note:
            logger.warning(
                "%s.json does not say which files its tokenizer had: only their number of tokens was compared", prefix
            )


def _note(data: DataConfig, prefix: str) -> dict[str, Any]:
    """What `<prefix>.json` says; empty without one, since only this project's datasets have it."""
    path = Path(prefix + ".json")
    if not path.is_file():
        return {}
    try:
        note: dict[str, Any] = json.loads(path.read_text())
        note["tokenizer"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise refuse("data.prefix", data.prefix, f"a JSON object with `tokenizer` in {path}", _REMEDY) from error
    return note
