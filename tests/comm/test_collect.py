"""Small values that every rank has to know."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_longctx.comm import from_all, from_first, from_rank_0, gather_over, sum_over
from megatron_longctx.testing.distributed import run_distributed


def _known(rank: int) -> tuple[list[tuple[int, str]], list[float], list[list[int]], list[int]]:
    group, mine = dist.group.WORLD, torch.tensor([rank, 10 * rank])
    return (
        from_all(group, (rank, "x" * rank)),
        sum_over(group, mine.double()).tolist(),
        gather_over(group, mine).tolist(),
        from_first(group, mine + 1).tolist(),
    )


def test_every_rank_knows_the_same() -> None:
    objects, sums = [(0, ""), (1, "x"), (2, "xx")], [3.0, 30.0]
    assert run_distributed(_known, 3) == [(objects, sums, [[0, 0], [1, 10], [2, 20]], [1, 1])] * 3


def _told(rank: int) -> list[object]:
    return [from_rank_0(value if rank == 0 else "not asked") for value in (None, {"a": [1, 10**30, "ü"]}, ("x",) * 9)]


def test_what_rank_0_says_is_plain_data() -> None:
    assert run_distributed(_told, 2) == [[None, {"a": [1, 10**30, "ü"]}, ["x"] * 9]] * 2


def test_without_a_group_there_is_one_rank() -> None:
    assert from_all(None, 5) == [5] and gather_over(None, torch.ones(2)).tolist() == [[1.0, 1.0]]
