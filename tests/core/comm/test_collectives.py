"""Collectives on small values, work that succeeds on all ranks or fails on all, and the choice of a transport."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_longctx.core.comm import (
    PeerMemoryError,
    all_gather_rows,
    all_reduce_sum,
    choose_transport,
    gather_objects,
)
from megatron_longctx.core.comm.collectives import all_or_none
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.ranks import broadcast_json, world_group


def error_of(work: Callable[[], Any], kind: type[Exception] = PeerMemoryError) -> str:
    try:
        return f"no error: {work()}"
    except kind as error:
        return str(error)


VALUES = (None, {"a": [1, 10**30, "ü"]}, *("y" * size for size in (501, 502, 503, 9000)))
"""The first message has room for a text of 504 bytes."""


def _collectives(rank: int) -> list[Any]:
    group, mine = world_group(), torch.tensor([rank, 10 * rank])

    def work() -> int:
        if rank == 1:
            raise MemoryError("all is full\nindeed")
        return rank

    return [
        gather_objects(group, (rank, "x" * rank)),
        all_reduce_sum(group, mine.double()).tolist(),
        all_gather_rows(group, mine).tolist(),
        [broadcast_json(value if rank == 0 else "ignored") for value in (*VALUES, ("x",) * 9)],
        error_of(lambda: all_or_none(group, work, "packing", "Take less.")),
        all_or_none(group, lambda: 10 * rank, "packing", "Take less."),  # after a failure too
        *(error_of(lambda name=name: choose_transport(name, group, torch.device("cpu")).name, ValueError)
          for name in ("auto", "p2p", "pigeon", "peer")),
    ]  # fmt: skip


def test_collectives_over_three_ranks() -> None:
    objects, sums, gathered = [(0, ""), (1, "x"), (2, "xx")], [3.0, 30.0], [[0, 0], [1, 10], [2, 20]]
    plain = [*VALUES, ["x"] * 9]
    error = "packing failed on rank 1 of the group's 3: MemoryError: all is full. Take less."
    pigeon = "transport=pigeon: expected one of auto, peer, p2p. Set transport to one of these."
    on_cpus = ["no error: p2p", "no error: p2p", pigeon]
    ranks = run_distributed(_collectives, 3)
    peers = {found.pop() for found in ranks}
    assert len(peers) == 1 and "not all ranks have a CUDA device. Choose auto or p2p" in peers.pop()
    assert ranks == [[objects, sums, gathered, plain, error, 10 * rank, *on_cpus] for rank in range(3)]


def test_without_a_group_there_is_one_rank() -> None:
    assert gather_objects(None, 5) == [5] and all_gather_rows(None, torch.ones(2)).tolist() == [[1.0, 1.0]]
