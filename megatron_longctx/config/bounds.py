"""The allowed values of configuration keys, declared beside each key and checked here for all of them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Collection
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, get_args, get_type_hints

from ..core.errors import is_line, refuse

_BOUNDS = "bounds"
# Names that users of other systems try. The error message suggests ours.
_ALIASES = {"allgather": "all_gather", "all-gather": "all_gather", "p2p": "ring", "head_tail": "zigzag"}
TYPE_NAMES: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
TYPE_NAMES |= {dict: "an object", list: "a list"}  # in JSON


@dataclass(frozen=True)
class Number:
    """A range of finite numbers. `above` excludes the minimum, `below` the maximum."""

    minimum: float
    maximum: float
    above: bool = False
    below: bool = False

    @property
    def expected(self) -> str:
        lower = f"{'more than' if self.above else 'at least'} {_figure(self.minimum)}"
        return f"{lower} and {'less than' if self.below else 'at most'} {_figure(self.maximum)}"

    def accepts(self, value: float) -> bool:
        above_minimum = value > self.minimum if self.above else value >= self.minimum
        return above_minimum and (value < self.maximum if self.below else value <= self.maximum)


@dataclass(frozen=True)
class Choice:
    """A set of values: `also`, and `options`, which may grow after the declaration (modes register themselves)."""

    options: Collection[Any]
    also: tuple[Any, ...] = ()

    @property
    def all(self) -> tuple[Any, ...]:
        return (*self.also, *self.options)

    @property
    def expected(self) -> str:
        return "one of " + ", ".join(map(str, self.all))

    def accepts(self, value: Any) -> bool:
        return value in self.all


@dataclass(frozen=True)
class Text:
    """One line of text that fully matches `pattern`, of at most `max_bytes` bytes, `max_part_bytes` between slashes."""

    expected: str
    max_bytes: int
    pattern: str = r".+"
    max_part_bytes: int = 10**6  # file systems bound the names of files
    example: str = "NAME"

    def accepts(self, value: str) -> bool:
        return (
            is_line(value)
            and "${" not in value  # an interpolation, which would be resolved when a run's folder is read
            and len(value.encode()) <= self.max_bytes
            and re.fullmatch(self.pattern, value) is not None
            and all(len(part.encode()) <= self.max_part_bytes for part in value.split("/"))
        )


Bounds = Number | Choice | Text


# These return `Any`, as `dataclasses.field` does, so that fields keep their own types.
def number(default: float | None, minimum: float, maximum: float, *, above: bool = False, below: bool = False) -> Any:
    """Declare a number between `minimum` and `maximum`; `above` and `below` exclude these themselves."""
    return field(default=default, metadata={_BOUNDS: Number(minimum, maximum, above, below)})


def choice(default: Any, options: Collection[Any], *also: Any) -> Any:
    """Declare a value among `options` or `also`."""
    return field(default=default, metadata={_BOUNDS: Choice(options, also)})


def text(
    default: str | None, expected: str | None = None, pattern: str = r".+", max_bytes: int = 200, example: str = "NAME"
) -> Any:
    """Declare a line of text that fully matches `pattern`; `expected` describes it in error messages."""
    bounds = Text(expected or f"a line of text, 1 to {max_bytes} bytes", max_bytes, pattern, example=example)
    return field(default=default, metadata={_BOUNDS: bounds})


def path(default: str | None) -> Any:
    """Declare the path of a file or folder, which need not exist."""
    expected = "a path of at most 4000 bytes, and of 240 between slashes"
    return field(default=default, metadata={_BOUNDS: Text(expected, 4000, max_part_bytes=240)})


class Switches:
    """A part of the configuration with keys that may be `true` or `false`, or words such as `auto`."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            if isinstance(bounds := item.metadata.get(_BOUNDS), Choice) and "true" in bounds.all:
                # OmegaConf converts the truth value of YAML to the text `True`.
                object.__setattr__(self, item.name, str(getattr(self, item.name)).lower())


class Key(NamedTuple):
    """A key of the configuration under its full name. Only truth values have no bounds."""

    name: str
    kind: type
    nullable: bool
    default: Any
    bounds: Bounds | None

    @property
    def type_name(self) -> str:
        return TYPE_NAMES[self.kind] + (" or null" if self.nullable else "")

    @property
    def default_text(self) -> str:
        """The default as a user writes it."""
        if self.default is None:
            return "null"
        return str(self.default).lower() if self.kind is bool else str(self.default)

    @property
    def may_be(self) -> str:
        """The allowed values in words."""
        return (self.bounds.expected if self.bounds else "true or false") + (", or null" if self.nullable else "")

    @property
    def example(self) -> object:
        """An allowed value other than null, as a user writes it."""
        if self.default is None:
            if isinstance(self.bounds, Choice):
                return self.bounds.all[0]
            assert self.bounds is not None, "truth values have a default"
            return max(1, self.bounds.minimum) if isinstance(self.bounds, Number) else self.bounds.example
        return str(self.default).lower() if self.kind is bool else self.default


@functools.cache
def keys_of(cls: Any, prefix: str = "") -> dict[str, Key]:
    """Return the keys of a dataclass and of those inside it, by full name. Raises TypeError: a key has no bounds."""
    keys: dict[str, Key] = {}
    types = get_type_hints(cls)
    for item in fields(cls):
        name, declared = prefix + item.name, types[item.name]
        options = get_args(declared) or (declared,)
        kind = next(option for option in options if option is not type(None))
        if is_dataclass(kind):
            keys |= keys_of(declared, f"{name}.")
            continue
        bounds = item.metadata.get(_BOUNDS)
        if bounds is None and kind is not bool:
            raise TypeError(f"{name} has no bounds: declare it by number, choice, text or path")
        keys[name] = Key(name, kind, type(None) in options, item.default, bounds)
    return keys


def has_type(value: Any, kind: type) -> bool:
    """Whether `value` is of the type `kind`. Integers are numbers, but truth values are not."""
    return isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) is (kind is bool)


def check(key: Key, value: Any) -> None:
    """Refuse a value of another type than the key's, or outside its bounds."""
    if value is None and key.nullable:
        return
    if not has_type(value, key.kind):
        raise refuse(key.name, value, key.type_name, f"For example {key.name}={key.example}.")
    if key.bounds is None or key.bounds.accepts(value):
        return
    remedy = f"{'null' if key.default is None else key.default} is the default."
    if isinstance(key.bounds, Choice):
        alias = _ALIASES.get(str(value))
        known = alias in key.bounds.all
        remedy = f"Did you mean {key.name}={alias}?" if known else f"Set {key.name} to one of these."
    raise refuse(key.name, value, ("null or " if key.nullable else "") + key.bounds.expected, remedy)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if 1 <= abs(value) < 1e15 else f"{value:g}"


_FIELD = re.compile(r"    (\w+): [^=]+ = ")


def comments(cls: Any) -> dict[str, str]:
    """Return the comments beside or above the fields of a dataclass, keyed by field."""
    by_field: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        if line.startswith("    # "):
            above.append(line.strip("# "))
            continue
        if (field := _FIELD.match(line)) is not None:
            beside = line.partition("  # ")[2]
            by_field[field[1]] = " ".join([*above, *([beside] if beside else [])]).removeprefix("... ")
        above = []
    return by_field


def meanings(cls: Any, prefix: str = "") -> dict[str, str]:
    """Return the meanings of all keys, by their full names."""
    by_key: dict[str, str] = {}
    types = get_type_hints(cls)
    by_field = {name: text for base in reversed(cls.__mro__[:-1]) for name, text in comments(base).items() if text}
    for each in fields(cls):
        if is_dataclass(types[each.name]):
            by_key |= meanings(types[each.name], f"{prefix}{each.name}.")
        else:
            by_key[prefix + each.name] = by_field.get(each.name, "")
    return by_key
