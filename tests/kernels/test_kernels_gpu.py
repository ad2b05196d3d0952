"""The GPU providers and the fused merge, on a CUDA device."""

import pytest
import torch

from megatron_longctx.kernels import PROVIDERS, KernelRequest, choose, merge_into, merge_into_torch
from megatron_longctx.kernels.merge import _fused_merge

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU_PROVIDERS = ["cudnn", "flash_attn", "flash", "reference"]

# s, t, b, h, g, d, causal
CASES = {
    "grouped causal": (1024, 1024, 1, 8, 2, 128, True),
    "multi-head causal, odd length": (1001, 1001, 1, 4, 4, 128, True),
    "batch of two": (512, 512, 2, 8, 2, 128, True),
    "more keys, odd lengths": (513, 1537, 1, 8, 2, 128, False),
    "more queries": (1536, 512, 1, 8, 2, 128, False),
    "multi-query, head dim 64, batch of two": (384, 640, 2, 8, 1, 64, False),
    "head dim 72": (300, 300, 1, 4, 2, 72, True),
    "one query": (1, 777, 2, 8, 2, 128, False),
    "one key": (777, 1, 2, 8, 2, 128, False),
    "one token": (1, 1, 1, 8, 2, 128, True),
    "few tokens": (5, 7, 1, 8, 2, 128, False),
}


def kernel_or_skip(name, case, dtype, deterministic=False):
    request = KernelRequest("cuda", dtype, case.d, case.h, case.g, deterministic)
    kernel = PROVIDERS[name](deterministic=deterministic)
    reason = kernel.why_not(request)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", GPU_PROVIDERS)
def test_forward_and_backward_match_fp64_on_gpu(kernel_math, make_case, name, case, dtype):
    case = make_case(*case)
    kernel = kernel_or_skip(name, case, dtype)
    tensors = kernel_math.tensors(case, dtype, "cuda")
    found = kernel_math.run(kernel, *tensors, case)
    kernel_math.check(found, kernel_math.truth(*tensors, case), kernel_math.torch_own(*tensors, case))


@pytest.mark.parametrize("name", GPU_PROVIDERS)
@pytest.mark.parametrize(
    ("case", "cuts"),
    [
        ((1024, 1024, 1, 8, 2, 128, True), [0, 256, 512, 768, 1024]),
        ((777, 777, 2, 8, 2, 128, True), [0, 1, 100, 100, 776, 777]),
        ((512, 1500, 1, 8, 8, 64, False), [0, 37, 1000, 1500]),
    ],
    ids=["even", "uneven, empty and single", "rectangular"],
)
def test_blocks_merge_and_sum_to_the_whole_on_gpu(kernel_math, make_case, name, case, cuts):
    case = make_case(*case)
    kernel = kernel_or_skip(name, case, torch.bfloat16)
    tensors = kernel_math.tensors(case, torch.bfloat16, "cuda")
    found = kernel_math.run_in_blocks(kernel, merge_into, *tensors, case, cuts)
    kernel_math.check(found, kernel_math.truth(*tensors, case), kernel_math.torch_own(*tensors, case))


@pytest.mark.parametrize("name", GPU_PROVIDERS)
def test_same_shape_in_another_layout_is_not_misread(kernel_math, make_case, name):
    """A plan cached for one layout of out, grad_out or lse must not be used for another."""
    case = make_case(512, 512, 2, 8, 2, 128, True)
    kernel = kernel_or_skip(name, case, torch.bfloat16)
    q, k, v, grad_out = kernel_math.tensors(case, torch.bfloat16, "cuda")
    args = {"causal": True, "scale": case.scale}
    out, lse = kernel.forward(q, k, v, **args)

    def relaid(x, *order):
        inverse = [order.index(i) for i in range(len(order))]
        return x.permute(order).contiguous().permute(inverse)

    first = kernel.backward(grad_out, q, k, v, out, lse, **args)
    for order in ((1, 2, 0, 3), (1, 0, 2, 3), (0, 1, 2, 3)):
        lse_order = [axis for axis in order if axis != 3]
        again = kernel.backward(relaid(grad_out, *order), q, k, v, relaid(out, *order), relaid(lse, *lse_order), **args)
        for a, b in zip(first, again, strict=True):
            assert kernel_math.error(b, a.double()) < 2e-3, order


@pytest.mark.parametrize("name", ["cudnn", "flash_attn", "flash"])
def test_kernels_and_merge_never_wait_for_the_device(kernel_math, make_case, name):
    case = make_case(512, 512, 1, 8, 2, 128, True)
    kernel = kernel_or_skip(name, case, torch.bfloat16)
    q, k, v, grad_out = kernel_math.tensors(case, torch.bfloat16, "cuda")
    args = {"causal": True, "scale": case.scale}
    acc, acc_lse = torch.zeros(q.shape, device="cuda"), torch.full(q.shape[:3], -torch.inf, device="cuda")

    def step():
        out, lse = kernel.forward(q, k, v, **args)
        merge_into(acc, acc_lse, out, lse)
        kernel.backward(grad_out, q, k, v, out, lse, **args)

    step()  # plans, compilation and cached tensors
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["flash_attn", "flash", "reference"])
def test_deterministic_kernels_repeat_bit_for_bit(kernel_math, make_case, name, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    case = make_case(2048, 2048, 1, 8, 2, 128, True)
    kernel = kernel_or_skip(name, case, torch.bfloat16, deterministic=True)
    tensors = kernel_math.tensors(case, torch.bfloat16, "cuda")
    runs = [kernel_math.run(kernel, *tensors, case) for _ in range(4)]
    assert all(torch.equal(runs[0][key], other[key]) for other in runs[1:] for key in other)


def test_auto_takes_cudnn_for_bf16_and_reference_for_fp64():
    assert choose("auto", KernelRequest("cuda", torch.bfloat16, 128, 8, 2)).name == "cudnn"
    assert choose("auto", KernelRequest("cuda", torch.float64, 128, 8, 2)).name == "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_fused_merge_equals_torch_on_gpu(head_dim, dtype):
    """Also each variant's first launch, whose cold instructions pull warps apart and show missing barriers."""
    assert _fused_merge() is not None
    gen = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=gen, device="cuda")

    acc, lse = draw(1300, 2, 6, head_dim), (draw(2, 6, 1300) * 4).permute(2, 0, 1)
    out, out_lse = draw(1001, 2, 2, 6, head_dim).to(dtype)[:, 1], (draw(2, 1001, 6) * 4).transpose(0, 1)
    lse[200:300], acc[200:300] = -torch.inf, 0.0
    out_lse[150:250], out[150:250] = -torch.inf, 0.0
    lse[400], lse[401] = 1e4, -1e4
    expected, expected_lse = acc.double(), lse.double()
    rows = slice(100, 1101)
    merge_into_torch(expected[rows], expected_lse[rows], out, out_lse)
    merge_into(acc[rows], lse[rows], out, out_lse)
    torch.testing.assert_close(acc.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_fused_merge_reaches_past_32_bit_offsets():
    """9 GiB of fp32 accumulator: element offsets above 2**31."""
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    s, h, d = 600_000, 32, 128
    acc, lse = torch.zeros(s, 1, h, d, device="cuda"), torch.full((s, 1, h), -torch.inf, device="cuda")
    rows = slice(s - 5, s)
    out, out_lse = torch.randn(5, 1, h, d, device="cuda"), torch.randn(5, 1, h, device="cuda")
    merge_into(acc[rows], lse[rows], out, out_lse)
    assert torch.equal(acc[rows], out)
    merge_into(acc, lse, torch.ones(1, 1, 1, d, device="cuda").expand(s, 1, h, d), torch.full_like(lse, -50.0))
    torch.testing.assert_close(acc[-5:], out, rtol=1e-4, atol=1e-4)
    assert (acc[:-5] == 1).all()
