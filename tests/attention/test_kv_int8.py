"""Keys and values as 8-bit integers: the packing itself, and attention over them by every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.kernels.quantize_kv import pack_kv, packed_shape, unpack_kv
from megatron_longctx.schedules import SCHEDULES, PlanOptions
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import dense_attention, random_qkv, shard
from megatron_longctx.testing.tolerances import relative_error

LENGTH = 52


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.sampled_from([4, 64, 72, 128]),
    st.integers(-120, 100),
    st.integers(0, 2**31),
)
def test_an_element_is_off_by_half_a_scale_of_its_token_and_head(
    dtype: torch.dtype, d: int, exponent: int, seed: int
) -> None:
    if dtype == torch.float16:
        exponent = exponent % 8
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.rand(7, 2, 3, 1, generator=gen) * 100  # every row of another size
    k, v = ((torch.randn(7, 2, 3, d, generator=gen) * sizes * 2.0**exponent).to(dtype) for _ in range(2))
    packed = pack_kv(k.transpose(1, 2), v.transpose(1, 2))  # any strides
    assert packed.shape == packed_shape(k.transpose(1, 2)) == (7, 2, 3, 2, d + 4) and packed.dtype == torch.uint8
    for x, back in zip((k, v), unpack_kv(packed, torch.float32), strict=True):
        x = x.transpose(1, 2).double()
        allowed = x.abs().amax(-1, keepdim=True) / 254 * 1.001 + 2.0**-118
        assert ((back.double() - x).abs() <= allowed).all()


def test_rows_of_zeros_and_rows_that_are_not_finite() -> None:
    k, v = torch.randn(3, 1, 2, 8), torch.zeros(3, 1, 2, 8)
    k[0, 0, 1, 3], k[2, 0, 0, 0] = torch.inf, torch.nan
    keys, values = unpack_kv(pack_kv(k, v), torch.float32)
    broken = torch.zeros(3, 1, 2, dtype=torch.bool)
    broken[0, 0, 1] = broken[2, 0, 0] = True
    assert torch.equal(keys.isnan().any(-1), broken) and torch.equal(keys.isnan().all(-1), broken)
    assert (values == 0).all()
    with pytest.raises(ValueError, match="head dimension 6: expected a multiple of 4"):
        pack_kv(torch.ones(1, 1, 1, 6), torch.ones(1, 1, 1, 6))


def _modes(world: int) -> list[tuple[str, PlanOptions]]:
    return [
        (name, PlanOptions(inner_size=2) if name in ("usp", "double_ring") and world % 2 == 0 else PlanOptions())
        for name in SCHEDULES
        if name not in ("usp", "double_ring") or world % 2 == 0
    ]


def _attend(rank: int) -> list[tuple[str, bool, float, float, float]]:
    """By mode and mask: error against attention over the 8-bit values, against the exact one; bytes sent of exact."""
    world, found = dist.get_world_size(), []
    q, k, v, _ = random_qkv(LENGTH, 2, 4, 4, 64, torch.float32)
    rounded = unpack_kv(pack_kv(k, v), torch.float32)
    for schedule, options in _modes(world):
        for causal in (True, False):
            attention = ContextParallelAttention(
                dist.group.WORLD, schedule=schedule, kernel="reference", options=options, kv_int8=True
            )
            layout = attention.layout(LENGTH)
            mine = [shard(x, layout, rank) for x in (q, k, v)]
            wanted, exact = (
                shard(dense_attention(q, *kv, torch.zeros_like(q), causal=causal)["out"], layout, rank)
                for kv in (rounded, (k, v))
            )
            out = attention(*mine, length=LENGTH, causal=causal, inference=True)
            trained = attention(*mine, length=LENGTH, causal=causal)
            errors = (relative_error(out, wanted), relative_error(out, exact), relative_error(trained, exact))
            found.append((schedule, causal, *errors))
    leaf = mine[0].clone().requires_grad_()
    with pytest.raises(ValueError, match="expected an inference call without gradients"):
        attention(leaf, *mine[1:], length=LENGTH, inference=True)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_every_mode_attends_the_8_bit_values_and_nothing_else(world: int) -> None:
    for found in run_distributed(_attend, world):
        assert {schedule for schedule, *_ in found} == {name for name, _ in _modes(world)}
        for schedule, causal, rounded, exact, trained in found:
            assert rounded < 1e-5, f"{schedule}, causal={causal}: {rounded} off the attention over 8-bit values"
            assert 1e-4 < exact < 0.02, f"{schedule}, causal={causal}: {exact} off the exact attention"
            assert trained < 1e-5, f"{schedule}, causal={causal}: calls that train are exact"


def test_one_rank_alone_stays_exact() -> None:
    q, k, v, _ = random_qkv(LENGTH, 1, 4, 2, 8, torch.float32)
    plain: Any = ContextParallelAttention(kernel="reference")
    with_option = ContextParallelAttention(kernel="reference", kv_int8=True)
    expected = plain(q, k, v, length=LENGTH)
    assert torch.equal(with_option(q, k, v, length=LENGTH, inference=True), expected)
