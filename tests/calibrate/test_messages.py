"""Messages of a given size go to the ranks asked for, whatever carries them."""

from __future__ import annotations

import pytest
import torch

from megatron_longctx.calibrate.kernels import Place
from megatron_longctx.calibrate.messages import Messages
from megatron_longctx.schedules import Workload
from tests.shared.threads import ThreadedRanks


class _Group:
    """A process group's place in `Place`."""

    def __init__(self, rank: int, n: int) -> None:
        self.rank, self.n = rank, n


@pytest.mark.parametrize("over_peers", [False, True], ids=["p2p", "peer"])
@pytest.mark.parametrize("shifts", [[1], [1, 2], [1] * 8], ids=str)
def test_every_rank_gets_what_others_send(shifts: list[int], over_peers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n, size = 3, 768
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: group.rank)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: group.n)
    ranks = ThreadedRanks(n, [range(n)] * n if over_peers else None)
    beside: list[int] = []

    def work(rank: int) -> list[int]:
        links = ranks.transport(rank)
        place = Place(_Group(rank, n), torch.device("cpu"), Workload(1, 1, 8), links=links)  # type: ignore[arg-type]
        messages = Messages(place, size, shifts)
        memory = messages._channel.memory()
        begin = messages._channel.begin

        def filled() -> int:
            parity = begin()
            memory.fill_(rank)
            return parity

        messages._channel.begin = filled  # type: ignore[method-assign]
        messages.once(lambda: beside.append(rank))
        assert all(into.shape == (size,) for into in messages._into)
        return sorted(int(value) for into in messages._into for value in into.unique())

    for rank, found in enumerate(ranks.run(work)):
        assert found == sorted((rank - by) % n for by in shifts)
    assert sorted(beside) == [0, 1, 2]
