"""Peer memory: which ranks can read each other's memory, and batches of flag operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_longctx.core.comm import symmetric
from megatron_longctx.core.comm.symmetric import (
    RANKS_PER_HOST,
    FlagOperations,
    Hosts,
    group_by_host,
    isolate_unreadable,
    ranks_per_host,
)


@pytest.mark.parametrize(
    ("machines", "per_host", "expected"),
    [
        ("aaaa", None, ((0, 1, 2, 3),)),
        ("aabb", None, ((0, 1), (2, 3))),
        ("abab", None, ((0, 2), (1, 3))),
        ("aaab", None, ((0, 1, 2), (3,))),
        ("aaaa", 2, ((0, 1), (2, 3))),
        ("aaaa", 3, ((0, 1, 2), (3,))),
        ("aabb", 4, ((0, 1), (2, 3))),
        ("aaabbb", 2, ((0, 1), (2,), (3, 4), (5,))),
    ],
)
def test_hosts_are_machines_or_parts_of_them(
    machines: str, per_host: int | None, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert group_by_host(machines, per_host) == expected


def test_hosts_and_the_reason_why_there_are_several() -> None:
    assert isolate_unreadable([(0, 1)], [None, None]) == Hosts(((0, 1),), None)
    hosts = isolate_unreadable([(0, 2), (1, 3)], [None] * 4)
    assert hosts == Hosts(((0, 2), (1, 3)), "they are on several hosts") and hosts.has_peers
    assert [hosts.peers_of(rank) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert str(hosts) == "0 2 | 1 3"
    assert not isolate_unreadable([(0,), (1,)], [None, None]).has_peers


def test_a_gpu_that_cannot_read_leaves_its_host_without_peers() -> None:
    reason = "GPU 1 cannot read the memory of GPU 0"
    assert isolate_unreadable([(0, 1), (2, 3)], [None, reason, None, None]) == Hosts(((0,), (1,), (2, 3)), reason)
    assert not isolate_unreadable([(0, 1)], ["no", None]).has_peers


def test_ranks_per_host_is_the_same_number_on_all_ranks() -> None:
    assert ranks_per_host({None}) is None and ranks_per_host({"2"}) == 2
    for values in ({"0"}, {"two"}, {"-1"}, {"2", "4"}, {"2", None}):
        with pytest.raises(ValueError, match=RANKS_PER_HOST):
            ranks_per_host(values)


def test_the_allocator_cache_is_emptied_only_for_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**36))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    cuda = torch.device("cuda", 0)
    symmetric.free_cached_memory(cuda, 2**29)
    symmetric.free_cached_memory(torch.device("cpu"), 2**40)
    assert emptied == []
    symmetric.free_cached_memory(cuda, 2**30)
    assert emptied == [1]


class Driver:
    def __init__(self) -> None:
        self.code = 0
        self.calls: list[list[tuple[int, int, int, int]]] = []

    def cuStreamBatchMemOp_v2(self, stream: Any, count: Any, batch: Any, _: Any) -> int:
        assert stream.value == 77 and count.value == len(batch)
        self.calls.append([(op.operation, op.address, op.value, op.flags) for op in batch])
        return self.code


class Stream:
    cuda_stream = 77


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(symmetric, "_driver", lambda: driver)
    return driver


def test_all_flags_are_awaited_before_any_is_cleared(driver: Driver) -> None:
    FlagOperations.wait_and_clear([8, 16]).issue(Stream())
    assert driver.calls == [[(1, 8, 1, 1), (1, 16, 1, 1), (2, 8, 0, 0), (2, 16, 0, 0)]]
    FlagOperations.set([24]).issue(Stream())
    assert driver.calls[1] == [(2, 24, 1, 0)]
    FlagOperations.set([]).issue(Stream())
    assert len(driver.calls) == 2, "no call without operations"


def test_many_operations_are_issued_in_batches_that_the_driver_accepts(driver: Driver) -> None:
    addresses = [4 * i for i in range(300)]
    FlagOperations.wait_and_clear(addresses).issue(Stream())
    assert max(map(len, driver.calls)) < 256
    issued = [operation for call in driver.calls for operation in call]
    assert [op[1] for op in issued] == addresses * 2
    assert [op[0] for op in issued] == [1] * 300 + [2] * 300


def test_driver_errors_are_raised(driver: Driver) -> None:
    driver.code = 1
    with pytest.raises(RuntimeError, match="CUDA error 1 for 1 operations"):
        FlagOperations.set([8]).issue(Stream())
