"""Quantized all-reduce and reduce-scatter over gloo: error bounds, the same bits on all ranks, any size."""

import itertools

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.lowbit.quantized import all_reduce, formats, reduce_scatter
from megatron_longctx.testing.distributed import run_distributed
from tests.lowbit.bounds import error_bound

SHAPES = [(1,), (5, 3), (129,), (4, 7, 64), (0, 4), (4099,)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def inputs(shape: tuple[int, ...], world: int, dtype: torch.dtype, outliers: bool = False) -> list[torch.Tensor]:
    """Return the tensors of all ranks."""
    gen = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(world, *shape, generator=gen)
    if outliers:
        x *= torch.where(torch.rand(world, *shape, generator=gen) < 0.02, 100.0, 1.0)
    return list(x.to(dtype))


def bound_of_sum(xs: list[torch.Tensor], chunk: int, forms: tuple, dtype: torch.dtype, gathered: bool) -> torch.Tensor:
    """Return the largest error of the sum of `xs`, from the bounds of quantization and rounding to `dtype`."""
    first, second = forms
    exact = torch.stack(xs).double().sum(0).flatten()
    bound = sum(error_bound(x.flatten(), chunk, first).double() for x in xs)
    if gathered:
        # The errors of the sum, up to `bound`, can widen the range of a group by twice its largest error.
        step = error_bound(exact.float(), chunk, second).double()
        bound = bound + step + 2 * bound.max() / second.levels + exact.abs().max() * 2**-7 / second.levels
    return bound * 1.001 + (exact.abs() + bound) * torch.finfo(dtype).eps


def _reductions(rank: int) -> list[str]:
    world, group, wrong = dist.get_world_size(), dist.group.WORLD, []
    cases = itertools.product(SHAPES, DTYPES, (8, 6, 4), ((32, False), (128, True)), (False, True))
    for number, (shape, dtype, bits, (group_size, symmetric), outliers) in enumerate(cases):
        if number % 3 != sum(shape) % 3:  # a sample of every kind
            continue
        settings = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
        xs = inputs(shape, world, dtype, outliers)
        x, name = xs[rank], f"{shape} {dtype} {settings} {outliers}"
        before = x.clone()
        got = all_reduce(x, group, **settings)
        if not torch.equal(x, before) or got.shape != x.shape or got.dtype != dtype:
            wrong.append(f"{name}: x changed, or shape or dtype of the result")
        if not x.numel():
            continue
        forms = formats(dtype, bits, group_size, symmetric)
        chunk = -(-x.numel() // (world * group_size)) * group_size
        exact = torch.stack(xs).double().sum(0).flatten()
        off = (got.double().flatten() - exact).abs()
        allowed = 0 if world == 1 else bound_of_sum(xs, chunk, forms, dtype, gathered=True)
        if not (off <= allowed).all():
            wrong.append(f"{name}: off by {off.max()}, allowed {allowed.max()}")
        copies = [torch.empty_like(got) for _ in range(world)]
        dist.all_gather(copies, got)
        if not all(torch.equal(copy, got) for copy in copies):
            wrong.append(f"{name}: ranks differ")
        wide = torch.cat([x] * world)
        shard = reduce_scatter(wide, group, **settings)
        off = (shard.double().flatten() - exact).abs()
        allowed = 0 if world == 1 else bound_of_sum(xs, x.numel(), forms, dtype, gathered=False)
        if shard.shape != x.shape or not (off <= allowed).all():
            wrong.append(f"{name}: shard of shape {shard.shape} off by {off.max()}")
    return wrong


@pytest.mark.parametrize("world", [1, 2, 5])
def test_sums_are_within_the_error_bound_and_equal_on_all_ranks(world):
    assert run_distributed(_reductions, world) == [[]] * world


def _shards(rank: int) -> list[str]:
    """Each rank gets its part of the first dimension."""
    world, group = dist.get_world_size(), dist.group.WORLD
    x = torch.arange(world * 2.0).repeat_interleave(50).view(world * 2, 50) * (rank + 1)
    shard = reduce_scatter(x, group, bits=8, group_size=32)
    expected = torch.stack([torch.full((50,), 2.0 * rank), torch.full((50,), 2.0 * rank + 1)])
    expected *= world * (world + 1) / 2
    close = (shard - expected).abs().max() <= expected.max() / 255 + 1e-6
    return [] if close else [f"{shard[:, 0]} is not {expected[:, 0]}"]


def _errors(rank: int) -> list[float]:
    """Return the relative errors of sums of activations with outliers, and of numbers outside of fp16's range."""
    world, group = dist.get_world_size(), dist.group.WORLD
    xs = inputs((64, 512), world, torch.bfloat16, outliers=True)
    exact = torch.stack(xs).double().sum(0)
    sums = [all_reduce(factor * xs[rank], group, bits=4).double() / factor for factor in (1, 1e30)]
    return [float((total - exact).norm() / exact.norm()) for total in sums]


def _arguments(rank: int) -> list[str]:
    """Strides and `out`."""
    group, wrong = dist.group.WORLD, []
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(rank))
    expected = all_reduce(x.t().contiguous(), group)
    if not torch.equal(all_reduce(x.t(), group), expected):
        wrong.append("a transposed tensor")
    out = torch.empty(40, 6)
    if all_reduce(x.t(), group, out=out) is not out or not torch.equal(out, expected):
        wrong.append("out")
    own = x.t().contiguous()
    if all_reduce(own, group, out=own) is not own or not torch.equal(own, expected):
        wrong.append("in place")
    shard = torch.empty(20, 6)
    if reduce_scatter(x.t(), group, out=shard) is not shard:
        wrong.append("out of reduce_scatter")
    bad = x.clone()
    if rank == 1:
        bad[0, 3] = torch.nan
    got = all_reduce(bad, group, group_size=32).flatten()
    if not got[:32].isnan().all() or got[32:].isnan().any():
        wrong.append("NaN of one rank is NaN in that group on all")
    return wrong


def _refusals(rank: int) -> list[str]:
    group, x = dist.group.WORLD, torch.ones(6, 4)
    calls = [
        lambda: all_reduce(x, group, bits=5),
        lambda: all_reduce(x, group, group_size=7),
        lambda: all_reduce(x.double(), group),
        lambda: all_reduce(x.long(), group),
        lambda: all_reduce(x, group, out=torch.empty(4, 6).t()),
        lambda: all_reduce(x, group, out=torch.empty(6, 4).bfloat16()),
        lambda: reduce_scatter(x[:5], group),
        lambda: reduce_scatter(torch.tensor(1.0), group),
        lambda: reduce_scatter(x, group, out=torch.empty(6, 4)),
    ]
    errors = []
    for call in calls:
        try:
            call()
            errors.append("no error")
        except ValueError as error:
            errors.append(str(error))
    return errors


def _two_ranks(rank: int) -> dict:
    return {check.__name__: check(rank) for check in (_shards, _errors, _arguments, _refusals)}


def test_shards_errors_arguments_and_refusals():
    for results in run_distributed(_two_ranks, 2):
        assert results["_shards"] == [] and results["_arguments"] == []
        plain, huge = results["_errors"]
        assert huge == pytest.approx(plain, rel=0.05)
        assert all("expected" in text for text in results["_refusals"]), results["_refusals"]
