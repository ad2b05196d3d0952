"""Merges over peer memory against an all-gather between two merges, in Triton's interpreter and on GPUs."""

import itertools
import random
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.config.gpus import max_gpu_ranks
from megatron_longctx.core.comm import all_gather_rows
from megatron_longctx.inference.paged import PackedPartials, merge_ranks, merge_ranks_torch
from megatron_longctx.inference.peer_merge import PeerMerge
from megatron_longctx.lowbit.peer_memory import PeerMemory
from megatron_longctx.testing.distributed import run_distributed
from tests.core.kernels.interpreter import run_forked, run_interpreted

SHAPES = ((1, 8, 16), (3, 4, 20), (9, 3, 8))
"""Queries, heads, head_dim."""


def random_partials(shape: tuple[int, int, int], splits: int, seed: int, device: str = "cpu") -> PackedPartials:
    """Return partial results of a rank: some splits have no keys, and one query has none in any split."""
    rows, heads, head_dim = shape
    gen = torch.Generator().manual_seed(seed)
    partials = PackedPartials(torch.randn(splits, rows * heads * (head_dim + 1), generator=gen), *shape)
    partials.lse.mul_(5)
    empty = torch.rand(splits, rows, generator=gen) < 0.3
    empty[:, rows // 2] |= rows > 1
    partials.lse[empty], partials.out[empty] = -torch.inf, 0
    return PackedPartials(partials.flat.to(device), *shape)


def merged(partials: PackedPartials, shape: tuple[int, int, int]) -> PackedPartials:
    """Merge a rank's partial results in plain PyTorch."""
    result = PackedPartials(torch.empty(1, partials.flat.shape[1], device=partials.flat.device), *shape)
    merge_ranks_torch(partials, result.out[0])
    result.lse[0] = partials.lse.logsumexp(0)
    return result


def gathered(every: list[PackedPartials], shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    ranks = PackedPartials(torch.cat([merged(partials, shape).flat for partials in every]), *shape)
    return merge_ranks(ranks, torch.empty(shape, dtype=dtype))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2**-7 if actual.dtype == torch.bfloat16 else 1e-5  # the interpreter truncates bf16, which GPUs round
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def compare_step_by_step() -> None:
    from megatron_longctx.inference.peer_merge import MERGE, PUSH, merge_over_peers
    from tests.core.comm.simulated_peers import one_process

    half_bytes = 2**18
    for number, shape in enumerate((*SHAPES, SHAPES[1])):
        world, dtype = 2 + number % 3, (torch.float32, torch.bfloat16)[number % 2]
        memories = one_process(world, half_bytes)
        for call in range(3):
            every = [
                random_partials(shape, (1, 2, 5, 70)[(rank + call) % 4], 10 * call + rank) for rank in range(world)
            ]
            if call == 2:  # NaN must not spread to other queries
                every[0].out[0, 0, 0], every[0].lse[0, 0, 0] = torch.nan, 1.0
            outs = [torch.full(shape, 7.0, dtype=dtype) for _ in range(world)]
            row = half_bytes // world // 16 * 16
            for phase, rank in itertools.product((PUSH, MERGE), range(world)):
                merge_over_peers(memories[rank], every[rank], outs[rank], row, phase)
            expected = gathered(every, shape, dtype)
            for out in outs:
                assert_close(out, expected)
                assert torch.equal(out.nan_to_num(), outs[0].nan_to_num()), "the same bits on every rank"
            assert bool(expected.isnan().any()) == (call == 2)
            if shape[0] > 1:
                assert not expected[shape[0] // 2].any()
        divides = number in (0, 1)
        if divides:
            parts_of_heads(memories, (shape[0], shape[1] * world, shape[2]), dtype, row)
        assert [memory.state.tolist() for memory in memories] == [[3 + divides, 0]] * world


def parts_of_heads(memories: list[PeerMemory], shape: tuple[int, int, int], dtype: torch.dtype, row: int) -> None:
    """Every rank gets its part of the heads."""
    from megatron_longctx.inference.peer_merge import MERGE, PUSH, merge_over_peers

    world = len(memories)
    every = [random_partials(shape, (3, 1, 70, 2)[rank], rank) for rank in range(world)]
    expected = gathered(every, shape, dtype).chunk(world, 1)
    outs = [torch.full(part.shape, 7.0, dtype=dtype) for part in expected]
    for phase, rank in itertools.product((PUSH, MERGE), range(world)):
        merge_over_peers(memories[rank], every[rank], outs[rank], row, phase)
    for out, part in zip(outs, expected, strict=True):
        assert_close(out, part)


def _calls(rank: int, folder: Path, world: int) -> None:
    """Make many calls, which ranks enter at different times."""
    from tests.core.comm.simulated_peers import mapped

    merge, same, own = PeerMerge(mapped(folder, rank, world, 2**17)), random.Random(0), random.Random(rank + 1)
    dist.barrier()
    for number in range(8):
        shape = same.choice(SHAPES)
        every = [random_partials(shape, same.choice((1, 3, 20)), 100 * number + r) for r in range(world)]
        assert merge.fits(*shape)
        time.sleep(own.random() * 0.05)
        assert_close(merge(every[rank], torch.empty(shape)), gathered(every, shape, torch.float32))


def compare_between_processes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_forked(_calls, 3, Path(folder), 3)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(__name__)


def test_what_fits() -> None:
    nothing = torch.zeros(2, dtype=torch.int64)
    merge = PeerMerge(PeerMemory(0, 2, nothing, nothing, nothing, 2 * 5 * 32 * 129 * 4))
    assert merge.fits(5, 32, 128) and not merge.fits(6, 32, 128)


def _on_gpus(rank: int) -> None:
    """Compare eager and replayed calls with NCCL's all-gather; a different rank is late each time."""
    group, device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
    assert group is not None
    merge = PeerMerge.of(group, device, 448, 32, 128)
    assert not merge.fits(449, 32, 128)
    for rows, splits in ((1, 33), (2, 17), (16, 3), (16, 66), (80, 13), (128, 1), (448, 2)):
        shape = (rows, 32, 128)
        partials = random_partials(shape, splits, rank, "cuda")
        out = torch.empty(shape, device=device, dtype=torch.bfloat16)
        assert merge.fits(*shape)

        def expected(partials: PackedPartials = partials, shape: tuple[int, int, int] = shape) -> torch.Tensor:
            ranks = PackedPartials(all_gather_rows(group, merged(partials, shape).flat[0]), *shape)
            return merge_ranks(ranks, torch.empty(shape, device=device, dtype=torch.bfloat16))

        assert_close(merge(partials, out), expected())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(3):
                merge(partials, out)
        for replay in range(20):
            partials.flat.copy_(random_partials(shape, splits, 100 * replay + rank).flat)
            if replay % 4 == rank % 4:
                torch.cuda._sleep(2_000_000)
            graph.replay()
            assert_close(out, expected())


@pytest.mark.gpu(2)
@pytest.mark.parametrize("world", sorted({2, max_gpu_ranks()}))
def test_calls_in_cuda_graphs(world: int) -> None:
    run_distributed(_on_gpus, world, backend="nccl")


if __name__ == "__main__":
    compare_step_by_step()
    compare_between_processes()
