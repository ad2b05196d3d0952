"""Profiles of steps: kinds of operations, and sums of their times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_longctx.training.metrics.step_profile import IDLE, OTHER, Span, kind_of, profile_of

NAMES = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_kernel0_0": "attention forward",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_kernel0_0": "attention backward",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90": "attention forward",
    "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90": "attention backward",
    "AttentionFunctionBackward": "attention backward",
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT": "matrix products",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "messages",
    "Memcpy PtoP (Device -> Device)": "messages",
    "Memcpy DtoD (Device -> Device)": "copies",
    "void at::native::elementwise_kernel<128, 2>": OTHER,
    "_combine_kernel": "partial results",
    "_rotate_kernel": "fused elementwise",
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_operations_have_a_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_time_of_the_compute_stream_is_divided_and_other_streams_overlap() -> None:
    spans = [
        Span("gemm", 7, 1.0, 3.0),
        Span("nccl", 9, 1.5, 2.5),
        Span("fprop", 7, 4.0, 8.0),
        Span("nccl", 9, 8.0, 9.0),  # the compute stream is idle
    ]
    profile = profile_of(spans)
    assert profile.seconds == 8.0
    assert profile.busy_seconds == {"matrix products": 2.0, "attention forward": 4.0, IDLE: 2.0}
    assert profile.beside_seconds == {"messages": 2.0}
    assert [tuple(each.values()) for each in profile.longest] == [("fprop", 4.0, 1), ("gemm", 2.0, 1)]
    assert "| attention forward | 4.0000 | 50.0 | 0.0000 |" in profile.table()


@given(
    st.lists(st.tuples(st.sampled_from([*NAMES]), st.integers(0, 2), st.integers(0, 99), st.integers(0, 9)), min_size=1)
)
def test_kinds_add_up_to_the_step(drawn: list[tuple[str, int, int, int]]) -> None:
    profile = profile_of(Span(name, stream, begin, begin + took) for name, stream, begin, took in drawn)
    assert sum(profile.busy_seconds.values()) == pytest.approx(profile.seconds)
    assert all(seconds >= 0 for seconds in (*profile.busy_seconds.values(), *profile.beside_seconds.values()))


def test_a_profile_without_operations_is_refused() -> None:
    with pytest.raises(ValueError, match="no operations"):
        profile_of([])
