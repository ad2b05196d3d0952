"""Peer memory: whether ranks can read each other's memory, and batches of flag operations."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_longctx.core.comm import symmetric
from megatron_longctx.core.comm.symmetric import FlagOperations


@pytest.mark.parametrize(
    ("machines", "devices", "unreadable", "reason"),
    [
        ("aa", (0, 1), (), None),
        ("aa", (0, 0), (), None),
        ("ab", (0, 0), (), "they are on several hosts"),
        ("aa", (0, None), (), "not all ranks have a CUDA device"),
        ("aa", (0, 1), (1,), "GPU 1 cannot read the memory of GPU 0"),
    ],
)
def test_why_ranks_cannot_read_each_others_memory(
    machines: str, devices: tuple[int | None, ...], unreadable: tuple[int, ...], reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`unreadable` GPUs cannot read others; every rank gets the same answer."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda mine, other: mine not in unreadable)
    ranks = list(zip(machines, devices, strict=True))
    for rank, (machine, device) in enumerate(ranks):
        monkeypatch.setattr(symmetric.dist, "get_rank", lambda _, rank=rank: rank)
        monkeypatch.setattr(symmetric.os, "uname", lambda machine=machine: SimpleNamespace(nodename=machine))

        def gathered(_: Any, value: Any) -> list[Any]:
            if isinstance(value, tuple):
                assert value in ranks
                return list(ranks)
            return [symmetric._unreadable(int(each or 0), [int(d or 0) for d in devices]) for each in devices]

        monkeypatch.setattr(symmetric, "gather_objects", gathered)
        where = torch.device("cpu") if device is None else torch.device("cuda", device)
        assert symmetric.why_no_peer_memory(None, where) == reason  # type: ignore[arg-type]


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
    monkeypatch.setattr(symmetric, "driver", lambda: driver)
    return driver


def test_all_flags_are_awaited_before_any_is_cleared(driver: Driver) -> None:
    FlagOperations.wait_and_clear([8, 16]).issue(Stream())
    assert driver.calls == [[(1, 8, 1, 1), (1, 16, 1, 1), (2, 8, 0, 0), (2, 16, 0, 0)]]
    FlagOperations.set([24]).issue(Stream())
    assert driver.calls[1] == [(2, 24, 1, 0)]
    FlagOperations.set([]).issue(Stream())
    assert len(driver.calls) == 2, "no call without operations"
    FlagOperations.set([24]).then(FlagOperations.wait_and_clear([8])).issue(Stream())
    assert driver.calls[2:] == [[(2, 24, 1, 0), (1, 8, 1, 1), (2, 8, 0, 0)]], "in order, in one call"


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
