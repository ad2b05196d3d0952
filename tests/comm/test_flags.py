"""Batches of flag operations: in order, and never more at once than the driver takes."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_longctx.comm import flags


class Driver:
    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[list[tuple[int, int, int, int]]] = []

    def cuStreamBatchMemOp_v2(self, stream: Any, count: Any, batch: Any, _: Any) -> int:
        assert stream.value == 77 and count.value == len(batch)
        self.calls.append([(op.operation, op.address, op.value, op.flags) for op in batch])
        return self.code


class Stream:
    cuda_stream = 77


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(flags, "_driver", lambda: made)
    return made


def test_flags_are_waited_for_before_any_is_cleared(driver: Driver) -> None:
    flags.FlagOperations.take([8, 16]).issue(Stream())
    assert driver.calls == [[(1, 8, 1, 1), (1, 16, 1, 1), (2, 8, 0, 0), (2, 16, 0, 0)]]
    flags.FlagOperations.set([24]).issue(Stream())
    assert driver.calls[1] == [(2, 24, 1, 0)]


def test_many_are_issued_in_batches_that_the_driver_takes(driver: Driver) -> None:
    addresses = [4 * i for i in range(300)]
    flags.FlagOperations.take(addresses).issue(Stream())
    assert max(map(len, driver.calls)) < 256
    issued = [operation for call in driver.calls for operation in call]
    assert [op[1] for op in issued] == addresses * 2
    assert [op[0] for op in issued] == [1] * 300 + [2] * 300


def test_nothing_to_do_asks_for_nothing(driver: Driver) -> None:
    flags.FlagOperations.set([]).issue(Stream())
    assert driver.calls == []


def test_a_refusal_is_said(driver: Driver) -> None:
    driver.code = 1
    with pytest.raises(RuntimeError, match="CUDA error 1 for 1 operations"):
        flags.FlagOperations.set([8]).issue(Stream())
