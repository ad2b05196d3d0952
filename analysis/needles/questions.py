"""Questions of exact lengths: the longest text that leaves room for the answer within the given length.

The tasks are needles in a haystack, and those of RULER (https://github.com/NVIDIA/RULER) that need no download.

Definitions and wording are RULER's (`scripts/synthetic.yaml`): `niah_single` is its niah_single_1, `niah_multikey` its
niah_multikey_1. RULER takes its words from a package, and this module from its own lists: scores are comparable with
each other, and only roughly with published ones.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count, cycle, islice, pairwise
from math import pi
from operator import itemgetter
from os import cpu_count
from pathlib import Path
from random import Random
from statistics import fmean

from megatron_longctx.core.errors import refuse

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_DEPTHS = tuple(i / 39 for i in range(40))  # where RULER puts needles
_COMMON_WORDS = 10


@dataclass(frozen=True)
class Haystack:
    """Filler text of any length.

    Attributes:
        words: each with the space after it. The text repeats them.
        separator: what follows a statement.
    """

    words: tuple[str, ...]
    separator: str

    @classmethod
    def noise(cls) -> Haystack:
        """Return RULER's noise: five sentences, repeated."""
        return cls(tuple(re.findall(r"\S+\s", _NOISE)), "\n")

    @classmethod
    def essays(cls, folder: Path) -> Haystack:
        """Return the `.txt` files of a folder, joined in the order of their names, with single spaces.

        Raises:
            ValueError: no such files, or no text in them.
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
        """Return `num_words` words with statements hidden at their depths (0 to 1), each before a sentence."""
        placed = sorted(
            ((self._sentence_start(round(depth * num_words)), text) for depth, text in statements), key=itemgetter(0)
        )
        words, parts, done = islice(cycle(self.words), num_words), [], 0
        for start, text in placed:
            parts += [*islice(words, start - done), text, self.separator]
            done = start
        return "".join([*parts, *words]).rstrip()

    def _sentence_start(self, word: int) -> int:
        count = len(self.words)
        while word % count and not self.words[(word - 1) % count].rstrip().endswith((".", "?", "!")):
            word -= 1
        return word


@dataclass(frozen=True)
class Draft:
    """A question about a text of any length.

    Attributes:
        text: returns all that the model reads before the answer, with a number of units of filler.
        opening: the beginning of the answer, which the prompt contains.
        answers: all that the model must say.
        depth: where the needle is, 0 to 1; None if the question asks for several.
        least, most: limits on the units; `most` is None for no limit.
    """

    text: Callable[[int], str]
    opening: str
    answers: tuple[str, ...]
    depth: float | None = None
    least: int = 0
    most: int | None = None


@dataclass(frozen=True)
class Task:
    """A kind of question.

    Attributes:
        draft: returns a question for a length in tokens, a haystack, and a depth if the task uses depths.
        answer_tokens: RULER's limit on the answer.
        by_depth: whether there are questions for every depth.
    """

    draft: Callable[[int, Haystack, float | None, Random], Draft]
    answer_tokens: int
    by_depth: bool = False


def _random_words(number: int, rng: Random) -> list[str]:
    """Return different words such as `brave-river`, at most `_MAX_WORDS`."""
    places = rng.sample(range(_MAX_WORDS), number)
    return [f"{_ADJECTIVES[place % len(_ADJECTIVES)]}-{_NOUNS[place // len(_ADJECTIVES)]}" for place in places]


def _needles(
    length: int, haystack: Haystack, depth: float | None, rng: Random, keys: int = 1, values: int = 1, asked: int = 1
) -> Draft:
    """Hide `keys` keys with `values` numbers each, and ask for `asked` of the keys."""
    names = _random_words(keys, rng)
    numbers = [str(number) for number in rng.sample(range(10**6, 10**7), keys * values)]
    depths = rng.sample(_DEPTHS, len(numbers)) if depth is None else [depth]
    places = rng.sample(range(keys), asked)
    wanted = [names[i] for i in places]
    query = ", ".join(wanted[:-1]) + f", and {wanted[-1]}" if len(wanted) > 1 else wanted[0]
    hidden = [
        (at, f"One of the special magic numbers for {names[i // values]} is: {number}.")
        for i, (at, number) in enumerate(zip(depths, numbers, strict=True))
    ]
    answers = [number for i in places for number in numbers[i * values : (i + 1) * values]]
    one = len(answers) == 1
    some, things, verb, all_ = ("A", "number", "is", "") if one else ("Some", "numbers", "are", " all")
    head = f"{some} special magic {things} {verb} hidden within the following text. Make sure to memorize it. "
    head += f"I will quiz you about the {things} afterwards.\n"
    subject = f"special magic {things} for {query} mentioned in the provided text"
    return Draft(
        lambda units: f"{head}{haystack.text(units, hidden)}\nWhat {verb}{all_} the {subject}?",
        f" The {subject} {verb}",
        tuple(answers),
        depths[places[0]] if one else None,
    )


def _variable_tracking(length: int, haystack: Haystack, depth: float | None, rng: Random) -> Draft:
    """Ask for the variables of a chain of assignments, after one example."""
    noise = Haystack.noise()
    shown = _Chain(3, rng)
    example = f"{shown.text(noise, 5 * len(noise.words))}{shown.opening}{' '.join(shown.names)}\n\n"
    chain = _Chain(5, rng)
    return Draft(lambda units: example + chain.text(noise, units), chain.opening, tuple(chain.names))


class _Chain:
    """Five variables: the first has a number, and each of the others the value of the previous one."""

    def __init__(self, letters: int, rng: Random) -> None:
        names: dict[str, None] = {}
        while len(names) < 5:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        self.names = list(names)
        self._value = rng.randint(10_000, 99_999)
        statements = [f"VAR {self.names[0]} = {self._value}"]
        statements += [f"VAR {name} = VAR {previous}" for previous, name in pairwise(self.names)]
        self._statements = list(zip(sorted(rng.sample(_DEPTHS, len(statements))), statements, strict=True))
        self.opening = " Answer: According to the chain(s) of variable assignment in the text above, "
        self.opening += f"{len(self.names)} variables are assigned the value {self._value}, they are: "

    def text(self, noise: Haystack, units: int) -> str:
        head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        question = f"Question: Find all variables that are assigned the value {self._value} in the text above."
        return f"{head}{noise.text(units, self._statements)}\n{question}"


def _common_words(length: int, haystack: Haystack, depth: float | None, rng: Random) -> Draft:
    """Ask for the ten words that are more frequent in a numbered list, after one example."""
    short = length < 4096
    opening = " Answer: The top 10 words that appear most often in the list are:"
    enough = length // 2 + 100  # a word and its number are at least two tokens
    words, order = _random_words(min(enough, _MAX_WORDS), rng), rng.getrandbits(64)
    shown, words = words[: 20 if short else 40], words[20 if short else 40 :]
    example = _word_list(shown, (3, 1) if short else (10, 3), order) + opening
    example += " " + _numbered(shown[:_COMMON_WORDS]) + "\n"
    times = (6, 1) if short else (30, 3)
    return Draft(
        lambda units: example + _word_list(words[: _COMMON_WORDS + units], times, order),
        opening,
        tuple(words[:_COMMON_WORDS]),
        most=len(words) - _COMMON_WORDS if enough > _MAX_WORDS else None,
    )


def _word_list(words: Sequence[str], times: tuple[int, int], order: int) -> str:
    """Repeat the first ten words `times[0]` times and the others `times[1]` times."""
    repeated = [*words[:_COMMON_WORDS]] * times[0] + [*words[_COMMON_WORDS:]] * times[1]
    Random(order).shuffle(repeated)
    head = "Below is a numbered list of words. In these words, some appear more often than others. "
    head += "Memorize the ones that appear most often.\n"
    return f"{head}{_numbered(repeated)}\nQuestion: What are the 10 most common words in the above list?"


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


def _frequent_words(length: int, haystack: Haystack, depth: float | None, rng: Random) -> Draft:
    """Ask for the three most frequent words, after the dots, of a zeta distribution (alpha 2)."""
    words: dict[str, None] = {"...": None}
    while len(words) < max(length // 50, 6):
        words["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    coded, order = list(words), rng.getrandbits(64)

    def counts(units: int) -> list[int]:
        return [int(units / k**2 * 6 / pi**2) for k in range(1, len(coded) + 1)]

    def text(units: int) -> str:
        repeated = [word for word, count in zip(coded, counts(units), strict=True) for _ in range(count)]
        Random(order).shuffle(repeated)
        head = "Read the following coded text and track the frequency of each coded word. "
        head += f"Find the three most frequently appeared coded words. {' '.join(repeated)}\n"
        head += "Question: Do not provide any explanation. Please ignore the dots '....'. "
        return head + "What are the three most frequently appeared words in the above coded text?"

    opening = " Answer: According to the coded text above, the three most frequently appeared words are:"
    least = next(units for units in range(1000) if counts(units)[3] > counts(units)[4] > 0)
    return Draft(text, opening, tuple(coded[1:4]), least=least)


TASKS = {
    "needle": Task(_needles, 128, by_depth=True),
    "niah_single": Task(_needles, 128),
    "niah_multikey": Task(partial(_needles, keys=4), 128),
    "niah_multivalue": Task(partial(_needles, values=4), 128),
    "niah_multiquery": Task(partial(_needles, keys=4, asked=4), 128),
    "variable_tracking": Task(_variable_tracking, 30),
    "common_words": Task(_common_words, 120),
    "frequent_words": Task(_frequent_words, 50),
}

# Keys are an adjective and a noun, as in RULER.
_ADJECTIVES, _NOUNS = map(str.split, Path(__file__).with_name("words.txt").read_text().split("\n\n"))
_MAX_WORDS = len(_ADJECTIVES) * len(_NOUNS)

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


@dataclass(frozen=True)
class Score:
    """A model's answer to a question, and the share of the expected answers that it contains, 0 to 1."""

    question: Question
    answer: str
    share: float


def score(question: Question, answer: str) -> Score:
    """Score an answer as RULER's `string_match_all`: the share of expected answers that occur in it, in any case."""
    text = answer.lower()
    return Score(question, answer, fmean(expected.lower() in text for expected in question.answers))


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
