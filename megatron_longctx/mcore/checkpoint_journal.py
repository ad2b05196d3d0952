"""What a process that was killed has written of a checkpoint's weights, so that the next one goes on behind it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

JOURNAL = "progress.jsonl"


class Journal:
    """Lines of JSON: what the weights are made of, then one for each parameter that is written, with its digest.

    It is locked as long as its process lives, so that nobody takes over what is still being written.

    Args:
        folder: to write into. It gets the journal, and what is taken over.
        others: folders that killed processes may have left; one with such weights is taken, and is then gone.
        weights: name of the folder of the weights in each of them.
        identity: what the weights are made of, without line breaks.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, folder: Path, others: Iterable[Path], weights: str, identity: str) -> None:
        self._identity, self._path = identity, folder / JOURNAL
        self._lines: list[str] = []
        for left in others:
            if (left / JOURNAL).is_file():
                self._stream = (left / JOURNAL).open("r+", encoding="utf-8")
                if self._lock() and self._stream.readline().rstrip("\n") == identity:
                    self._lines = self._stream.read().split("\n")
                    if (left / weights).is_dir():
                        (left / weights).rename(folder / weights)
                    (left / JOURNAL).rename(self._path)
                    shutil.rmtree(left)
                    return
                logger.warning("%s is of another source or other settings, or under way: beginning afresh", left)
                self._stream.close()
        self._stream = self._path.open("w", encoding="utf-8")
        self._lock()

    def kept(self, path: Path, names: Sequence[str]) -> list[tuple[int, int]]:
        """Where in their files the first of the parameters `names` begin and end, which are in `path` as they were
        written; all else in it goes."""
        found: list[tuple[int, int]] = []
        ends: dict[str, int] = {}
        for name, line in zip(names, self._lines, strict=False):
            try:
                written, file, begin, length, digest = json.loads(line)
                with (path / file).open("rb") as stream:
                    stream.seek(begin)
                    whole = hashlib.sha256(stream.read(length)).hexdigest() == digest
            except (OSError, ValueError):  # of the last line only a part may be there
                break
            if written != name or not whole:
                break
            found.append((begin, begin + length))
            ends[file] = begin + length
        for each in path.iterdir() if found else ():
            os.truncate(each, ends[each.name]) if each.name in ends else each.unlink()
        self._stream.seek(0)
        self._stream.truncate()
        self._stream.write("\n".join([self._identity, *self._lines[: len(found)], ""]))
        self._stream.flush()
        if self._lines:
            logger.info(
                "going on where another import was killed: %d of %d parameters are there", len(found), len(names)
            )
        return found

    def add(self, name: str, file: str, begin: int, content: bytes) -> None:
        """Note a parameter that lies in its file."""
        digest = hashlib.sha256(content).hexdigest()
        self._stream.write(json.dumps([name, file, begin, len(content), digest]) + "\n")
        self._stream.flush()

    def remove(self) -> None:
        """All is written."""
        self._path.unlink()
        self._stream.close()

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
