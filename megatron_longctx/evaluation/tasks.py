"""The tasks: needles in a haystack, and those of RULER (https://github.com/NVIDIA/RULER) that need no download.

Definitions and wording are RULER's (`scripts/synthetic.yaml`): `niah_single` is its niah_single_1, `niah_multikey` its
niah_multikey_1. RULER's words come from a package and ours from lists of our own: scores compare with each other, and
only roughly with published ones.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi
from random import Random

from .haystack import Haystack
from .words import MOST_WORDS, some_words

_DEPTHS = tuple(i / 39 for i in range(40))  # where RULER puts needles
_COMMON_WORDS = 10


@dataclass(frozen=True)
class Draft:
    """A question about a text of any length.

    Attributes:
        text: all that the model reads before the answer, with so many units of filler.
        opening: of the answer, which is given to the model.
        answers: what it is to say, all of it.
        depth: of the one needle that is asked for, 0 to 1; None where there are several.
        least, most: units that the task makes sense with.
    """

    text: Callable[[int], str]
    opening: str
    answers: tuple[str, ...]
    depth: float | None = None
    least: int = 0
    most: int | None = None


@dataclass(frozen=True)
class Task:
    """draft: of a text of so many tokens, about this haystack, with this depth if the task is asked by depth.
    answer_tokens: that RULER lets a model say. by_depth: asked at every depth."""

    draft: Callable[[int, Haystack, float | None, Random], Draft]
    answer_tokens: int
    by_depth: bool = False


@dataclass(frozen=True)
class _Needles:
    """keys: hidden, `values` of each, of which `asked` are asked for."""

    keys: int = 1
    values: int = 1
    asked: int = 1

    def __call__(self, length: int, haystack: Haystack, depth: float | None, draw: Random) -> Draft:
        keys = some_words(self.keys, draw)
        numbers = [str(number) for number in draw.sample(range(10**6, 10**7), self.keys * self.values)]
        depths = draw.sample(_DEPTHS, len(numbers)) if depth is None else [depth]
        asked = draw.sample(range(self.keys), self.asked)
        named = [keys[i] for i in asked]
        query = ", ".join(named[:-1]) + f", and {named[-1]}" if len(named) > 1 else named[0]
        hidden = [
            (at, f"One of the special magic numbers for {keys[i // self.values]} is: {number}.")
            for i, (at, number) in enumerate(zip(depths, numbers, strict=True))
        ]
        answers = [number for i in asked for number in numbers[i * self.values : (i + 1) * self.values]]
        one = len(answers) == 1
        some, things, verb, all_ = ("A", "number", "is", "") if one else ("Some", "numbers", "are", " all")
        head = f"{some} special magic {things} {verb} hidden within the following text. Make sure to memorize it. "
        head += f"I will quiz you about the {things} afterwards.\n"
        asks = f"special magic {things} for {query} mentioned in the provided text"
        return Draft(
            lambda units: f"{head}{haystack.text(units, hidden)}\nWhat {verb}{all_} the {asks}?",
            f" The {asks} {verb}",
            tuple(answers),
            depths[asked[0]] if one else None,
        )


def _variable_tracking(length: int, haystack: Haystack, depth: float | None, draw: Random) -> Draft:
    """A chain of assignments; one example is shown first."""
    noise = Haystack.noise()
    shown = _Chain(3, draw)
    example = f"{shown.text(noise, 5 * len(noise.words))}{shown.opening}{' '.join(shown.names)}\n\n"
    chain = _Chain(5, draw)
    return Draft(lambda units: example + chain.text(noise, units), chain.opening, tuple(chain.names))


class _Chain:
    """Five variables, each assigned the one before, the first a number."""

    def __init__(self, letters: int, draw: Random) -> None:
        found: dict[str, None] = {}
        while len(found) < 5:
            found["".join(draw.choices(string.ascii_uppercase, k=letters))] = None
        self.names = list(found)
        self._value = draw.randint(10_000, 99_999)
        said = [f"VAR {self.names[0]} = {self._value}"]
        said += [f"VAR {name} = VAR {before}" for before, name in zip(self.names, self.names[1:], strict=False)]
        self._statements = list(zip(sorted(draw.sample(_DEPTHS, len(said))), said, strict=True))
        self.opening = " Answer: According to the chain(s) of variable assignment in the text above, "
        self.opening += f"{len(self.names)} variables are assigned the value {self._value}, they are: "

    def text(self, noise: Haystack, units: int) -> str:
        head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        asks = f"Question: Find all variables that are assigned the value {self._value} in the text above."
        return f"{head}{noise.text(units, self._statements)}\n{asks}"


def _common_words(length: int, haystack: Haystack, depth: float | None, draw: Random) -> Draft:
    """A numbered list in which ten words come more often; one example is shown first."""
    short = length < 4096
    opening = " Answer: The top 10 words that appear most often in the list are:"
    enough = length // 2 + 100  # a word and its number are two tokens at least
    words, order = some_words(min(enough, MOST_WORDS), draw), draw.getrandbits(64)
    shown, words = words[: 20 if short else 40], words[20 if short else 40 :]
    example = _word_list(shown, (3, 1) if short else (10, 3), order) + opening
    example += " " + _numbered(shown[:_COMMON_WORDS]) + "\n"
    times = (6, 1) if short else (30, 3)
    return Draft(
        lambda units: example + _word_list(words[: _COMMON_WORDS + units], times, order),
        opening,
        tuple(words[:_COMMON_WORDS]),
        most=len(words) - _COMMON_WORDS if enough > MOST_WORDS else None,
    )


def _word_list(words: Sequence[str], times: tuple[int, int], order: int) -> str:
    """times: that each of the common words, which are the first, and of the others comes."""
    listed = [*words[:_COMMON_WORDS]] * times[0] + [*words[_COMMON_WORDS:]] * times[1]
    Random(order).shuffle(listed)
    head = "Below is a numbered list of words. In these words, some appear more often than others. "
    head += "Memorize the ones that appear most often.\n"
    return f"{head}{_numbered(listed)}\nQuestion: What are the 10 most common words in the above list?"


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


def _frequent_words(length: int, haystack: Haystack, depth: float | None, draw: Random) -> Draft:
    """Coded words by a zeta distribution (alpha 2), of which the three most frequent after the dots are asked for."""
    found: dict[str, None] = {"...": None}
    while len(found) < max(length // 50, 6):
        found["".join(draw.choices(string.ascii_lowercase, k=6))] = None
    coded, order = list(found), draw.getrandbits(64)

    def counts(units: int) -> list[int]:
        return [int(units / k**2 * 6 / pi**2) for k in range(1, len(coded) + 1)]

    def text(units: int) -> str:
        listed = [word for word, count in zip(coded, counts(units), strict=True) for _ in range(count)]
        Random(order).shuffle(listed)
        head = "Read the following coded text and track the frequency of each coded word. "
        head += f"Find the three most frequently appeared coded words. {' '.join(listed)}\n"
        head += "Question: Do not provide any explanation. Please ignore the dots '....'. "
        return head + "What are the three most frequently appeared words in the above coded text?"

    opening = " Answer: According to the coded text above, the three most frequently appeared words are:"
    least = next(units for units in range(1000) if counts(units)[3] > counts(units)[4] > 0)
    return Draft(text, opening, tuple(coded[1:4]), least=least)


TASKS = {
    "needle": Task(_Needles(), 128, by_depth=True),
    "niah_single": Task(_Needles(), 128),
    "niah_multikey": Task(_Needles(keys=4), 128),
    "niah_multivalue": Task(_Needles(values=4), 128),
    "niah_multiquery": Task(_Needles(keys=4, asked=4), 128),
    "variable_tracking": Task(_variable_tracking, 30),
    "common_words": Task(_common_words, 120),
    "frequent_words": Task(_frequent_words, 50),
}
