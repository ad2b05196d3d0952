"""The base class of modes: a small frozen dataclass whose fields are options and whose `plan` is a pure function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import ClassVar

from ...errors import refuse
from ...layout import LAYOUTS
from ..mask import Mask
from ..plan import Links, Plan
from ..visibility import Visibility

_MAX_MESSAGES = 1_200_000

MODES: dict[str, type[Mode]] = {}
"""All modes, keyed by name."""


@dataclass(frozen=True)
class ModeOptions:
    """The options of all modes, as a configuration gives them. Each mode uses those that it knows.

    max_buffer_tokens: see `AllGather`.
    inner_size: see `NodeMode` and `Usp`; None for a node of `cluster` if it is described and smaller than all ranks,
        otherwise for the largest proper divisor of their number up to 8.
    outer_schedule: see `Usp`. rounds: see `NodeGather`.
    cluster: how ranks are linked (`config.cluster.Cluster`); None for a full mesh.
    """

    max_buffer_tokens: int | None = None
    inner_size: int | None = None
    outer_schedule: str = "zigzag"
    cluster: Links | None = None
    rounds: int | None = None

    def resolve_inner_size(self, n: int) -> int:
        """Return `inner_size`, or the default for `n` ranks."""
        if self.inner_size is not None:
            return self.inner_size
        if self.cluster is not None and self.cluster.ranks_per_node < n:
            return self.cluster.ranks_per_node
        return max((k for k in range(1, min(n, 9)) if n % k == 0 and k < n), default=1)


@dataclass(frozen=True)
class SearchContext:
    """The problem for which modes propose candidates: `n` ranks of a cluster, and tokens.

    options: the configured options. bounded_memory: whether memory is bounded.
    """

    n: int
    length: int
    cluster: Links
    options: ModeOptions = field(default_factory=ModeOptions)
    bounded_memory: bool = False


@dataclass(frozen=True)
class Mode(ABC):
    """A mode with its options. Subclasses are frozen dataclasses; those with a `name` are registered in `MODES`.

    layout: the layout that balances one document. packed_layout: the layout for several documents.
    takes_any_layout: False if the plan requires the mode's own layout.
    splits_heads: whether ranks share the attention heads, so that the number of heads must fit the ranks.
    """

    name: ClassVar[str]
    layout: ClassVar[str]
    packed_layout: ClassVar[str] = "balanced"
    takes_any_layout: ClassVar[bool] = True
    splits_heads: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            MODES[cls.name] = cls

    @classmethod
    def from_options(cls, options: ModeOptions, n: int) -> Mode:
        """Return the mode for `n` ranks with the configured options."""
        return cls()

    @classmethod
    def candidates(cls, context: SearchContext) -> Iterator[Mode]:
        """Yield the variants that `auto` compares."""
        yield cls.from_options(context.options, context.n)

    @abstractmethod
    def plan(self, visible: Visibility) -> Plan:
        """Return the forward plan that attends to all visible pairs.

        Raises ValueError: numbers of ranks or tokens that the mode does not support.
        """

    def layout_of(self, mask: Mask, layout: str = "auto") -> str:
        """Return the name of the layout for a mask, which depends on the number of documents but not on windows.

        Raises ValueError: an unknown layout, or one that the mode does not support.
        """
        if layout not in (expected := ("auto", *LAYOUTS) if self.takes_any_layout else ("auto", self.layout)):
            remedy = f"Leave it at auto, or choose another schedule than {self.name}."
            raise refuse("layout", layout, "one of " + ", ".join(expected), remedy)
        if layout != "auto":
            return layout
        return self.packed_layout if self.takes_any_layout and len(mask.documents) > 1 else self.layout

    def num_messages(self, n: int, length: int) -> int:
        """Return about how many messages a plan has; the time and memory of planning are proportional to it."""
        return n * n

    def check_heads(self, n: int, num_heads: int, num_kv_heads: int) -> None:  # noqa: B027 (most modes refuse none)
        """Refuse heads (of one tensor-parallel rank) that `n` ranks cannot share, and name numbers that fit."""

    def __str__(self) -> str:
        """Return the name with the options that differ from their defaults."""
        values = [(each, getattr(self, each.name)) for each in fields(self) if each.repr]
        options = [f"{each.name}={value}" for each, value in values if value != each.default]
        return f"{self.name} ({', '.join(options)})" if options else self.name


@dataclass(frozen=True)
class NodeMode(Mode):
    """A mode of ranks in nodes. inner_size: the number of (neighbouring) ranks of a node."""

    inner_size: int = 1

    layout = "zigzag"

    @classmethod
    def from_options(cls, options: ModeOptions, n: int) -> Mode:
        return cls(options.resolve_inner_size(n))

    @classmethod
    def candidates(cls, context: SearchContext) -> Iterator[Mode]:
        sizes = {context.cluster.ranks_per_node, context.options.resolve_inner_size(context.n)} - {context.n}
        yield from (cls(k) for k in sorted(sizes) if context.n % k == 0)


def find_mode(schedule: str, n: int, options: ModeOptions) -> Mode:
    """Return the mode named `schedule` for `n` ranks; refuse unknown names, and options that the mode refuses."""
    if schedule not in MODES:
        raise refuse("schedule", schedule, "one of " + ", ".join(MODES), "Choose one of these.")
    return MODES[schedule].from_options(options, n)


def outer_modes() -> list[str]:
    """Return the modes that can run between groups of ranks.

    They do not share heads, and their layout gives a group adjacent tokens.
    """
    adjacent = ("contiguous", "zigzag")
    return [name for name, mode in MODES.items() if not mode.splits_heads and mode.layout in adjacent]


def check_messages(what: str, n: int, messages: int) -> None:
    """Raise ValueError for more than 1.2 million messages, whose simulation would take many minutes.

    A ring of 1,024 ranks has 1,048,576.
    """
    if messages > _MAX_MESSAGES:
        expected = f"a plan of at most {_MAX_MESSAGES:,} messages; that of {what} would have {messages:,}"
        remedy = "Choose zigzag or fewer ranks, or raise max_buffer_tokens where it is set."
        raise refuse("ranks", n, expected, remedy)


def check_divides(inner: int, n: int) -> None:
    """Raise ValueError, which names the divisors, for groups of `inner` ranks that do not divide `n` ranks."""
    if inner < 1 or n % inner:
        legal = ", ".join(str(k) for k in range(1, n + 1) if n % k == 0)
        raise refuse("inner_size", inner, f"a divisor of the {n} ranks", f"Choose one of {legal}.")


def check_shared_heads(sharing: int, num_heads: int, num_kv_heads: int, what: str, possible: Iterable[int]) -> None:
    """Raise ValueError, which names the nearest numbers of ranks that fit, for heads that `sharing` ranks cannot share.

    what: the mode and what to change. possible: the numbers of ranks to offer instead.
    """

    def fits(ranks: int) -> bool:
        return num_heads % ranks == 0 and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)

    if not fits(sharing):
        nearest = sorted((k for k in possible if fits(k)), key=lambda k: (abs(k - sharing), k))[:3]
        raise ValueError(
            f"{sharing} context-parallel ranks that share the heads ({what}): expected a divisor of the "
            f"{num_heads} query heads that divides the {num_kv_heads} key/value heads or is a multiple of them. "
            f"Nearest: {', '.join(map(str, nearest))}. Use as many, or choose a ring schedule."
        )
