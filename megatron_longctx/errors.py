"""How errors of users and failed jobs are reported: what was given, what is possible, and what to do."""

from __future__ import annotations

import unicodedata

_MOST_SHOWN = 300  # characters of a value, which may be a path


class JobFailed(RuntimeError):
    """A rank failed; the message is that rank's own."""


def refuse(key: str, value: object, expected: str, remedy: str) -> ValueError:
    """The one form of a configuration error, in a line: what was given, what is possible, what to do."""
    return ValueError(f"{key}={shown(value)}: expected {expected}. {remedy}")


def shown(value: object) -> str:
    """A value in an error: its beginning where it is long, in one line whatever it holds."""
    written = str(value)
    if not is_line(written):
        written = ascii(written)[1:-1]
    return written if len(written) <= _MOST_SHOWN else f"{written[:_MOST_SHOWN]}… ({len(written):,} characters)"


def is_line(value: str) -> bool:
    """Whether text can be written as UTF-8, into one line: without controls, surrogates and separators of lines."""
    return not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in value)
