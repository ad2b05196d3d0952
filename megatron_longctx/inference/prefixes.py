"""Which of the sessions at hand begins as a prompt does, and how far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .session import Session

_STRETCH = 4096


class Prefix(NamedTuple):
    """The first `tokens` tokens of a prompt, cached by `session`."""

    session: Session
    tokens: int


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common from their beginning on."""
    most = min(len(one), len(other))
    for start in range(0, most, _STRETCH):
        stop = min(start + _STRETCH, most)
        if one[start:stop] != other[start:stop]:
            return next(i for i in range(start, stop) if one[i] != other[i])
    return most


def longest(prompt: list[int], sessions: Iterable[Session], chunk: int | None = None) -> Prefix | None:
    """The longest beginning of `prompt` that a session has cached; of equal ones that of the first session.

    The last token is left to compute: its logits are what a prompt is for.

    Args:
        chunk: reuse what is exact only, in whole chunks of so many tokens (`Session.exact_tokens`).
    """
    found: Prefix | None = None
    for session in sessions:
        most = min(session.cached_tokens if chunk is None else session.exact_tokens, len(prompt) - 1)
        most = usable(most, chunk)
        if most <= (found.tokens if found else 0):
            continue
        tokens = usable(min(most, common(prompt, session.tokens)), chunk)
        if tokens > (found.tokens if found else 0):
            found = Prefix(session, tokens)
    return found


def usable(tokens: int, chunk: int | None) -> int:
    """So many of `tokens` as are whole chunks."""
    return tokens // (chunk or 1) * (chunk or 1)
