"""Errors of users and failed jobs: the value that was given, what is expected, and the remedy."""

from __future__ import annotations

import unicodedata

_MAX_SHOWN = 300  # characters of a value, which may be a path


class JobFailed(RuntimeError):
    """A rank failed; the message is that rank's."""


def refuse(key: str, value: object, expected: str, remedy: str) -> ValueError:
    """Return a configuration error in its only form: one line with the value, what is expected and the remedy."""
    return ValueError(f"{shown(key)}={shown(value)}: expected {expected}. {remedy}")


def shown(value: object) -> str:
    """Return `value` as it appears in an error: always one line, and truncated if it is long."""
    text = str(value)
    if not is_line(text):
        text = ascii(text)[1:-1]
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}… ({len(text):,} characters)"


def printable(text: str) -> str:
    """Return `text` for a terminal: control characters, which files may have, are escaped, except line breaks."""
    return "".join(letter if letter == "\n" or is_line(letter) else ascii(letter)[1:-1] for letter in text)


def is_line(value: str) -> bool:
    """Whether text is one line that UTF-8 can encode: no control characters, surrogates or line separators."""
    return not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in value)
