"""Collectives on small values, most of them also without a group, and set-up by all ranks or none."""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

# torch 2.13 renamed these two, and warns if the old names are used.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class PeerMemoryError(RuntimeError):
    """Peer memory cannot be set up, or can no longer be used."""


def not_owned(group: dist.ProcessGroup) -> Callable[[], dist.ProcessGroup]:
    """Return what returns `group` and does not keep it alive, so its threads end with `destroy_process_group`.

    A thread of gloo that still frees a message while Python shuts down needs the interpreter, and aborts the process.
    """
    reference = weakref.ref(group)

    def get() -> dist.ProcessGroup:
        found = reference()
        if found is None:
            raise RuntimeError("the process group of this attention was destroyed: make another attention")
        return found

    return get


def all_reduce_sum(group: dist.ProcessGroup | None, values: Tensor) -> Tensor:
    """All-reduce `values` in place; without a group, return them unchanged."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, group=group)
    return values


def all_gather_rows(group: dist.ProcessGroup | None, values: Tensor) -> Tensor:
    """All-gather `values` `[s]`, of the same size on all ranks, to `[n, s]`; without a group, return `[1, s]`."""
    if group is None or dist.get_world_size(group) == 1:
        return values[None]
    n = dist.get_world_size(group)
    gathered = values.new_empty(n * values.numel())
    all_gather_single(gathered, values, group=group)
    return gathered.view(n, -1)


def all_to_all_rows(group: dist.ProcessGroup, rows: Tensor) -> Tensor:
    """Send row r of `rows` `[n, s]` to rank r, and return the received rows by rank."""
    received = rows.new_empty(rows.shape)
    dist.all_to_all_single(received, rows, group=group)
    return received


def on_rank_0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0, and return its result or raise its error on every rank. Collective.

    Raises:
        ValueError, OSError: as raised by `work`.
        RuntimeError: any other error of `work`.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except (ValueError, OSError) as error:
            outcome[1] = error
        except Exception as error:  # other exceptions may not survive pickling
            outcome[1] = RuntimeError(f"on rank 0: {error!r}")
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def gather_objects(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """All-gather an object: one per rank of `group`, or `[value]` without a group. The host waits."""
    if group is None:
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def all_or_none(group: dist.ProcessGroup, work: Callable[[], T], what: str, remedy: str) -> T:
    """Run `work` on every rank and return its result, or raise on all ranks if it failed on any. Collective.

    No rank is left waiting for one that failed.

    what: describes `work` in the error: "... failed on rank 3: ...".
    remedy: one sentence for the error.

    Raises PeerMemoryError: `work` failed on some rank; all ranks raise the same message.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # the other ranks must know of any failure
        failure = f"{type(error).__name__}: {error}".split("\n", 1)[0]
    failures = gather_objects(group, failure)
    ranks = [rank for rank, reason in enumerate(failures) if reason is not None]
    if ranks:
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        raise PeerMemoryError(
            f"{what} failed on {named} of the group's {len(failures)}: {failures[ranks[0]]}. {remedy}"
        )
    return result  # type: ignore[return-value]
