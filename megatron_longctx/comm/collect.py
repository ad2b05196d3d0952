"""What every rank has to know: small values, and whether work that may fail on one rank alone has failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class PeerMemoryError(RuntimeError):
    """Peer memory cannot be set up, or can no longer be used."""


def sum_over(group: dist.ProcessGroup | None, values: Tensor) -> Tensor:
    """The sum of every rank's `values`, in place; as they are where there is no group. Collective."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, group=group)
    return values


def gather_over(group: dist.ProcessGroup | None, values: Tensor) -> Tensor:
    """Every rank's `values` `[s]`, equally many, as `[n, s]`; `[1, s]` where there is no group. Collective."""
    if group is None or dist.get_world_size(group) == 1:
        return values[None]
    n = dist.get_world_size(group)
    gathered = values.new_empty(n * values.numel())
    dist.all_gather_into_tensor(gathered, values, group=group)
    return gathered.view(n, -1)


def from_first(group: dist.ProcessGroup | None, values: Tensor) -> Tensor:
    """The `values` of the group's first rank, in place. Collective."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.broadcast(values, group=group, group_src=0)
    return values


def from_rank_0(value: Any = None) -> Any:
    """What rank 0 gives, on every rank: what JSON can say, with lists for tuples. Collective; every rank waits for all.

    JSON, since a pickle runs whatever it is told to where it is read.
    """
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    said = json.dumps(value).encode() if dist.get_rank() == 0 else b""
    size = torch.tensor([len(said)], device=device)
    dist.all_reduce(size)
    data = torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else torch.empty(int(size), dtype=torch.uint8)
    data = data.to(device)
    dist.broadcast(data, src=0)
    return json.loads(data.cpu().numpy().tobytes())


def on_rank_0(work: Callable[[], T]) -> T:
    """What `work` gives on rank 0, or its failure, on every rank. Collective.

    Raises:
        ValueError, OSError: as `work` did.
        RuntimeError: `work` failed otherwise.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except (ValueError, OSError) as error:
            outcome[1] = error
        except Exception as error:  # only exceptions that survive pickling may travel
            outcome[1] = RuntimeError(f"on rank 0: {error!r}")
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def from_all(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """What every rank gives, by rank; its own alone where there is no group. Collective; the host waits."""
    if group is None:
        return [value]
    found: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def all_or_none(group: dist.ProcessGroup, work: Callable[[], T], what: str, remedy: str) -> T:
    """What `work` returns, if it succeeds on every rank of `group`: none waits for one that gave up. Collective.

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
