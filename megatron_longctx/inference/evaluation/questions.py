"""Questions of exact lengths: the longest text that leaves room for the answer within the given length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from os import cpu_count
from random import Random

from ...core.errors import refuse
from .tasks import TASKS, Draft, Haystack

DEPTHS = tuple(i / 10 for i in range(11))


@dataclass(frozen=True)
class Question:
    """A prompt and its expected answers.

    Attributes:
        length: the most tokens of prompt and answer together.
        depth: where the needle is in the text, 0 to 1; None if there are several.
        answers: all that the model must say, in at most `answer_tokens` tokens.
    """

    task: str
    length: int
    depth: float | None
    prompt: str
    prompt_tokens: int
    answers: tuple[str, ...]
    answer_tokens: int


def make_questions(
    names: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    haystack: Haystack,
    num_tokens: Callable[[str], int],
    depths: Sequence[float] = DEPTHS,
    seed: int = 0,
    prompt: Callable[[str, str], str] = str.__add__,
) -> Iterator[Question]:
    """Yield `samples` questions for every task and length, and for every depth if the task uses depths.

    A question depends only on the seed, its task, length, depth and number.

    Args:
        num_tokens: returns the number of tokens of a text.
        prompt: makes a prompt from a text and the beginning of its answer.

    Raises:
        ValueError: a length that is too short for a task, or longer than its words allow.
    """

    def make(key: tuple[str, int, float | None, int]) -> Question:
        name, length, depth, number = key
        rng = Random(f"{seed} {name} {length} {depth} {number}")
        return _question(name, length, TASKS[name].draft(length, haystack, depth, rng), num_tokens, prompt)

    keys = [
        (name, length, depth, number)
        for name in names
        for length in lengths
        for depth in (depths if TASKS[name].by_depth else (None,))
        for number in range(samples)
    ]
    # Tokenizers take nearly all of the time and release the GIL: 96 questions of 64K tokens took 150 s in one thread.
    with ThreadPoolExecutor(cpu_count()) as pool:
        yield from pool.map(make, keys)


def _question(
    name: str, length: int, draft: Draft, num_tokens: Callable[[str], int], prompt: Callable[[str, str], str]
) -> Question:
    # Byte-level tokenizers need more tokens for an answer than RULER allows.
    room = max(TASKS[name].answer_tokens, 2 * num_tokens(", ".join(draft.answers)))

    @lru_cache(maxsize=2)
    def text_of(units: int) -> str:
        return prompt(draft.text(units), draft.opening)

    def size(units: int) -> int:
        return num_tokens(text_of(units))

    if (least := size(draft.least) + room) > length:
        raise refuse("lengths", length, f"at least {least} tokens for {name}", "Ask for longer texts, or other tasks.")
    if draft.most is not None and (most := size(draft.most) + room) <= length:
        raise refuse("lengths", length, f"at most {most} tokens for {name}", "It has no more words: leave it out.")
    text = text_of(_most_units(size, length - room, draft.least))
    return Question(name, length, draft.depth, text, num_tokens(text), draft.answers, room)


def _most_units(num_tokens: Callable[[int], int], length: int, least: int) -> int:
    """Return the largest number of units, at least `least`, whose text has at most `length` tokens.

    Tokens are nearly proportional to units, so interpolation needs few texts; bisection would need one per bit.
    """
    low, high = (least, num_tokens(least)), (least + 64, num_tokens(least + 64))
    while high[1] <= length:
        per_unit = (high[1] - low[1]) / (high[0] - low[0])
        more = int(1.01 * (length - high[1]) / max(per_unit, 0.01)) + 1
        low, high = high, (high[0] + more, num_tokens(high[0] + more))
    for attempt in count():
        if high[0] - low[0] == 1:
            return low[0]
        share = (length - low[1] + 0.5) / (high[1] - low[1]) if attempt % 4 < 3 else 0.5
        units = min(max(low[0] + round(share * (high[0] - low[0])), low[0] + 1), high[0] - 1)
        middle = units, num_tokens(units)
        low, high = (middle, high) if middle[1] <= length else (low, middle)
    raise AssertionError
