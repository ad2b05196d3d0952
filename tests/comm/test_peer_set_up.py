"""Peer memory is set up by all ranks or refused by all, in the same words; nobody is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.comm import PeerMemoryError, PeerTransport, peer, symmetric
from megatron_longctx.comm.collect import all_or_none
from megatron_longctx.comm.hosts import Hosts
from megatron_longctx.testing.distributed import run_distributed

CPU = torch.device("cpu")


class Memory:
    """Stands for torch's symmetric memory on a rank where it may fail. Meeting is a barrier: whoever comes alone waits
    until the group's time is out."""

    def __init__(self, limit: int = 2**62, meets: bool = True) -> None:
        self.limit, self.meets = limit, meets
        self.met = 0

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if size > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.\nand more lines")
        return torch.ones(min(size, 16), dtype=dtype, device=device)

    def rendezvous(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        self.met += 1
        if not self.meets:
            raise RuntimeError("handles could not be exchanged")
        return tensor


def _with(memory: Memory) -> None:
    symmetric.symmetric_memory = lambda: memory
    peer._stream = lambda device: None  # type: ignore[assignment, return-value]


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _error(work: Callable[[], Any]) -> str:
    try:
        return f"no error: {work()}"
    except PeerMemoryError as error:
        return str(error)


def _together(rank: int) -> list[Any]:
    def work() -> int:
        if rank == 1:
            raise MemoryError("all is full\nindeed")
        return rank

    said = _error(lambda: all_or_none(_world(), work, "packing", "Take less."))
    return [said, all_or_none(_world(), lambda: 10 * rank, "packing", "Take less.")]


def test_what_fails_on_one_rank_fails_on_all_and_work_goes_on() -> None:
    said = "packing failed on rank 1 of the group's 3: MemoryError: all is full. Take less."
    assert run_distributed(_together, 3) == [[said, 0], [said, 10], [said, 20]]


def _sharing(rank: int) -> list[Any]:
    found: list[Any] = []
    full = Memory(limit=100 if rank == 1 else 2**62)
    _with(full)
    found += [_error(lambda: symmetric.share(_world(), _world(), CPU, [50, 1000])), full.met]
    deaf = Memory(meets=rank != 0)
    _with(deaf)
    found.append(_error(lambda: symmetric.share(_world(), _world(), CPU, [50])))
    _with(Memory())
    handles = symmetric.share(_world(), _world(), CPU, [8, 4])
    found += [[handle.tolist() for handle in handles]]
    # A rank without peers takes part in the votes.
    alone = symmetric.share(_world(), None if rank == 0 else _world(), CPU, [8])
    return [*found, alone[0] is None]


def _growing(rank: int) -> list[Any]:
    _with(Memory(limit=2**30 if rank == 1 else 2**62))
    transport = PeerTransport(_world(), CPU, key="inference.transport")
    transport.provide(2**20, 1)
    found = [transport.generation]
    transport.provide(2**21, 1)
    found += [transport.generation]
    found += [_error(lambda: transport.provide(2**32, 1))]
    return [*found, _error(lambda: transport.provide(2**32, 1)), _error(lambda: transport.provide(8, 1))]


def _broken_off(rank: int) -> list[Any]:
    _with(Memory())
    transport = PeerTransport(_world(), CPU)
    if rank == 1:
        transport.break_off(ValueError("a kernel gave up\nwith details"))
        transport.break_off(ValueError("and again"))
    begun = _error(lambda: transport.provide(8, 1))
    return [begun, _error(lambda: transport.provide(2**24, 1))]


def _growing_ahead(rank: int) -> list[Any]:
    """How often memory was taken for passes that need 64 MiB more every time."""
    _with(Memory())
    transport = PeerTransport(_world(), CPU, growth=2.0)
    for number in range(1, 17):
        transport.provide(number * 2**26, 1)
    return [transport.generation]


def _growing_as_far_as_it_goes(rank: int) -> list[Any]:
    """Twice as much cannot be had on one rank; what a pass needs can."""
    _with(Memory(limit=3 * 2**26 if rank == 1 else 2**62))
    transport = PeerTransport(_world(), CPU, growth=2.0)
    found = []
    for needed in (2 * 2**26, 3 * 2**26, 3 * 2**26):
        transport.provide(needed, 1)
        found.append((transport._capacity // 2**26, transport.generation))
    return [*found, _error(lambda: transport.provide(4 * 2**26, 1))]


def _more_steps(rank: int) -> list[Any]:
    """Generations and flags after passes of so many steps."""
    _with(Memory())
    transport = PeerTransport(_world(), CPU)
    found = []
    for steps in (5, 64, 65, 128):
        transport.provide(8, steps)
        found.append((transport.generation, transport._steps, transport._capacity))
    return found


def _all(rank: int) -> dict[str, list[Any]]:
    found = {"sharing": _sharing(rank), "growing": _growing(rank), "broken off": _broken_off(rank)}
    found |= {"ahead": _growing_ahead(rank), "as far": _growing_as_far_as_it_goes(rank)}
    return {**found, "steps": _more_steps(rank)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[Any]]]:
    """What two ranks found, in one set of processes."""
    return run_distributed(_all, 2)


def test_ranks_meet_only_when_all_have_memory(ranks: list[dict[str, list[Any]]]) -> None:
    one, other = (found["sharing"] for found in ranks)
    assert one[:4] == other[:4]
    refused, met, unmet, zeroed = one[:4]
    assert "failed on rank 1 of the group's 2: OutOfMemoryError: CUDA out of memory" in refused and met == 0
    assert "attention.transport=p2p" in refused and "more lines" not in refused
    assert "failed on rank 0 of the group's 2: RuntimeError: handles could not be exchanged" in unmet
    assert zeroed == [[0] * 8, [0] * 4]
    assert (one[4], other[4]) == (True, False)


def test_memory_that_cannot_grow_is_refused_by_all_and_so_is_what_follows(ranks: list[dict[str, list[Any]]]) -> None:
    one, other = (found["growing"] for found in ranks)
    assert one == other and one[:2] == [1, 2]
    assert one[2].startswith("setting up peer memory (2 x 4.00 GiB on every rank) failed on rank 1 of the group's 2")
    assert all("broken off before" in said and "2 x 4.00 GiB" in said for said in one[3:])
    assert all("hoose inference.transport=p2p" in said for said in one[2:]), "the setting that it comes from"


def test_memory_may_grow_ahead_of_what_is_needed(ranks: list[dict[str, list[Any]]]) -> None:
    """64, 128, 256, 512 and 1024 MiB."""
    assert [found["ahead"] for found in ranks] == [[5], [5]]


def test_memory_grows_as_far_as_it_goes(ranks: list[dict[str, list[Any]]]) -> None:
    """128 MiB, then 192 where 256 cannot be had, and what cannot be had at all is refused."""
    for found in ranks:
        *grown, refused = found["as far"]
        assert grown == [(2, 2), (3, 3), (3, 3)]
        assert refused.startswith("setting up peer memory (2 x 0.25 GiB on every rank) failed on rank 1")


def test_memory_stays_where_it_is_for_a_few_more_steps(ranks: list[dict[str, list[Any]]]) -> None:
    first, grown = (1, 64, 2**20), (2, 128, 2**20)
    assert [found["steps"] for found in ranks] == [[first, first, grown, grown]] * 2


def test_what_torch_keeps_is_given_back_only_for_want_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**36))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    cuda = torch.device("cuda", 0)
    symmetric.make_room(cuda, 2**29)
    symmetric.make_room(CPU, 2**40)
    assert emptied == []
    symmetric.make_room(cuda, 2**30)
    assert emptied == [1]


def test_a_pass_broken_off_on_one_rank_is_the_last(ranks: list[dict[str, list[Any]]]) -> None:
    one, other = (found["broken off"] for found in ranks)
    assert one[0] == "no error: None"
    assert "broken off before (ValueError: a kernel gave up): ranks would wait" in other[0]
    assert one[1] == other[1] == other[0]


def _divided(rank: int) -> list[Any]:
    _with(Memory())
    hosts = Hosts(((0, 1), (2,)), "they are on several hosts")
    transport = PeerTransport(_world(), CPU, hosts)
    transport.provide(2**21, 1)
    sharing = transport._sharing
    return [transport.peers, sharing and dist.get_process_group_ranks(sharing), transport.generation]


def test_hosts_share_among_themselves_and_vote_together() -> None:
    found = run_distributed(_divided, 3)
    assert found == [[(0, 1), [0, 1], 2], [(0, 1), [0, 1], 2], [(2,), None, 2]]
