"""What the value of a key may be: declared once, beside the key in `tree`, and checked here for all keys alike."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, Protocol, get_args, get_type_hints

from ..errors import is_line, refuse

_BOUNDS = "bounds"
# Names that users of other systems try; the message says what ours is called.
_ALIASES = {"allgather": "all_gather", "all-gather": "all_gather", "p2p": "ring", "head_tail": "zigzag"}
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


class Bounds(Protocol):
    """Which values of a key's type are right; expected: the same in words."""

    @property
    def expected(self) -> str: ...

    def holds(self, value: Any) -> bool: ...


@dataclass(frozen=True)
class Number:
    """From `least` to `most`; above, below: without these themselves. No number that is not finite is in any range."""

    least: float
    most: float
    above: bool = False
    below: bool = False

    @property
    def expected(self) -> str:
        lower = f"{'more than' if self.above else 'at least'} {_figure(self.least)}"
        return f"{lower} and {'less than' if self.below else 'at most'} {_figure(self.most)}"

    def holds(self, value: float) -> bool:
        over = value > self.least if self.above else value >= self.least
        return over and (value < self.most if self.below else value <= self.most)


@dataclass(frozen=True)
class Choice:
    """options: may grow after this is declared, as modes are added. also: what besides."""

    options: Collection[Any]
    also: tuple[Any, ...] = ()

    @property
    def all(self) -> tuple[Any, ...]:
        return (*self.also, *self.options)

    @property
    def expected(self) -> str:
        return "one of " + ", ".join(map(str, self.all))

    def holds(self, value: Any) -> bool:
        return value in self.all


@dataclass(frozen=True)
class Text:
    """Text of one line, and of all of `pattern`. part: most bytes between two slashes, which file systems bound."""

    expected: str
    most: int
    pattern: str = r".+"
    part: int | None = None

    def holds(self, value: str) -> bool:
        return (
            is_line(value)
            and "${" not in value  # which would be worked out when the value is read back from a run's folder
            and len(value.encode()) <= self.most
            and re.fullmatch(self.pattern, value) is not None
            and (self.part is None or all(len(part.encode()) <= self.part for part in value.split("/")))
        )


def number(
    default: float | None, least: float, most: float, *, above: bool = False, below: bool = False
) -> Any:  # as dataclasses.field: of the type of the field
    """A field whose value lies between `least` and `most`."""
    return field(default=default, metadata={_BOUNDS: Number(least, most, above, below)})


def choice(default: Any, options: Collection[Any], *also: Any) -> Any:
    """A field whose value is one of `options`, or of `also`."""
    return field(default=default, metadata={_BOUNDS: Choice(options, also)})


def text(default: str | None, expected: str | None = None, pattern: str = r".+", most: int = 200) -> Any:
    """A field that holds a line of text, of all of `pattern`, `most` bytes at most."""
    bounds = Text(expected or f"a line of text, 1 to {most} bytes", most, pattern)
    return field(default=default, metadata={_BOUNDS: bounds})


def folder_name(default: str) -> Any:
    """A field that names one folder inside another."""
    bounds = Text("a plain folder name of at most 200 bytes", 200, r"(?!\.{1,2}$)[^/]+")
    return field(default=default, metadata={_BOUNDS: bounds})


def path(default: str | None) -> Any:
    """A field that names a file or folder, which need not be there."""
    expected = "a path of at most 4000 bytes, and of 240 between slashes"
    return field(default=default, metadata={_BOUNDS: Text(expected, 4000, part=240)})


class Key(NamedTuple):
    """A key of the configuration. bounds: None for truth values, which have none."""

    name: str
    kind: type
    nullable: bool
    default: Any
    bounds: Bounds | None

    @property
    def type_in_words(self) -> str:
        return _KINDS[self.kind] + (" or null" if self.nullable else "")

    @property
    def example(self) -> object:
        """As a user writes it."""
        if self.default is None:
            if isinstance(self.bounds, Choice):
                return self.bounds.all[0]
            return max(1, self.bounds.least) if isinstance(self.bounds, Number) else "NAME"
        return str(self.default).lower() if self.kind is bool else self.default


@functools.cache
def keys_of(cls: Any) -> dict[str, tuple[Key, ...]]:
    """The keys of the configuration `cls`, by section.

    Raises:
        TypeError: one is declared without bounds.
    """
    return {section: tuple(_keys(section, part)) for section, part in get_type_hints(cls).items()}


def _keys(section: str, cls: Any) -> Iterator[Key]:
    types = get_type_hints(cls)
    for item in fields(cls):
        if is_dataclass(types[item.name]):
            yield from _keys(f"{section}.{item.name}", types[item.name])
            continue
        options = get_args(types[item.name]) or (types[item.name],)
        kind = next(option for option in options if option is not type(None))
        bounds = item.metadata.get(_BOUNDS)
        if bounds is None and kind is not bool:
            raise TypeError(f"{section}.{item.name} has no bounds: declare it by number, choice, text or path")
        yield Key(f"{section}.{item.name}", kind, type(None) in options, item.default, bounds)


def check(key: Key, value: Any) -> None:
    """Refuse what `key` cannot be.

    Raises:
        ValueError: names the key and value, what was expected and what to do.
    """
    if value is None and key.nullable:
        return
    right = (int, float) if key.kind is float else key.kind
    if not isinstance(value, right) or isinstance(value, bool) is not (key.kind is bool):
        raise refuse(key.name, value, key.type_in_words, f"For example {key.name}={key.example}.")
    if key.bounds is None or key.bounds.holds(value):
        return
    remedy = f"{'null' if key.default is None else key.default} is the default."
    if isinstance(key.bounds, Choice):
        hint = _ALIASES.get(str(value))
        known = hint in key.bounds.all
        remedy = f"Did you mean {key.name}={hint}?" if known else f"Set {key.name} to one of these."
    raise refuse(key.name, value, ("null or " if key.nullable else "") + key.bounds.expected, remedy)


def check_is(name: str, value: object, served: object, beside: str, remedy: str) -> None:
    """Refuse another value of the key `name` than the one that it can have `beside` others.

    Raises:
        ValueError: as `check`.
    """
    if value != served:
        expected = "null" if served is None else str(served).lower()
        raise refuse(name, value, f"{expected} {beside}", remedy)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if 1 <= abs(value) < 1e15 else f"{value:g}"
