"""Message benchmarks: messages have the given size and go to the given ranks, over both transports."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_longctx.core.plans import Workload
from megatron_longctx.training.calibration import MessageBenchmark
from megatron_longctx.training.measure import Testbed
from tests.shared.threads import ThreadedRanks


@pytest.mark.parametrize("over_peers", [False, True], ids=["p2p", "peer"])
@pytest.mark.parametrize("shifts", [[1], [1, 2], [1] * 8], ids=str)
def test_every_rank_receives_what_others_send(
    shifts: list[int], over_peers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, size = 3, 768
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: group.rank)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: group.n)
    ranks = ThreadedRanks(n, over_peers)
    beside: list[int] = []

    def work(rank: int) -> list[int]:
        group: Any = SimpleNamespace(rank=rank, n=n)
        testbed = Testbed(group, torch.device("cpu"), Workload(1, 1, 8), transport=ranks.transport(rank))
        messages = MessageBenchmark(testbed, size, shifts)
        memory, begin = messages._channel.memory(), messages._channel.begin

        def fill() -> int:
            parity = begin()
            memory.fill_(rank)
            return parity

        messages._channel.begin = fill  # type: ignore[method-assign]
        messages.run(lambda: beside.append(rank))
        assert all(into.shape == (size,) for into in messages._into)
        return sorted(int(value) for into in messages._into for value in into.unique())

    for rank, received in enumerate(ranks.run(work)):
        assert received == sorted((rank - by) % n for by in shifts)
    assert sorted(beside) == [0, 1, 2]
