"""NaN comes out of every mode as NaN, for each query that sees it: blocks of a few tokens hide none."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.kernels.merge import merge_into
from megatron_longctx.kernels.paged import PackedPartials, merge_ranks
from megatron_longctx.kernels.partials import Partial, merge_partials
from megatron_longctx.schedules import SCHEDULES
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import random_qkv, shard

LENGTH, BROKEN = 20, 13
MODES = [name for name in SCHEDULES if name not in ("usp", "double_ring")]


def _rows(rank: int) -> dict[tuple[str, str], list[int]]:
    """By mode and what is broken, the tokens of this rank whose output has a NaN."""
    found = {}
    for mode in MODES:
        attention = ContextParallelAttention(dist.group.WORLD, schedule=mode)
        layout = attention.layout(LENGTH)
        for name in ("q", "k", "v"):
            tensors = dict(zip("qkv", random_qkv(LENGTH, 1, 3, 3, 8, torch.float32), strict=False))
            tensors[name][BROKEN] = torch.nan
            out = attention(*(shard(x, layout, rank) for x in tensors.values()), length=LENGTH)
            tokens = torch.tensor(list(layout.tokens(rank)))
            assert torch.equal(out.isnan().any(-1), out.isnan().all(-1))
            found[mode, name] = tokens[out.isnan().flatten(1).any(1)].tolist()
    return found


def test_every_query_that_sees_a_nan_gets_nan() -> None:
    ranks = run_distributed(_rows, 3)
    for mode in MODES:
        for name, expected in (("q", {BROKEN}), ("k", set(range(BROKEN, LENGTH)))):
            assert {token for found in ranks for token in found[mode, name]} == expected, (mode, name)
        of_values = {token for found in ranks for token in found[mode, "v"]}
        assert set(range(BROKEN, LENGTH)) <= of_values, mode  # hidden keys of a block count 0 times NaN


def test_merges_keep_what_is_nan() -> None:
    """Whichever of several partials it is, beside numbers and beside nothing."""
    for broken in range(3):
        for others in (0.5, -torch.inf):
            outs = [torch.full((1, 1, 1, 4), float(others == 0.5)) for _ in range(3)]
            lses = [torch.full((1, 1, 1), others) for _ in range(3)]
            outs[broken].fill_(torch.nan)
            lses[broken].fill_(torch.nan)
            out, lse = torch.zeros(1, 1, 1, 4), torch.full((1, 1, 1), -torch.inf)
            for part in zip(outs, lses, strict=True):
                merge_into(out, lse, *part)
            assert out.isnan().all() and lse.isnan().all()
            out, lse = torch.zeros_like(out), torch.zeros_like(lse)
            merge_partials([Partial(0, 0, *part) for part in zip(outs, lses, strict=True)], out, lse)
            assert out.isnan().all() and lse.isnan().all()
            packed = PackedPartials(torch.zeros(3, 5), 1, 1, 4)
            packed.out.copy_(torch.cat(outs))
            packed.lse.copy_(torch.cat(lses))
            assert merge_ranks(packed, torch.empty(1, 1, 4)).isnan().all()
