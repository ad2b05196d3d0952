"""Text without meaning for the question, of any length, with statements put where they are to be found."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle, islice
from operator import itemgetter
from pathlib import Path

from ..errors import refuse

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_ENDS = (".", "?", "!")


@dataclass(frozen=True)
class Haystack:
    """words: of the text, each with what separates it from the next; the text goes on with the first after the last."""

    words: tuple[str, ...]
    separator: str
    """After a statement."""

    @classmethod
    def noise(cls) -> Haystack:
        """RULER's noise: five sentences, repeated."""
        return cls(tuple(re.findall(r"\S+\s", _NOISE)), "\n")

    @classmethod
    def essays(cls, folder: Path) -> Haystack:
        """The `.txt` files of a folder by name, joined, with single spaces.

        Raises:
            ValueError: a folder without such files, or without text in them.
        """
        remedy = "Give a folder of .txt files, or leave it out for RULER's noise."
        paths = sorted(folder.glob("*.txt")) if folder.is_dir() else []
        if not paths:
            raise refuse("haystack", folder, "a folder with .txt files", remedy)
        words: list[str] = []
        for path in paths:
            try:
                words += path.read_text(encoding="utf-8").split()
            except UnicodeDecodeError as error:
                raise refuse("haystack", path, f"UTF-8 text ({error.reason})", "Convert the file.") from None
        if not words:
            raise refuse("haystack", folder, "text in its .txt files", remedy)
        return cls(tuple(f"{word} " for word in words), " ")

    def text(self, num_words: int, statements: Iterable[tuple[float, str]] = ()) -> str:
        """So many words, with every statement at its depth, 0 to 1, or where the sentence there begins."""
        placed = sorted(
            ((self._begin(round(depth * num_words)), said) for depth, said in statements), key=itemgetter(0)
        )
        words, parts, done = islice(cycle(self.words), num_words), [], 0
        for at, said in placed:
            parts += [*islice(words, at - done), said, self.separator]
            done = at
        return "".join([*parts, *words]).rstrip()

    def _begin(self, at: int) -> int:
        """Of the sentence that has the word `at`."""
        while at % len(self.words) and not self._ends(at - 1):
            at -= 1
        return at

    def _ends(self, at: int) -> bool:
        return self.words[at % len(self.words)].rstrip().endswith(_ENDS)
