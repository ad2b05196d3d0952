"""Datasets from text and conversations: the documents of a source, tokenized into Megatron's indexed format.

They are made shard by shard, by several processes, so that a job that is cut goes on where it was.
"""

import fcntl
import json
import logging
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ..config import DataConfig, files
from ..config.progress import Progress
from ..core.errors import JobFailed, is_line, refuse, shown
from ..mcore.corpus import Corpus, Counts, Document, join_shards, write_corpus, write_shard, write_trees
from ..mcore.tokenizer import build_tokenizer, encoder, tokenizer_digest
from ..models.chat import template_of
from .conversations import Rollouts, chat_of, conversations, with_shared_beginnings
from .ranks import RankFailed, RankProcesses, exit_with_parent
from .text_files import Piece, Row, content, has_rows, parsed, pieces, read_text
from .text_files import Source as Source

logger = logging.getLogger(__name__)

_MAX_WORKERS = 16  # by default: each has a tokenizer in memory


def prepare(
    source: Source,
    out: Path,
    library: str,
    tokenizer_path: str | None = None,
    chat_template: str | None = None,
    share_prefixes: int | None = None,
    workers: int | None = None,
) -> Corpus:
    """Write `source` as a dataset: `.bin`, `.idx` and `.json`; for conversations also `.mask.bin` and `.mask.idx`.

    Refuse a source, line, tokenizer or option that cannot be used. Raises JobFailed: a process was killed.

    Args:
        out: path without suffix.
        library: a tokenizer library of Megatron-Core; its files are at `tokenizer_path`.
        chat_template: file of the template for conversations and prompts; None for the tokenizer's own.
        share_prefixes: the most tokens of a tree of conversations that begin alike; None writes each alone.
        workers: processes that tokenize; None for one per core, up to 16. The result does not depend on it.
    """
    tokenizer = check(source, out, library, tokenizer_path, chat_template, share_prefixes, workers)
    encode, documents, is_trees = encoder(tokenizer), source.documents(), source.kind == "rollouts"
    is_chat = source.kind == "conversations"
    together = bool(is_trees or documents or share_prefixes)
    with Progress("tokenizing", unit="documents", told=together) as progress:
        if is_trees:
            rollouts = Rollouts(source.files, encode, tokenizer.eod, partial(chat_of, chat_template, tokenizer))
            if chat_template and rollouts.chat is None:
                expected = "none for rollouts whose prompts are no messages: their texts are tokenized as they are"
                raise refuse("--chat-template", chat_template, expected, "Leave it out.")
            corpus = write_trees(progress.each(rollouts.trees()), out, tokenizer, rollouts.columns, str(source))
        elif documents is not None:
            corpus = write_corpus(progress.each(documents), out, tokenizer)
        elif share_prefixes is not None:
            chat = chat_of(chat_template, tokenizer)
            talks = chain.from_iterable(conversations(path, chat, encode) for path in source.files)
            trees = with_shared_beginnings(progress.each(talks), share_prefixes)
            corpus = write_trees(trees, out, tokenizer, source=str(source))
        else:
            recipe = Recipe(library, tokenizer_path, is_chat, chat_template, source.text_key or "text")
            workers = workers or min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
            corpus = write_sharded(source.files, recipe, tokenizer, out, workers)
    logger.info(
        "%s: %s documents, %s tokens%s (%s), the %s tokenizer",
        out, f"{corpus.documents:,}", f"{corpus.tokens:,}",
        "" if corpus.learned is None else f", {corpus.learned:,} of them answers", source, library,
    )  # fmt: skip
    return corpus


def check(
    source: Source,
    out: Path,
    library: str,
    tokenizer_path: str | None,
    chat_template: str | None,
    share_prefixes: int | None,
    workers: int | None,
) -> Any:
    """Refuse what `prepare` refuses before it reads documents beyond the first. Return the tokenizer."""
    if not out.name or out.name == ".." or not is_line(str(out)) or out.is_dir():
        expected = "a path that ends in a name of one line, and is no folder"
        raise refuse("--out", out, expected, "For example data/corpus.")
    if library == "byte-level" and tokenizer_path:
        expected = "none with the byte-level tokenizer, which has no files"
        raise refuse("--tokenizer-path", tokenizer_path, expected, "Set --tokenizer=huggingface, say, or leave it out.")
    may_be_name = library == "byte-level" or (library == "huggingface" and tokenizer_path)  # a model name on the hub
    if not may_be_name and not (tokenizer_path and Path(tokenizer_path).exists()):
        remedy = "Give their path, or use --tokenizer byte-level."
        raise ValueError(f"--tokenizer-path {tokenizer_path}: expected the files of a {library} tokenizer. {remedy}")
    tokenizer, is_chat = build_tokenizer(library, tokenizer_path), source.kind == "conversations"
    together = source.kind == "rollouts" or source.joined or not source.has_files or bool(share_prefixes)
    if share_prefixes is not None and (share_prefixes < 1 or not is_chat):
        expected = f"a number of tokens from 1 on, and conversations to share; {source} has other documents"
        raise refuse("--share-prefixes", share_prefixes, expected, "Leave it out; rollouts share their prompts anyway.")
    if chat_template and not is_chat and source.kind != "rollouts":
        expected = f"conversations to lay out; the first line of {source} is none"
        raise refuse("--chat-template", chat_template, expected, "Leave it out, or give a .jsonl file of `messages`.")
    if source.glob and not any(Path(name).is_dir() for name in (source.name, *source.more)):
        raise refuse("--glob", source.glob, f"a folder in {source} to choose files of", "Name one, or leave it out.")
    if source.text_key and not (source.has_files and any(map(has_rows, source.files))):
        raise refuse("--text-key", source.text_key, "lines or rows that have keys", "Leave it out: this is plain text.")
    if workers is not None and (workers < 1 or (together and workers > 1)):
        expected = "1 for these documents, which are made together" if together else "1 or more"
        raise refuse("--workers", workers, expected, "Leave it out.")
    if is_chat:
        chat_of(chat_template, tokenizer)
    return tokenizer


def prepare_missing(data: DataConfig) -> None:
    """Write the sources of Python's library as every missing dataset, for demos and measurements."""
    for prefix in (prefix for _, prefix in data.datasets if not Path(f"{prefix}.bin").is_file()):
        logger.info("%s is missing: it is made of the sources of Python's standard library", prefix)
        prepare(Source("stdlib"), Path(prefix), data.tokenizer, data.tokenizer_path)


_MIN_BYTES, _MAX_BYTES, _SHARDS = 2**22, 2**28, 512
_MAX_NOTE_BYTES = 2**26
_POLL_S = 0.2

Shard = tuple[Piece, ...]


@dataclass(frozen=True)
class Recipe:
    """How a process makes documents of files."""

    library: str  # as for `build_tokenizer`
    tokenizer_path: str | None = None
    is_chat: bool = False  # lines and rows are conversations
    chat_template: str | None = None  # a file; None for the tokenizer's own
    text_key: str = "text"

    def maker(self, tokenizer: Any) -> Callable[[Piece], Iterator[Document]]:
        """Return a function that yields the documents of a part of a file."""
        encode, eod, key = encoder(tokenizer), tokenizer.eod, self.text_key
        if self.is_chat:
            return partial(conversations, chat=chat_of(self.chat_template, tokenizer), encode=encode)

        def documents(piece: Piece) -> Iterator[Document]:
            rows = has_rows(piece.path)
            for text in parsed(piece, partial(_text, key=key), {key}) if rows else [read_text(piece.path)]:
                if text:
                    yield [*encode(text), eod], None

        return documents


def write_sharded(paths: Sequence[Path], recipe: Recipe, tokenizer: Any, out: Path, workers: int) -> Corpus:
    """Write the documents of files, in their order, as a dataset; what an earlier call has finished is kept.

    A shard has its place in `<out>.shards` once it is complete, and is made again if its files, their times, the recipe
    or the tokenizer have changed. The dataset depends neither on the number of processes nor on shards. Refuse files
    that cannot be read, and a dataset that another process writes. Raises JobFailed: a process was killed.
    """
    sizes = [path.stat() for path in paths]
    most = min(max(_MIN_BYTES, 1 << (sum(size.st_size for size in sizes) // _SHARDS).bit_length()), _MAX_BYTES)
    shards = _shards(paths, most)
    recipe.maker(tokenizer)  # refuses a template that cannot be used
    file = recipe.chat_template
    template = None if not recipe.is_chat else template_of(tokenizer) if file is None else Path(file).read_text()
    made_of = json.dumps([asdict(recipe), tokenizer_digest(tokenizer), template])
    times = dict(zip(paths, (size.st_mtime_ns for size in sizes), strict=True))
    notes = [json.dumps([made_of, [(str(p.path.absolute()), times[p.path], *p[1:]) for p in s]]) for s in shards]
    folder = Path(f"{out}.shards")
    with _folder(folder, out):
        places = [folder / f"{number:06d}" for number in range(len(shards))]
        left = [at for at, place in enumerate(places) if _counts(place, notes[at]) is None]
        if len(left) < len(shards):
            logger.info("%s: %d of %d shards are there already", folder, len(shards) - len(left), len(shards))
        total = [sum(piece.size for piece in shards[at]) / 1e6 for at in left]
        jobs = [(places[at], shards[at], notes[at]) for at in left]
        with Progress("tokenizing", sum(total), "MB") as progress:
            for number in _made(jobs, recipe, tokenizer, min(workers, len(jobs))):
                progress.advance(total[number])
        counts = {place: _counts(place, note) or Counts() for place, note in zip(places, notes, strict=True)}
        with Progress(f"joining {len(shards)} shards"):
            corpus = join_shards(counts, out, tokenizer, recipe.is_chat)
        shutil.rmtree(folder)
    return corpus


def _shards(paths: Sequence[Path], most: int) -> list[Shard]:
    """Divide files into shards of at most about `most` bytes, in order."""
    shards: list[list[Piece]] = []
    room = 0
    for piece in chain.from_iterable(pieces(path, most) for path in paths):
        if not shards or piece.size > room:
            shards.append([])
            room = most
        shards[-1].append(piece)
        room -= piece.size
    return [tuple(shard) for shard in shards]


@contextmanager
def _folder(folder: Path, out: Path) -> Iterator[None]:
    """Make the folder of the shards and lock it. If nothing was finished when the context fails, it is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise refuse("--out", out, "a dataset that no other command writes", "Wait, or give another name.") from None
    try:
        yield
    except BaseException:
        if finished := len(list(folder.glob("*.json"))):
            logger.warning("%s keeps %d finished shards: the same command goes on from there", folder, finished)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _made(jobs: Sequence[tuple[Path, Shard, str]], recipe: Recipe, tokenizer: Any, workers: int) -> Iterator[int]:
    """Make shards, each with its place and note, and yield the number of every job that is done."""
    if workers < 2:
        make = recipe.maker(tokenizer) if jobs else None
        for number, job in enumerate(jobs):
            _make(*job, make, tokenizer, recipe.is_chat)
            yield number
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    taken = context.Value("q", 0)
    processes = RankProcesses(_worker, (jobs, recipe, taken), range(workers), "forkserver", daemon=True)
    left = dict(enumerate(jobs))
    try:
        while left:
            ended = processes.wait(_POLL_S)
            for number in [at for at in left if at < taken.value and _note(left[at][0]).exists()]:
                del left[number]
                yield number
            assert not (ended and left), "a worker ends when no job is left"
    except RankFailed as error:
        _, refused, message = error.summary.partition(" failed: ValueError: ")
        raise (ValueError(message) if refused else JobFailed(f"worker {error.summary.partition(' ')[2]}")) from None
    finally:
        processes.kill()


def _worker(_: int, jobs: Sequence[tuple[Path, Shard, str]], recipe: Recipe, taken: Any) -> None:
    exit_with_parent()
    tokenizer = build_tokenizer(recipe.library, recipe.tokenizer_path)
    make = recipe.maker(tokenizer)
    while True:
        with taken.get_lock():
            number: int = taken.value
            taken.value += 1
        if number >= len(jobs):
            return
        _make(*jobs[number], make, tokenizer, recipe.is_chat)


def _make(place: Path, shard: Shard, note: str, make: Any, tokenizer: Any, is_chat: bool) -> None:
    counts = write_shard(chain.from_iterable(map(make, shard)), place, tokenizer, is_chat)
    files.write_text(_note(place), json.dumps({"note": note, "counts": counts, "sizes": _sizes(place)}))


def _note(place: Path) -> Path:
    return place.with_suffix(".json")


def _sizes(place: Path) -> dict[str, int]:
    found = sorted(place.parent.glob(f"{place.name}.*"))
    return {path.name: path.stat().st_size for path in found if path.suffix in (".bin", ".idx")}


def _counts(place: Path, note: str) -> Counts | None:
    """Return what a complete shard has; None if there is none, or one of other files. Its note is removed then."""
    path = _note(place)
    try:
        found = json.loads(files.read_bytes(path, _MAX_NOTE_BYTES))
        if found["note"] == note and found["sizes"] == _sizes(place):
            return Counts(*found["counts"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass  # none, or cut short
    path.unlink(missing_ok=True)
    return None


def _text(row: Row, key: str) -> str:
    """Return the text of a line or row."""
    try:
        found = content(row)
        if not isinstance(found, dict) or key in found:
            found[key].encode()  # refuses half of a surrogate pair
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ValueError(f'expected {{"{key}": "…"}} in UTF-8. Fix or remove the line.') from None
    if key not in found:
        others = "`messages`, or `prompt` and `completion`, from the first line on"
        keys = shown(", ".join(map(str, found)) or "no key")
        raise ValueError(f"expected `{key}` (or {others}); it has {keys}. Rename the key, or name it by --text-key.")
    if not found[key]:
        raise ValueError("expected a text that is not empty. Fix or remove the line.")
    return str(found[key])
