"""The GPU providers and the fused merge, on a CUDA device."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_longctx.core.kernels import (
    PROVIDERS,
    AttentionKernel,
    KernelRequest,
    Partial,
    auto_order,
    choose_kernel,
    merge_partials,
    partials,
)
from megatron_longctx.core.plans import Mask
from megatron_longctx.core.plans.mask import causal, documents, full
from tests.core.kernels.blocks import Case, check, error, run, run_in_blocks, tensors
from tests.core.kernels.test_kernel_providers import PACKED, call

pytestmark = pytest.mark.gpu

GPU_PROVIDERS = auto_order("cuda")
CASES = {
    "grouped causal": Case(1024, 1024, 1, 8, 2, 128, True),
    "multi-head causal, odd length": Case(1001, 1001, 1, 4, 4, 128, True),
    "batch of two": Case(512, 512, 2, 8, 2, 128, True),
    "more keys, odd lengths": Case(513, 1537, 1, 8, 2, 128, False),
    "more queries": Case(1536, 512, 1, 8, 2, 128, False),
    "multi-query, head dim 64, batch of two": Case(384, 640, 2, 8, 1, 64, False),
    "head dim 72": Case(300, 300, 1, 4, 2, 72, True),
    "one query": Case(1, 777, 2, 8, 2, 128, False),
    "one key": Case(777, 1, 2, 8, 2, 128, False),
    "one token": Case(1, 1, 1, 8, 2, 128, True),
    "few tokens": Case(5, 7, 1, 8, 2, 128, False),
    "causal, ends aligned": Case(300, 1000, 2, 8, 2, 128, call((0, 300, 0, 1000), right=0)),
    "a window": Case(700, 700, 1, 8, 2, 128, call((0, 700, 0, 700), left=100, right=0)),
    "values of another head dim": Case(513, 513, 1, 8, 8, 192, True, e=128),
    **PACKED,
    **{f"{name}, head dim 64": replace(case, d=64) for name, case in PACKED.items()},
    "windows, head dim 96": Case(700, 700, 1, 4, 2, 96, call((0, 300, 0, 300), (300, 700, 300, 700), left=90, right=0)),
}


def kernel_or_skip(name: str, case: Case, dtype: torch.dtype, deterministic: bool = False) -> AttentionKernel:
    call, kernel = case.call, PROVIDERS[name](deterministic=deterministic)
    packed = call.segments != ((0, case.s, 0, case.t),)
    request = KernelRequest(
        "cuda", dtype, case.d, case.h, case.g, deterministic, case.e, not (call.causal or call.full), packed
    )
    reason = kernel.why_not(request)
    takes = kernel.takes
    if (packed and not takes.packed) or (call.causal and case.s != case.t and not (takes.rectangles or takes.bands)):
        reason = "calls of this shape are not supported"
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", GPU_PROVIDERS)
def test_forward_and_backward_match_fp64_on_gpu(name: str, case: Case, dtype: torch.dtype) -> None:
    kernel = kernel_or_skip(name, case, dtype)
    of = tensors(case, dtype, "cuda")
    check(run(kernel, *of, case), case, *of)


@pytest.mark.parametrize("name", GPU_PROVIDERS)
@pytest.mark.parametrize(
    ("mask", "cuts"),
    [
        (causal(1024), [0, 256, 512, 768, 1024]),
        (causal(777), [0, 1, 100, 100, 776, 777]),
        (full(700), [0, 37, 500, 700]),
        (documents([100, 300, 1, 7, 616], window=(200, 0)), [0, 256, 512, 1024]),
        (documents([400, 100, 100, 200], parents=[-1, 0, 0, 1]), [0, 333, 800]),
    ],
    ids=["even", "uneven, empty and single", "full", "windows of documents", "a tree"],
)
def test_blocks_merge_and_sum_to_the_whole_on_gpu(name: str, mask: Mask, cuts: list[int]) -> None:
    case = Case(mask.length, mask.length, 1, 8, 2, 128, mask.slices)
    kernel = PROVIDERS[name]()
    request = KernelRequest("cuda", torch.bfloat16, 128, 8, 2, windows=mask.has_windows, packed=len(mask.documents) > 1)
    if (reason := kernel.why_not(request)) is not None:
        pytest.skip(f"{name}: {reason}")
    of = tensors(case, torch.bfloat16, "cuda")
    check(run_in_blocks(kernel, *of, case, cuts), case, *of)


@pytest.mark.parametrize("name", GPU_PROVIDERS)
def test_same_shape_in_another_layout_is_not_misread(name: str) -> None:
    """A plan cached for one layout of out, grad_out or lse must not serve another."""
    case = Case(512, 512, 2, 8, 2, 128, True)
    kernel = kernel_or_skip(name, case, torch.bfloat16)
    q, k, v, grad_out = tensors(case, torch.bfloat16, "cuda")
    out, lse = kernel.forward(q, k, v, case.call, scale=1.0)

    def relaid(x: Tensor, *order: int) -> Tensor:
        inverse = [order.index(i) for i in range(len(order))]
        return x.permute(order).contiguous().permute(inverse)

    first = kernel.backward(grad_out, q, k, v, out, lse, case.call, scale=1.0)
    for order in ((1, 2, 0, 3), (1, 0, 2, 3), (0, 1, 2, 3)):
        of = relaid(out, *order), relaid(lse, *(axis for axis in order if axis != 3))
        again = kernel.backward(relaid(grad_out, *order), q, k, v, *of, case.call, scale=1.0)
        for a, b in zip(first, again, strict=True):
            assert error(b, a.double()) < 2e-3, order


@pytest.mark.parametrize("case", [CASES["batch of two"], PACKED["documents"]], ids=["dense", "packed"])
@pytest.mark.parametrize("name", GPU_PROVIDERS[:-1])
def test_kernels_and_merge_never_wait_for_the_device(name: str, case: Case) -> None:
    kernel = kernel_or_skip(name, case, torch.bfloat16)
    q, k, v, grad_out = tensors(case, torch.bfloat16, "cuda")
    total, total_lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, device="cuda")

    def step() -> None:
        out, lse = kernel.forward(q, k, v, case.call, scale=1.0)
        merge_partials([Partial(0, 0, total, total_lse), Partial(0, 0, out, lse)], total, total_lse)
        kernel.backward(grad_out, q, k, v, out, lse, case.call, scale=1.0)

    step()  # plans, compilation and cached tensors
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["fa4", "flash", "reference"])
def test_deterministic_kernels_repeat_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    case = Case(2048, 2048, 1, 8, 2, 128, True)
    kernel = kernel_or_skip(name, case, torch.bfloat16, deterministic=True)
    of = tensors(case, torch.bfloat16, "cuda")
    runs = [run(kernel, *of, case) for _ in range(4)]
    assert all(torch.equal(runs[0][key], other[key]) for other in runs[1:] for key in other)


def test_auto_takes_a_fused_kernel_for_bf16_and_reference_for_fp64() -> None:
    assert choose_kernel("auto", KernelRequest("cuda", torch.bfloat16, 128, 8, 2)).name in ("fa4", "cudnn", "flash")
    assert choose_kernel("auto", KernelRequest("cuda", torch.float64, 128, 8, 2)).name == "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_fused_merge_equals_torch_on_gpu(head_dim: int, dtype: torch.dtype) -> None:
    """Include each variant's first launch, whose cold instructions separate warps and reveal missing barriers."""
    assert partials._fused() is not None
    gen = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    total, lse = draw(1300, 2, 6, head_dim), (draw(2, 6, 1300) * 4).permute(2, 0, 1)
    out, out_lse = draw(1001, 2, 2, 6, head_dim).to(dtype)[:, 1], (draw(2, 1001, 6) * 4).transpose(0, 1)
    lse[200:300], total[200:300] = -torch.inf, 0.0
    out_lse[150:250], out[150:250] = -torch.inf, 0.0
    lse[400], lse[401] = 1e4, -1e4
    wanted, wanted_lse = total.double(), lse.double()
    double = Partial(100, 0, out.double(), out_lse.double())
    merge_partials([Partial(0, 0, wanted, wanted_lse), double], wanted, wanted_lse)  # fp64 is not fused
    merge_partials([Partial(0, 0, total, lse), Partial(100, 0, out, out_lse)], total, lse)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


def test_fused_merge_reaches_past_32_bit_offsets() -> None:
    """9 GiB of fp32 accumulator: element offsets above 2**31."""
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    s, h, d = 600_000, 32, 128
    total, lse = torch.zeros(s, 1, h, d, device="cuda"), torch.full((s, 1, h), -torch.inf, device="cuda")
    out, out_lse = torch.randn(5, 1, h, d, device="cuda"), torch.randn(5, 1, h, device="cuda")
    merge_partials([Partial(0, 0, total, lse), Partial(s - 5, 0, out, out_lse)], total, lse)
    assert torch.equal(total[-5:], out)
    far = Partial(0, 0, torch.ones(1, 1, 1, d, device="cuda").expand(s, 1, h, d), torch.full_like(lse, -50.0))
    merge_partials([Partial(0, 0, total, lse), far], total, lse)
    torch.testing.assert_close(total[-5:], out, rtol=1e-4, atol=1e-4)
    assert (total[:-5] == 1).all()
