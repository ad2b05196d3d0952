"""Fused kernels compute what their definitions do, under Triton's interpreter. Each module has its own comparison."""

from tests.core.kernels.interpreter import run_interpreted

MODULES = (
    *("core.kernels.test_batched_copy", "core.kernels.test_partials", "mcore.test_rotate", "lowbit.test_quantize"),
    *("inference.test_fp8", "inference.test_quantize_kv"),
)


def test_kernels_compute_the_same_under_the_interpreter() -> None:
    """One process imports Triton, which takes as long as most of the comparisons."""
    run_interpreted(*(f"tests.{module}" for module in MODULES))
