"""What a mode is: a small frozen dataclass whose fields are its options, and whose `plan` is a pure function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import ClassVar

from ...errors import refuse
from ...layout import LAYOUTS
from ...topology import Cluster
from ..mask import Mask
from ..plan import Plan
from ..visibility import Visibility

_MOST_MESSAGES = 1_200_000
_OF_NEIGHBOURS = ("contiguous", "zigzag")

MODES: dict[str, type[Mode]] = {}
"""By name."""


@dataclass(frozen=True)
class ModeOptions:
    """What may be said of modes in a configuration; each takes what it has use for.

    max_buffer_tokens: see `AllGather`. inner_size: see `DoubleRing` and `Usp`; None for a node of `cluster` if it is
        described and smaller than all ranks, else for the largest proper divisor of their number up to 8.
    head_chunks: see `Ulysses`. outer_schedule: see `Usp`.
    cluster: the ranks' links, by which TASP chooses its rings; None for a full mesh.
    """

    max_buffer_tokens: int | None = None
    inner_size: int | None = None
    head_chunks: int = 1
    outer_schedule: str = "zigzag"
    cluster: Cluster | None = None

    def inner(self, n: int) -> int:
        """`inner_size`, decided."""
        if self.inner_size is not None:
            return self.inner_size
        if self.cluster is not None and self.cluster.ranks_per_node < n:
            return self.cluster.ranks_per_node
        return max((k for k in range(1, min(n, 9)) if n % k == 0 and k < n), default=1)


@dataclass(frozen=True)
class Choices:
    """What candidates are for: so many ranks of a cluster, heads of one rank, and what was said or measured of modes.

    bounded: whether memory is. measured: names of modes that a calibration has whole passes of.
    """

    n: int
    length: int
    num_kv_heads: int
    cluster: Cluster
    options: ModeOptions = field(default_factory=ModeOptions)
    bounded: bool = False
    measured: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Mode(ABC):
    """A mode with its options. Subclasses are frozen dataclasses; those that have a name are found by it.

    layout: the layout that its balance rests on, over one document. packed_layout: over several. takes_any_layout:
    False where the plan rests on its own. splits_heads: ranks share the attention heads, so their number has to fit
    them.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    splits_heads: ClassVar[bool] = False
    layout: ClassVar[str]
    packed_layout: ClassVar[str] = "balanced"
    takes_any_layout: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            MODES[cls.name] = cls

    @classmethod
    def of(cls, options: ModeOptions, n: int) -> Mode:
        """The mode as a configuration says."""
        del options, n
        return cls()

    @classmethod
    def candidates(cls, choices: Choices) -> Iterator[Mode]:
        """What `auto` considers."""
        yield cls.of(choices.options, choices.n)

    @abstractmethod
    def plan(self, seen: Visibility) -> Plan:
        """The forward plan of what is to be seen.

        Raises:
            ValueError: numbers of ranks or tokens that it cannot do.
        """

    def layout_of(self, mask: Mask, said: str = "auto") -> str:
        """The name of the layout for a mask. It goes by the number of documents, whatever the windows.

        Args:
            said: a layout, or auto.

        Raises:
            ValueError: an unknown layout, or one that the mode cannot take.
        """
        if said not in (expected := ("auto", *LAYOUTS) if self.takes_any_layout else ("auto", self.layout)):
            remedy = f"Leave it at auto, or choose another schedule than {self.name}."
            raise refuse("parallelism.layout", said, "one of " + ", ".join(expected), remedy)
        if said != "auto":
            return said
        return self.packed_layout if self.takes_any_layout and len(mask.documents) > 1 else self.layout

    def num_messages(self, n: int, length: int) -> int:
        """Roughly the messages of a plan, by which the time and memory that it takes to make it grow."""
        del length
        return n * n

    def check_heads(self, n: int, num_heads: int, num_kv_heads: int) -> None:  # noqa: B027 (most modes refuse none)
        """Refuse heads (of one tensor-parallel rank) that so many ranks cannot share.

        Raises:
            ValueError: names what would fit.
        """

    def __str__(self) -> str:
        """The name, and what sets it apart from others of its name."""
        said = [
            f"{each.name}={getattr(self, each.name)}"
            for each in fields(self)
            if each.repr and getattr(self, each.name) != each.default
        ]
        return f"{self.name} ({', '.join(said)})" if said else self.name


def find_mode(schedule: str, n: int, options: ModeOptions) -> Mode:
    """The mode of that name.

    Raises:
        ValueError: there is none, or it refuses its options.
    """
    if schedule not in MODES:
        raise refuse("parallelism.schedule", schedule, "one of " + ", ".join(MODES), "Choose one of these.")
    return MODES[schedule].of(options, n)


def outer_modes() -> list[str]:
    """Modes that can run between groups of ranks: they share no heads, and their layout gives a group neighbouring
    tokens."""
    return [name for name, mode in MODES.items() if not mode.splits_heads and mode.layout in _OF_NEIGHBOURS]


def check_messages(what: str, n: int, messages: int) -> None:
    """Refuse a plan that would take minutes to make.

    Raises:
        ValueError: it has more than 1.2 million messages; a ring of 1,024 ranks has 1,048,576.
    """
    if messages > _MOST_MESSAGES:
        expected = f"a plan of at most {_MOST_MESSAGES:,} messages; that of {what} would have {messages:,}"
        remedy = "Choose zigzag or fewer ranks, or raise parallelism.max_buffer_tokens where it is set."
        raise refuse("parallelism.context_parallel_size", n, expected, remedy)


def check_shared_heads(
    sharing: int, num_heads: int, num_kv_heads: int, what: str, possible: Iterator[int] | range
) -> None:
    """Refuse heads that `sharing` ranks cannot share.

    Args:
        what: the mode and what to change. possible: the numbers of ranks to offer instead.

    Raises:
        ValueError: names the nearest numbers that fit.
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
