"""Datasets made shard by shard, by several processes, so that a job that is cut goes on where it was."""

from __future__ import annotations

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

from ..config import files
from ..config.progress import Progress
from ..core.errors import JobFailed, refuse, shown
from ..mcore.corpus import Corpus, Counts, Document, join_shards, write_shard
from ..mcore.tokenizer import build_tokenizer, encoder, tokenizer_digest
from ..models.chat import template_of
from .conversations import chat_of, conversations
from .ranks import RankFailed, RankProcesses, exit_with_parent
from .text_files import Piece, Row, content, has_rows, parsed, pieces, read_text

logger = logging.getLogger(__name__)

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

    A shard has its place in `<out>.shards` once it is complete, and is made again if its files, their times, the
    recipe or the tokenizer have changed. The dataset depends neither on the number of processes nor on the shards.

    Raises:
        ValueError: a file cannot be read, or another process writes this dataset.
        JobFailed: a process was killed.
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
