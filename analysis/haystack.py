"""Texts with needles in them: filler, codes hidden in it, and questions for those codes.

A needle reads `#7KQZM `, a question for it `?7`, and its answer `KQZM`. One byte is one token.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass

FILLER = ("The grass is green. ", "The sky is blue. ", "The sun is yellow. ", "Here we go. ", "There and back again. ")
KEYS = string.digits
CODE = 4  # letters


@dataclass(frozen=True)
class Question:
    """length: in tokens, of text, question and answer. depth: of the needle in the text, 0 to 1."""

    length: int
    depth: float
    text: str
    question: str
    answer: str

    @property
    def prompt(self) -> str:
        return self.text + self.question


def needle(key: str, code: str) -> str:
    return f"#{key}{code} "


def asked(key: str) -> str:
    return f"?{key}"


def code_of(draw: random.Random, letters: str = string.ascii_uppercase) -> str:
    return "".join(draw.choices(letters, k=CODE))


def lesson(length: int, draw: random.Random) -> str:
    """`length` characters to learn from: needles, questions for any earlier one among them, and filler.

    Short and long ways from needle to question come in one text, many and few needles. In every second text all
    questions wait for a place in it, so that their needles have been named nowhere near. In every second text codes
    are of few letters, so that a letter does not tell which one comes after it.
    """
    filler = draw.uniform(0.0, 0.8)
    wait = draw.uniform(0.0, 0.9) * length if draw.random() < 0.5 else 0.0
    letters = "".join(draw.sample(string.ascii_uppercase, draw.choice((5, 26))))
    keys = draw.sample(KEYS, draw.randint(1, 6))
    codes: dict[str, str] = {}
    parts: list[str] = []
    size = 0
    while size < length:
        new = len(codes) < len(keys) and (not codes or draw.random() < 0.4)
        if draw.random() < filler or not (new or (codes and size >= wait)):
            part = draw.choice(FILLER)
        elif new:
            key = keys[len(codes)]
            codes[key] = code_of(draw, letters)
            part = needle(key, codes[key])
        else:
            # Else what was named last would mostly do.
            key = next(iter(codes)) if draw.random() < 0.5 else draw.choice(list(codes))
            codes[key] = codes.pop(key)
            part = f"{asked(key)}{codes[key]} "
        parts.append(part)
        size += len(part)
    return "".join(parts)[:length]


def lessons(length: int, count: int, seed: int) -> Iterator[str]:
    """`count` lessons of `length` tokens each."""
    draw = random.Random(seed)
    for _ in range(count):
        yield lesson(length, draw)


def question(length: int, depth: float, others: int, draw: random.Random) -> Question:
    """A text of filler with one needle at `depth` and `others` at random places, and the question for that one.

    Raises:
        ValueError: needles for which there is no room or no key.
    """
    most = len(KEYS) - 1
    if not 0 <= others <= most:
        raise ValueError(f"other needles: {others}, expected 0 to {most}, as keys are single digits. Ask for fewer.")
    keys = draw.sample(KEYS, others + 1)
    codes = [code_of(draw) for _ in keys]
    ask = asked(keys[0])
    space = length - len(ask) - CODE - sum(len(needle(key, code)) for key, code in zip(keys, codes, strict=True))
    if space < 0:
        raise ValueError(f"length {length}: expected {length - space} or more for {others + 1} needles. Raise it.")
    filler: list[str] = []
    while space > 0:
        filler.append(draw.choice(FILLER)[-space:])
        space -= len(filler[-1])
    filler.reverse()  # a sentence that had to be cut comes first
    places = [depth, *(draw.random() for _ in range(others))]
    parts: list[str] = []
    start = 0
    for i in sorted(range(others + 1), key=places.__getitem__):
        stop = round(places[i] * len(filler))
        parts += [*filler[start:stop], needle(keys[i], codes[i])]
        start = stop
    return Question(length, depth, "".join([*parts, *filler[start:]]), ask, codes[0])


def pieces(text: str, count: int, draw: random.Random) -> list[str]:
    """`text` cut at random into `count` parts, none of them empty."""
    cuts = sorted(draw.sample(range(1, len(text)), count - 1))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
