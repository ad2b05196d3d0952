"""Questions of exact lengths: the longest text that, with room for the answer, is not longer than asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from os import cpu_count
from random import Random

from ..errors import refuse
from .haystack import Haystack
from .tasks import TASKS, Draft

DEPTHS = tuple(i / 10 for i in range(11))


@dataclass(frozen=True)
class Question:
    """task, length, depth: asked for. prompt: all that the model is given, of `prompt_tokens`. answers: what it is to
    say, in at most `answer_tokens`, which `length` has room for."""

    task: str
    length: int
    depth: float | None
    prompt: str
    prompt_tokens: int
    answers: tuple[str, ...]
    answer_tokens: int


@dataclass(frozen=True)
class Form:
    """lay_out: of a text and the beginning of its answer, what the model is given. tokens: how many a text has."""

    tokens: Callable[[str], int]
    lay_out: Callable[[str, str], str] = str.__add__


def questions(
    names: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    haystack: Haystack,
    form: Form,
    depths: Sequence[float] = DEPTHS,
    seed: int = 0,
) -> Iterator[Question]:
    """`samples` questions for every task and length, and for every depth of tasks that are asked by depth.

    A question depends on the seed, its task, length, depth and number alone.

    Raises:
        ValueError: a length that has no room for a task, or more than it has words for.
    """

    def one(asked: tuple[str, int, float | None, int]) -> Question:
        name, length, depth, number = asked
        draw = Random(f"{seed} {name} {length} {depth} {number}")
        return _question(name, length, TASKS[name].draft(length, haystack, depth, draw), form)

    every = [
        (name, length, depth, number)
        for name in names
        for length in lengths
        for depth in (depths if TASKS[name].by_depth else (None,))
        for number in range(samples)
    ]
    # Nearly all of the time goes to tokenizers that let go of the interpreter: 96 questions of 64K tokens took 150 s.
    with ThreadPoolExecutor(cpu_count()) as pool:
        yield from pool.map(one, every)


def _question(name: str, length: int, draft: Draft, form: Form) -> Question:
    # Byte-level tokenizers need more than the tokens that RULER grants.
    room = max(TASKS[name].answer_tokens, 2 * form.tokens(", ".join(draft.answers)))

    @lru_cache(maxsize=2)
    def prompt(units: int) -> str:
        return form.lay_out(draft.text(units), draft.opening)

    def tokens(units: int) -> int:
        return form.tokens(prompt(units))

    if tokens(draft.least) > length - room:
        least = tokens(draft.least) + room
        raise refuse("lengths", length, f"at least {least} tokens for {name}", "Ask for longer texts, or other tasks.")
    if draft.most is not None and tokens(draft.most) <= length - room:
        most = tokens(draft.most) + room
        raise refuse("lengths", length, f"at most {most} tokens for {name}", "It has no more words: leave it out.")
    text = prompt(_most_units(tokens, length - room, draft.least))
    return Question(name, length, draft.depth, text, form.tokens(text), draft.answers, room)


def _most_units(tokens: Callable[[int], int], length: int, least: int) -> int:
    """The number of units, from `least` on, whose text has at most `length` tokens, while one more has too many.

    Tokens grow nearly in proportion to units: that takes a few texts, where halving would take one for every bit.
    """
    low, high = (least, tokens(least)), (least + 64, tokens(least + 64))
    while high[1] <= length:
        per_unit = (high[1] - low[1]) / (high[0] - low[0])
        more = int(1.01 * (length - high[1]) / max(per_unit, 0.01)) + 1
        low, high = high, (high[0] + more, tokens(high[0] + more))
    for turn in count():
        if high[0] - low[0] == 1:
            return low[0]
        share = (length - low[1] + 0.5) / (high[1] - low[1]) if turn % 4 < 3 else 0.5
        at = min(max(low[0] + round(share * (high[0] - low[0])), low[0] + 1), high[0] - 1)
        found = at, tokens(at)
        low, high = (found, high) if found[1] <= length else (low, found)
    raise AssertionError
