"""Which ranks of a group can read each other's memory: those of one host, if its devices can."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import refuse
from .collect import from_all

RANKS_PER_HOST = "MEGATRON_LONGCTX_RANKS_PER_HOST"
"""Environment variable: every so many neighbouring ranks (of a process group, on one machine) count as a host of their
own. For machines whose GPUs are islands, and to try on one machine what several hosts would do."""


class _Fact(NamedTuple):
    """What a rank says of itself. per_host: its `RANKS_PER_HOST`, as it is; device: its CUDA device's index."""

    machine: str
    device: int | None
    per_host: str | None


@dataclass(frozen=True)
class Hosts:
    """Sets of ranks that can read each other's memory, in order; every rank is in one. reason: why it is not one set
    of all; None where it is."""

    sets: tuple[tuple[int, ...], ...]
    reason: str | None

    def of(self, rank: int) -> tuple[int, ...]:
        """The set that a rank is in."""
        return next(ranks for ranks in self.sets if rank in ranks)

    @property
    def any_peers(self) -> bool:
        return any(len(ranks) > 1 for ranks in self.sets)

    def __str__(self) -> str:
        return " | ".join(" ".join(map(str, ranks)) for ranks in self.sets)


def find_hosts(group: dist.ProcessGroup, device: torch.device) -> Hosts:
    """Who can read whose memory; alike on all ranks of `group`, which call this together.

    Raises:
        ValueError: `RANKS_PER_HOST` is not a number, or not the same on all ranks.
    """
    index = None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    facts: list[Any] = from_all(group, _Fact(os.uname().nodename, index, os.environ.get(RANKS_PER_HOST)))
    if any(fact.device is None for fact in facts):
        return Hosts(_alone(range(len(facts))), "not all ranks have a CUDA device")
    sets = by_host([fact.machine for fact in facts], ranks_per_host({fact.per_host for fact in facts}))
    mine = next(ranks for ranks in sets if dist.get_rank(group) in ranks)
    # What one process sees of the devices, another may not.
    return divided(sets, from_all(group, _unreadable(device, [facts[rank].device for rank in mine])))


def on_one_machine(group: dist.ProcessGroup, size: int) -> bool:
    """Whether every `size` neighbouring ranks are on one machine; alike on all ranks of `group`, which call this
    together."""
    machines: list[Any] = from_all(group, os.uname().nodename)
    return all(len(set(machines[i : i + size])) == 1 for i in range(0, len(machines), size))


def by_host(machines: Sequence[str], per_host: int | None) -> tuple[tuple[int, ...], ...]:
    """Ranks by the name of the machine that they are on, in parts of `per_host`."""
    ranks: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        ranks.setdefault(machine, []).append(rank)
    size = per_host or len(machines)
    return tuple(tuple(found[i : i + size]) for found in ranks.values() for i in range(0, len(found), size))


def divided(sets: Sequence[Sequence[int]], unreadable: Sequence[str | None]) -> Hosts:
    """Hosts, of which those fall into single ranks where one has a reason why it cannot read another's memory."""
    found: list[tuple[int, ...]] = []
    reason = "they are on several hosts" if len(sets) > 1 else None
    for ranks in sets:
        against = next((unreadable[rank] for rank in ranks if unreadable[rank] is not None), None)
        reason = against or reason
        found += [tuple(ranks)] if against is None else _alone(ranks)
    return Hosts(tuple(found), reason)


def _alone(ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple((rank,) for rank in ranks)


def ranks_per_host(said: set[str | None]) -> int | None:
    """What all ranks say of `RANKS_PER_HOST`, checked; None where it is not set.

    Raises:
        ValueError: not one number.
    """
    if said == {None}:
        return None
    value = min(map(str, said))
    if len(said) > 1 or not value.isdecimal() or int(value) < 1:
        raise refuse(RANKS_PER_HOST, ", ".join(sorted(map(str, said))), "one whole number, on all ranks", "Correct it.")
    return int(value)


def _unreadable(device: torch.device, indices: Sequence[int]) -> str | None:
    """Why this rank's device cannot read one of the others; None where nothing is known against it."""
    mine = torch.cuda.current_device() if device.index is None else device.index
    for index in indices:
        if index != mine and index < torch.cuda.device_count() and not torch.cuda.can_device_access_peer(mine, index):
            return f"GPU {mine} cannot read the memory of GPU {index}"
    return None
