"""Work that may fail on one rank alone: all ranks learn of it and raise, so that none waits for one that gave up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from .collect import from_all

T = TypeVar("T")


class PeerMemoryError(RuntimeError):
    """Peer memory cannot be set up, or can no longer be used."""


def all_or_none(group: dist.ProcessGroup, work: Callable[[], T], what: str, remedy: str) -> T:
    """What `work` returns, if it succeeds on every rank of `group`. Collective, and a barrier.

    Args:
        what: what `work` does, for the error: "... failed on rank 3: ...".
        remedy: what to do about it, a sentence.

    Raises:
        PeerMemoryError: it failed on some rank; raised on all of them, in the same words.
    """
    found, failed = None, None
    try:
        found = work()
    except Exception as error:  # whatever it is, the other ranks have to know
        failed = f"{type(error).__name__}: {error}".split("\n", 1)[0]
    said = from_all(group, failed)
    ranks = [rank for rank, reason in enumerate(said) if reason is not None]
    if ranks:
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        raise PeerMemoryError(f"{what} failed on {named} of the group's {len(said)}: {said[ranks[0]]}. {remedy}")
    return found  # type: ignore[return-value]
