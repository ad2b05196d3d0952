"""Megatron's indexed datasets: written from tokens, with a mask if only some are learned, and checked."""

import gc
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

from ..config import Config, DataConfig, check_dataset, files
from ..core.errors import refuse
from ..models.trees import Tree
from .tokenizer import encoder, tokenizer_digest

logger = logging.getLogger(__name__)

_REMEDY = "Write it with `megatron-longctx data`, or set data.prefix to another."

Document = tuple[Sequence[int], Sequence[bool] | None]
"""A document's tokens, and which of them count in the loss; None: all."""

SIDES = ("mask", "tree", "advantages", "old_logprobs", "ref_logprobs")
"""The datasets beside a dataset of tokens: `<prefix>.<side>`, with a number for every token. `tree` has the documents'
nodes instead: the line of the source, and the lengths and parents of nodes."""


@dataclass(frozen=True)
class Corpus:
    """The content of `<prefix>.json`, which describes `<prefix>.bin` and `<prefix>.idx`.

    learned: the number of tokens that `<prefix>.mask.bin` does not mark with 0; None without that file: all.
    source: of trees, the file whose lines they are from.
    """

    tokenizer: str
    vocab_size: int
    tokenizer_sha256: str
    documents: int
    tokens: int
    learned: int | None = None
    source: str | None = None


class Counts(NamedTuple):
    """The number of documents, of their tokens, and of the tokens that a mask does not mark with 0."""

    documents: int = 0
    tokens: int = 0
    learned: int = 0


def write_corpus(documents: Iterable[Iterable[str]], prefix: Path, tokenizer: MegatronTokenizerText) -> Corpus:
    """Write texts in Megatron's indexed form. Files get their names only when they are complete.

    Args:
        documents: the texts, such as files, of every document. They are one sequence of tokens, in which the
            end-of-document token follows each text.
        prefix: a path without suffix; `.bin`, `.idx` and `.json` are written.
        tokenizer: recorded for the check at load time.

    Raises:
        ValueError: no document has a token.
    """
    encode = encoder(tokenizer)
    ids = ([token for text in texts for token in (*encode(text), tokenizer.eod)] for texts in documents)
    return _publish(partial(_write_files, ((tokens, {}) for tokens in ids)), prefix, tokenizer, {})


def write_shard(documents: Iterable[Document], shard: Path, tokenizer: MegatronTokenizerText, masked: bool) -> Counts:
    """Write the files of a part of the documents, for `join_shards`.

    masked: whether documents say which tokens are learned. Then `.mask.*` is written too: an indexed dataset of the
        same lengths, with one byte per token.
    """
    sides = ((ids, {"mask": mask}) for ids, mask in documents)
    return _write_files(sides, str(shard), _dtypes(tokenizer, _mask_side(masked)))


def join_shards(shards: Mapping[Path, Counts], prefix: Path, tokenizer: MegatronTokenizerText, masked: bool) -> Corpus:
    """Write the results of `write_shard`, in their order, as `write_corpus` writes texts."""

    def write(partial: str, dtypes: Mapping[str, Any]) -> Counts:
        gc.freeze()  # Megatron's builder calls the garbage collector for every shard
        for kind, dtype in dtypes.items():
            builder = IndexedDatasetBuilder(f"{partial}{kind}.bin", dtype=dtype)
            for shard, counts in shards.items():
                if counts.documents:  # others have no index that can be read
                    builder.add_index(f"{shard}{kind}")
            builder.finalize(f"{partial}{kind}.idx")
        gc.unfreeze()
        return Counts(*map(sum, zip(*shards.values(), strict=True)))

    return _publish(write, prefix, tokenizer, _mask_side(masked))


def _mask_side(masked: bool) -> dict[str, Any]:
    return {"mask": numpy.uint8} if masked else {}


def write_trees(
    trees: Iterable[tuple[int, Tree]],
    prefix: Path,
    tokenizer: MegatronTokenizerText,
    columns: Sequence[str] = (),
    source: str | None = None,
) -> Corpus:
    """Write trees of tokens like `write_corpus`, one document each.

    trees: each with the line of `source` that it is from.
    columns: the names of the trees' values (`SIDES`).
    """
    sides = {"mask": numpy.float32, "tree": numpy.int32} | dict.fromkeys(columns, numpy.float32)
    documents = (
        (tree.tokens.tolist(), {"mask": tree.weights, "tree": (line, *tree.lengths, *tree.parents)}
         | dict(zip(columns, tree.values.T, strict=True)))
        for line, tree in trees
    )  # fmt: skip
    return _publish(partial(_write_files, documents), prefix, tokenizer, sides, source)


def _dtypes(tokenizer: MegatronTokenizerText, sides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dtypes of a dataset's files, keyed by what follows the prefix in their names."""
    return {"": DType.optimal_dtype(tokenizer.vocab_size)} | {f".{name}": dtype for name, dtype in sides.items()}


def _write_files(
    documents: Iterable[tuple[Sequence[int], Mapping[str, Any]]], prefix: str, dtypes: Mapping[str, Any]
) -> Counts:
    """Write documents of tokens, each with the values of its sides."""
    builders = {kind: IndexedDatasetBuilder(f"{prefix}{kind}.bin", dtype=dtype) for kind, dtype in dtypes.items()}
    count = tokens = learned = 0
    for ids, values in documents:
        if not len(ids):
            continue
        for kind, builder in builders.items():
            array = numpy.asarray(values[kind[1:]] if kind else ids, dtype=dtypes[kind])
            builder.add_document(array, [len(array)])
        learned += int(numpy.count_nonzero(values["mask"])) if ".mask" in dtypes else 0
        count, tokens = count + 1, tokens + len(ids)
    for kind, builder in builders.items():
        builder.finalize(f"{prefix}{kind}.idx")
    return Counts(count, tokens, learned)


def _publish(
    write: Callable[[str, Mapping[str, Any]], Counts],
    prefix: Path,
    tokenizer: MegatronTokenizerText,
    sides: Mapping[str, Any],
    source: str | None = None,
) -> Corpus:
    """Let `write` write the files of a dataset under a partial prefix, and give them their names."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    unfinished, dtypes = f"{prefix}.partial", _dtypes(tokenizer, sides)
    try:
        counts = write(unfinished, dtypes)
        if not counts.documents:
            expected = "at least one document that is not empty"
            raise ValueError(f"no text for {prefix}: expected {expected}. Check the source.")
        for stale in (".json", *(f".{side}{suffix}" for side in SIDES for suffix in (".bin", ".idx"))):
            Path(f"{prefix}{stale}").unlink(missing_ok=True)
        # The mask first: after a crash, tokens without a mask would all be learned; with another's they are refused.
        for kind in sorted(dtypes, reverse=True):
            for suffix in (".bin", ".idx"):
                os.replace(f"{unfinished}{kind}{suffix}", f"{prefix}{kind}{suffix}")
    finally:  # the source may fail half-way
        for file in prefix.parent.glob(f"{prefix.name}.partial.*"):
            file.unlink()
    marked = counts.learned if "mask" in sides else None
    digest = tokenizer_digest(tokenizer)
    corpus = Corpus(tokenizer.library, tokenizer.vocab_size, digest, counts.documents, counts.tokens, marked, source)
    note = {key: value for key, value in asdict(corpus).items() if value is not None}
    files.write_text(Path(f"{prefix}.json"), json.dumps(note, indent=2) + "\n")
    return corpus


class TokenDataset(IndexedDataset):  # type: ignore[misc]
    """An indexed dataset whose clean-up does not complain on standard error of what a failed start has not set."""

    def __del__(self) -> None:
        self.__dict__.setdefault("bin_reader", None)
        self.__dict__.setdefault("index", None)
        super().__del__()


def side_prefix(prefix: str, side: str) -> str | None:
    """Return the prefix of a dataset beside this one (`SIDES`); None if there is none. No `mask`: all is learned."""
    return f"{prefix}.{side}" if Path(f"{prefix}.{side}.idx").is_file() else None


def check_values(config: Config) -> None:
    """Refuse datasets of rollouts without what the objective needs for every token."""
    needed = {"advantages": ("train.objective", "`advantage` or `reward`", config.train.objective == "policy_gradient"),
              "ref_logprobs": ("train.kl_coeff", "`ref_logprobs`", config.train.kl_coeff > 0)}  # fmt: skip
    for _, prefix in config.data.datasets:
        for side, (key, field, is_needed) in needed.items():
            if is_needed and side_prefix(prefix, side) is None:
                value = config.train.objective if side == "advantages" else config.train.kl_coeff
                expected = f"rollouts with {field} in every response; {prefix} has none"
                raise refuse(key, value, expected, f"Add them to {source_of(prefix)} and write it again.")


def source_of(prefix: str) -> str:
    """Return the file that a dataset of trees is from."""
    path = Path(f"{prefix}.json")
    return str(json.loads(path.read_text()).get("source", prefix)) if path.is_file() else prefix


def tree_of(dataset: IndexedDataset, document: int) -> tuple[int, list[int], list[int]]:
    """Return the line of the source, and the nodes' lengths and parents, of a document of a side `tree`."""
    line, *nodes = dataset.get(document).tolist()
    return line, nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]


def split_part(data: DataConfig, part: int, count: int) -> slice:
    """Return which of `count` documents belong to a part of `data.split`: 0 for training, 1 for validation. As in
    Megatron, parts have whole documents."""
    weights = [*map(float, data.split.split(",")), 0.0]
    bounds = [round(sum(weights[:parts]) / sum(weights) * count) for parts in (part, part + 1)]
    return slice(*bounds)


def check_corpus(data: DataConfig) -> int:
    """Refuse missing, empty, corrupt or mismatched datasets before any rank starts; return the number of their tokens.

    Raises:
        ValueError: the message names what is wrong with `data.prefix` and what to do.
    """
    return sum(_check_dataset(data, prefix) for _, prefix in data.datasets)


def _wrong(data: DataConfig, expected: str) -> ValueError:
    return refuse("data.prefix", data.prefix, expected, _REMEDY)


def _check_dataset(data: DataConfig, prefix: str) -> int:
    lengths = _lengths(data, prefix)
    tokens, trained = int(lengths.sum()), int(lengths[split_part(data, 0, len(lengths))].sum())
    least = data.seq_length + 1 if data.packing != "best_fit" else 2
    if tokens < least:
        most = f"at most {tokens - 1}: {prefix} has {tokens} tokens"
        raise refuse("data.seq_length", data.seq_length, most, "Lower data.seq_length or use more text.")
    if trained < least:
        part = f"a training part of at least {least} tokens; it has {trained} of {tokens}"
        raise refuse("data.split", data.split, part, "Give the first part of data.split more weight.")
    if data.packing != "none" and not lengths.all():
        which = f"number {lengths.argmin()} of {prefix}.idx is"
        raise _wrong(data, f"documents that are not empty with data.packing={data.packing}; {which}")
    check_labels(data, prefix, lengths, 0)
    note = _note(data, prefix)
    if note.get("learned") == 0:
        raise _wrong(data, f"a token that counts in the loss; the mask of {prefix} leaves all {tokens} out")
    if note and note["tokenizer"] != data.tokenizer:
        wanted = f"{note['tokenizer']}, which {prefix} was written with"
        raise refuse("data.tokenizer", data.tokenizer, wanted, _REMEDY)
    for side in SIDES:
        if side == "tree" or not (beside := side_prefix(prefix, side)):
            continue
        if not numpy.array_equal(_lengths(data, beside, are_ids=False), lengths):
            raise _wrong(data, f"in {prefix}.{side}.idx the lengths of {prefix}.idx: a number for every token")
    if (tree := side_prefix(prefix, "tree")) and data.format != "rollouts":
        expected = f"rollouts: {prefix} has trees ({tree}.idx)"
        raise refuse("data.format", data.format, expected, "Set data.format=rollouts and data.packing=best_fit.")
    if not tree and data.format == "rollouts":
        expected = f"a dataset of rollouts; {prefix}.tree.idx is missing"
        raise refuse("data.prefix", data.prefix, expected, "Write it with `megatron-longctx data`, or set data.format.")
    return tokens


def _lengths(data: DataConfig, prefix: str, are_ids: bool = True) -> numpy.ndarray:
    """Return the lengths of a dataset's documents, int64, and check that its files are as its index says."""
    check_dataset(data, prefix)
    sizes = [Path(prefix + suffix).stat().st_size for suffix in (".idx", ".bin")]
    if not all(sizes):
        raise _wrong(data, "files that are not empty")
    try:
        dataset = TokenDataset(prefix)
        lengths = numpy.asarray(dataset.sequence_lengths, dtype=numpy.int64)
        item = numpy.dtype(dataset.index.dtype).itemsize
    except Exception as error:  # a corrupt index fails in many ways: assertions, struct and numpy errors
        raise _wrong(data, f"a Megatron index file ({error or type(error).__name__})") from error
    if are_ids and not numpy.issubdtype(dataset.index.dtype, numpy.integer):
        found = numpy.dtype(dataset.index.dtype)
        raise _wrong(data, f"token ids that are whole numbers; {prefix}.idx says {found}")
    tokens = int(lengths.sum())
    if tokens * item != sizes[1]:
        wanted = f"{tokens * item} bytes in {prefix}.bin, as its index says; it has {sizes[1]}"
        raise refuse("data.prefix", data.prefix, wanted, f"The file is cut or not of this index. {_REMEDY}")
    return lengths


def check_labels(data: DataConfig, prefix: str, lengths: numpy.ndarray, part: int) -> None:
    """Refuse a part of `data.split` without a label: packed documents learn their second token and those after it.

    lengths: of all documents of the dataset.
    """
    documents = lengths[split_part(data, part, len(lengths))]
    if data.packing != "none" and documents.max(initial=0) == 1:
        expected = f"a document of two tokens or more with data.packing={data.packing}; all {len(documents)} in part "
        expected += f"{part + 1} of {prefix} have one, so that none has a next token to learn"
        raise refuse("data.prefix", data.prefix, expected, "Join them to longer documents, or set data.packing=none.")


def check_tokenizer(data: DataConfig, tokenizer: MegatronTokenizerText) -> None:
    """Refuse a tokenizer whose content differs from that of the one the datasets were written with."""
    now = (tokenizer.vocab_size, tokenizer_digest(tokenizer))
    for _, prefix in data.datasets:
        if not (note := _note(data, prefix)):
            continue
        written = (note.get("vocab_size", now[0]), note.get("tokenizer_sha256", now[1]))
        if written != now:
            theirs, ours = (f"{size} tokens, SHA-256 {str(digest)[:12]}…" for size, digest in (written, now))
            expected = f"the tokenizer that {prefix} was written with ({theirs}); this one has {ours}"
            remedy = "Use that one, write it with this one (`megatron-longctx data`), or set train.check_data=false."
            raise refuse("data.tokenizer_path", data.tokenizer_path, expected, remedy)
        if "tokenizer_sha256" not in note:
            message = "%s.json does not say which files its tokenizer had: only the number of tokens was compared"
            logger.warning(message, prefix)


def _note(data: DataConfig, prefix: str) -> dict[str, Any]:
    """Return the content of `<prefix>.json`; empty without it: only this project's datasets have it."""
    path = Path(prefix + ".json")
    if not path.is_file():
        return {}
    try:
        note: dict[str, Any] = json.loads(path.read_text())
        note["tokenizer"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _wrong(data, f"a JSON object with `tokenizer` in {path}") from error
    return note
