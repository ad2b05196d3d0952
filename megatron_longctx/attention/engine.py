"""What passes run on, and what those of one kind share."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..comm import BufferPool, Transport, WaitClock
from ..kernels import AttentionKernel
from ..kernels.moves import Mover
from .outgoing import Routes
from .pack import Packer
from .post import Post
from .program import Program
from .shapes import Shapes


@dataclass
class PassKind:
    """What all passes of a program over inputs of the same shapes share; nothing here holds the program."""

    shapes: Shapes
    messages: Messages | None = None  # made when first needed
    mover: Mover = field(default_factory=Mover)


class Messages(NamedTuple):
    """How such passes hand over what they send."""

    post: Post
    packer: Packer
    routes: Routes


@dataclass(frozen=True)
class Engine:
    """What programs run on.

    transport: None for a group of one rank. graph_tokens: passes over at most so many tokens of every rank may be
    replayed from CUDA graphs. clock: measures the waiting for messages. kinds, replays: by program and shapes, once
    made.
    """

    kernel: AttentionKernel
    transport: Transport | None
    pool: BufferPool
    graph_tokens: int = 0
    clock: WaitClock | None = None
    kinds: WeakKeyDictionary[Program, dict[Hashable, PassKind]] = field(default_factory=WeakKeyDictionary)
    replays: dict[Hashable, tuple[Program, Any]] = field(default_factory=dict)
