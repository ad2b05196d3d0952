"""Errors of users and failed jobs: the value that was given, what is expected, and the remedy."""

import unicodedata

_MAX_SHOWN = 300  # characters of a value, which may be a path


class JobFailed(RuntimeError):
    """A rank failed; the message is that rank's."""


def refuse(name: str, value: object, expected: str, remedy: str) -> ValueError:
    """Return an error in its only form: one line with the value, what is expected and the remedy.

    name: the argument or key that has the value; the message begins with it, and the error has it as `argument`.
    """
    error = ValueError(f"{shown(name)}={shown(value)}: expected {expected}. {remedy}")
    error.argument = name  # type: ignore[attr-defined]
    return error


def nearest(value: int, step: int) -> str:
    """Return the positive multiples of `step` around a value that is none: `4 or 8`."""
    below = value // step * step
    return f"{below} or {below + step}" if below > 0 else str(step)


def shown(value: object) -> str:
    """Return `value` as it appears in an error: always one line, and truncated if it is long."""
    text = str(value)
    if not is_line(text):
        text = ascii(text)[1:-1]
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}… ({len(text):,} characters)"


def is_line(value: str) -> bool:
    """Whether text is one line that UTF-8 can encode: no control characters, surrogates or line separators."""
    return not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in value)
