"""The 8-bit format of keys and values."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.attention.kv_format import KVFormat
from megatron_longctx.core.kernels import KernelRequest, choose_kernel
from megatron_longctx.core.plans import MODES, ModeOptions, build_plan
from megatron_longctx.core.plans.mask import Mask, causal, documents, full
from megatron_longctx.inference.quantize_kv import Int8KV, int8_kv, pack_kv, packed_shape, unpack_kv
from megatron_longctx.testing.references import dense_attention, random_qkv, visible
from megatron_longctx.testing.tolerances import relative_error
from tests.shared.threads import Inputs, attend

LENGTH = 52
WINDOWED: dict[str, Any] = {"lengths": [30, 22], "window": (17, None)}
MASKS: dict[str, tuple[Mask, dict[str, Any]]] = {
    "causal": (causal(LENGTH), {"lengths": [LENGTH]}),
    "full": (full(LENGTH), {"lengths": [LENGTH], "causal": False}),
    "windows": (documents(**WINDOWED), WINDOWED),
}


def output(schedule: str, n: int, mask: Mask, tensors: tuple[Tensor, ...], kv: KVFormat, peers: bool) -> Tensor:
    """Compute attention of `n` ranks that send keys and values in this format."""
    q, k, v = tensors
    plan = build_plan(schedule, n, mask, ModeOptions(inner_size=n // 2))
    request = KernelRequest("cpu", q.dtype, q.shape[3], q.shape[2], k.shape[2], v_head_dim=v.shape[3])
    inputs = Inputs(q, k, v, torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype))
    return attend(plan, inputs, q.shape[3] ** -0.5, lambda: choose_kernel("reference", request), peers, kv)["out"]


def dense(tensors: tuple[Tensor, ...], doc_args: dict[str, Any]) -> Tensor:
    q, k, v = tensors
    return dense_attention(q, k, v, torch.zeros(*q.shape[:3], v.shape[3]), seen=visible(**doc_args))["out"]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("schedule", MODES)
def test_every_mode_attends_to_the_8_bit_values(schedule: str, kind: str) -> None:
    mask, doc_args = MASKS[kind]
    q, k, v, _ = random_qkv(LENGTH, 2, 4, 4, 64, torch.float32)
    rounded = unpack_kv(pack_kv(k, v), torch.float32)
    for peers in (False, True):
        out = output(schedule, 4, mask, (q, k, v), Int8KV(64, torch.float32), peers)
        assert relative_error(out, dense((q, *rounded), doc_args)) < 1e-5
        assert 1e-4 < relative_error(out, dense((q, k, v), doc_args)) < 0.02, "not the exact values"


def test_one_rank_alone_stays_exact() -> None:
    q, k, v, _ = random_qkv(LENGTH, 1, 4, 2, 8, torch.float32)
    expected = ContextParallelAttention(kernel="reference")(q, k, v, mask=LENGTH)
    found = ContextParallelAttention(kernel="reference", kv_format=int8_kv)(q, k, v, mask=LENGTH, inference=True)
    assert torch.equal(found, expected)


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.sampled_from([4, 64, 72, 128]),
    st.integers(-120, 100),
    st.integers(0, 2**31),
)
def test_errors_are_at_most_half_the_scale_of_a_token_and_head(
    dtype: torch.dtype, d: int, exponent: int, seed: int
) -> None:
    if dtype == torch.float16:
        exponent = exponent % 8
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.rand(7, 2, 3, 1, generator=gen) * 100  # another magnitude for every row
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
