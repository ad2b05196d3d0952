"""Merges over peer memory: against a gather between two merges, under Triton's interpreter and on GPUs."""

import itertools
import random
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.comm import PeerMerge, gather_over
from megatron_longctx.comm.peer_memory import PeerMemory
from megatron_longctx.gpus import gpu_ranks
from megatron_longctx.kernels.paged import PackedPartials, merge_ranks, merge_ranks_torch
from megatron_longctx.testing.distributed import run_distributed
from tests.kernels.interpreter import run_forked, run_interpreted

SHAPES = ((1, 8, 16), (3, 4, 20), (9, 3, 8))
"""Queries, heads, head_dim."""


def shares_of(shape: tuple[int, int, int], splits: int, seed: int, device: str = "cpu") -> PackedPartials:
    """What a rank might have found in so many shares: nothing in some, for one query nothing at all."""
    rows, heads, head_dim = shape
    gen = torch.Generator().manual_seed(seed)
    found = PackedPartials(torch.randn(splits, rows * heads * (head_dim + 1), generator=gen), *shape)
    found.lse.mul_(5)
    empty = torch.rand(splits, rows, generator=gen) < 0.3
    empty[:, rows // 2] |= rows > 1
    found.lse[empty], found.out[empty] = -torch.inf, 0
    return PackedPartials(found.flat.to(device), *shape)


def whole(shares: PackedPartials, shape: tuple[int, int, int]) -> PackedPartials:
    """A rank's shares as one, by plain PyTorch; queries for which it has nothing as the kernels give them."""
    found = PackedPartials(torch.empty(1, shares.flat.shape[1], device=shares.flat.device), *shape)
    merge_ranks_torch(shares, found.out[0])
    found.lse[0] = shares.lse.logsumexp(0)
    return found


def gathered(every: list[PackedPartials], shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    ranks = PackedPartials(torch.cat([whole(shares, shape).flat for shares in every]), *shape)
    return merge_ranks(ranks, torch.empty(shape, dtype=dtype))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2**-7 if found.dtype == torch.bfloat16 else 1e-5  # the interpreter cuts bf16 off where GPUs round it
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def compare_step_by_step() -> None:
    from megatron_longctx.comm.peer_merge_kernel import MERGE, PUSH, merge_over_peers
    from tests.comm.simulated_peers import one_process

    for number, (shape, dtype) in enumerate(itertools.product(SHAPES, (torch.float32, torch.bfloat16))):
        world, room = 2 + number % 3, 2**18
        memories = one_process(world, room)
        for call in range(3):
            every = [shares_of(shape, (1, 2, 5, 70)[(rank + call) % 4], 10 * call + rank) for rank in range(world)]
            if call == 2:  # bad values of a query stay with it
                every[0].out[0, 0, 0], every[0].lse[0, 0, 0] = torch.nan, 1.0
            outs = [torch.full(shape, 7.0, dtype=dtype) for _ in range(world)]
            row = room // world // 16 * 16
            for phase, rank in itertools.product((PUSH, MERGE), range(world)):
                merge_over_peers(memories[rank], every[rank], outs[rank], row, phase)
            expected = gathered(every, shape, dtype)
            for out in outs:
                close(out, expected)
                assert torch.equal(out.nan_to_num(), outs[0].nan_to_num()), "the same bits on every rank"
            assert bool(expected.isnan().any()) == (call == 2)
            if shape[0] > 1:
                assert not expected[shape[0] // 2].any()
        assert [memory.state.tolist() for memory in memories] == [[3, 0]] * world


def _calls(rank: int, folder: Path, world: int) -> None:
    """Many calls, which ranks enter at different times."""
    from tests.comm.simulated_peers import mapped

    merge, same, own = PeerMerge(mapped(folder, rank, world, 2**17)), random.Random(0), random.Random(rank + 1)
    dist.barrier()
    for number in range(12):
        shape = same.choice(SHAPES)
        every = [shares_of(shape, same.choice((1, 3, 20)), 100 * number + r) for r in range(world)]
        assert merge.fits(*shape)
        time.sleep(own.random() * 0.05)
        close(merge(every[rank], torch.empty(shape)), gathered(every, shape, torch.float32))


def compare_between_processes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_forked(_calls, 3, Path(folder), 3)


@pytest.mark.parametrize("what", ["compare_step_by_step", "compare_between_processes"])
def test_kernels_under_the_interpreter(what: str) -> None:
    run_interpreted("-m", "tests.comm.test_peer_merge", what)


def test_what_fits() -> None:
    nothing = torch.zeros(2, dtype=torch.int64)
    merge = PeerMerge(PeerMemory(0, 2, nothing, nothing, nothing, 2 * 5 * 32 * 129 * 4))
    assert merge.fits(5, 32, 128) and not merge.fits(6, 32, 128)


def _on_gpus(rank: int) -> None:
    """Eager and replayed with other numbers, beside NCCL's gather; ranks come late in turns."""
    group, device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
    assert group is not None
    merge = PeerMerge.of(group, device, 448, 32, 128)
    assert not merge.fits(449, 32, 128)
    for rows, splits in ((1, 33), (2, 17), (16, 3), (16, 66), (80, 13), (128, 1), (448, 2)):
        shape = (rows, 32, 128)
        shares = shares_of(shape, splits, rank, "cuda")
        out = torch.empty(shape, device=device, dtype=torch.bfloat16)
        assert merge.fits(*shape)

        def expected(shares: PackedPartials = shares, shape: tuple[int, int, int] = shape) -> torch.Tensor:
            ranks = PackedPartials(gather_over(group, whole(shares, shape).flat[0]), *shape)
            return merge_ranks(ranks, torch.empty(shape, device=device, dtype=torch.bfloat16))

        close(merge(shares, out), expected())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(3):
                merge(shares, out)
        for replay in range(20):
            shares.flat.copy_(shares_of(shape, splits, 100 * replay + rank).flat)
            if replay % 4 == rank % 4:
                torch.cuda._sleep(2_000_000)
            graph.replay()
            close(out, expected())


@pytest.mark.gpu(2)
@pytest.mark.parametrize("world", sorted({2, gpu_ranks()}))
def test_calls_in_cuda_graphs(world: int) -> None:
    run_distributed(_on_gpus, world, backend="nccl")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
