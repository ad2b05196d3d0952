"""The providers that run on CPU, against fp64 attention written out in conftest.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.kernels import PROVIDERS, merge_into, reference

CPU_PROVIDERS = ["reference", "cpu"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# s, t, b, h, g, d, causal
CASES = {
    "multi-head causal": (17, 17, 2, 4, 4, 16, True),
    "grouped causal": (33, 33, 2, 6, 2, 8, True),
    "multi-query, more keys": (20, 45, 1, 4, 1, 32, False),
    "grouped, more queries": (45, 20, 2, 4, 2, 16, False),
    "head dim 20": (70, 70, 1, 2, 2, 20, True),
    "one token": (1, 1, 1, 2, 1, 8, True),
    "one query": (1, 40, 2, 4, 2, 16, False),
    "one key": (9, 1, 2, 4, 2, 16, False),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", CPU_PROVIDERS)
def test_forward_and_backward_match_fp64(kernel_math, make_case, name, case, dtype):
    case = make_case(*case)
    tensors = kernel_math.tensors(case, dtype)
    found = kernel_math.run(PROVIDERS[name](), *tensors, case)
    kernel_math.check(found, kernel_math.truth(*tensors, case), kernel_math.torch_own(*tensors, case))


@pytest.mark.parametrize("name", CPU_PROVIDERS)
def test_any_strides_give_the_same_result(kernel_math, make_case, name):
    case = make_case(12, 12, 2, 4, 2, 8, True)
    q, k, v, _ = kernel_math.tensors(case, torch.float64)
    grad_out = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand(q.shape)
    plain = kernel_math.run(PROVIDERS[name](), q, k.contiguous(), v.contiguous(), grad_out.contiguous(), case)
    column_major = q.mT.contiguous().mT
    assert column_major.stride(-1) != 1
    odd = kernel_math.run(PROVIDERS[name](), column_major, k, v, grad_out, case)
    for key, value in plain.items():
        torch.testing.assert_close(odd[key], value, rtol=1e-12, atol=1e-12, msg=key)
    args = {"causal": True, "scale": case.scale}
    heads_first = plain["lse"].permute(1, 2, 0).contiguous().permute(2, 0, 1)
    token_first = plain["lse"].contiguous()
    for lse in (heads_first, token_first):
        dq, dk, dv = PROVIDERS[name]().backward(grad_out, q, k, v, plain["out"], lse, **args)
        for key, value in (("dq", dq), ("dk", dk), ("dv", dv)):
            torch.testing.assert_close(value, plain[key], rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", CPU_PROVIDERS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_blocks_merge_and_sum_to_the_whole(name, kernel_math, make_case, data):
    causal = data.draw(st.booleans())
    t = data.draw(st.integers(1, 40))
    s = t if causal else data.draw(st.integers(1, 24))
    g, repeat = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    case = make_case(s, t, data.draw(st.integers(1, 2)), g * repeat, g, 8, causal)
    inner = data.draw(st.lists(st.integers(0, t), max_size=4))
    tensors = kernel_math.tensors(case, torch.float64, seed=data.draw(st.integers(0, 99)))
    found = kernel_math.run_in_blocks(PROVIDERS[name](), merge_into, *tensors, case, [0, *sorted(inner), t])
    for key, value in kernel_math.truth(*tensors, case).items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize("name", CPU_PROVIDERS)
def test_blocks_in_bf16_keep_the_error_rule(kernel_math, make_case, name):
    case = make_case(96, 96, 1, 4, 2, 32, True)
    tensors = kernel_math.tensors(case, torch.bfloat16)
    found = kernel_math.run_in_blocks(PROVIDERS[name](), merge_into, *tensors, case, [0, 24, 48, 72, 96])
    kernel_math.check(found, kernel_math.truth(*tensors, case), kernel_math.torch_own(*tensors, case))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CPU_PROVIDERS)
@pytest.mark.parametrize(("s", "t", "causal"), [(5, 0, False), (0, 5, False), (0, 0, True)])
def test_blocks_without_queries_or_keys(kernel_math, make_case, name, s, t, causal, dtype):
    case = make_case(s, t, 2, 4, 2, 8, causal)
    found = kernel_math.run(PROVIDERS[name](), *kernel_math.tensors(case, dtype), case)
    assert found["out"].shape == found["dq"].shape == (s, 2, 4, 8)
    assert found["dk"].shape == found["dv"].shape == (t, 2, 2, 8)
    assert found["lse"].shape == (s, 2, 4)
    assert (found["lse"] == -torch.inf).all()
    assert all((found[key] == 0).all() for key in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("causal", [True, False])
def test_reference_streams_over_queries(kernel_math, make_case, monkeypatch, causal):
    case = make_case(23, 23, 2, 4, 2, 8, causal)
    tensors = kernel_math.tensors(case, torch.float64)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 5 * case.b * case.h * case.t)
    found = kernel_math.run(PROVIDERS["reference"](), *tensors, case)
    for key, value in kernel_math.truth(*tensors, case).items():
        torch.testing.assert_close(found[key], value, rtol=1e-11, atol=1e-11, msg=key)


def test_cpu_backward_repeats_bit_for_bit(kernel_math, make_case):
    case = make_case(300, 300, 2, 4, 2, 32, True)
    tensors = kernel_math.tensors(case, torch.bfloat16)
    first, second = (kernel_math.run(PROVIDERS["cpu"](deterministic=True), *tensors, case) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_out_and_lse_of_other_float_dtypes_are_converted(kernel_math, make_case):
    case = make_case(10, 10, 1, 2, 2, 8, True)
    q, k, v, grad_out = kernel_math.tensors(case, torch.bfloat16)
    kernel, args = PROVIDERS["cpu"](), {"causal": True, "scale": case.scale}
    out, lse = kernel.forward(q, k, v, **args)
    same = kernel.backward(grad_out, q, k, v, out, lse, **args)
    wide = kernel.backward(grad_out.float(), q, k, v, out.float(), lse.double(), **args)
    assert all(torch.equal(a, b) for a, b in zip(same, wide, strict=True))


def test_kernels_record_no_graph(kernel_math, make_case):
    case = make_case(6, 6, 1, 2, 2, 8, True)
    q, k, v, _ = kernel_math.tensors(case, torch.float32)
    out, lse = PROVIDERS["cpu"]().forward(q.requires_grad_(), k, v, causal=True, scale=case.scale)
    assert not out.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", CPU_PROVIDERS)
def test_scales_that_are_not_positive(kernel_math, make_case, name, causal, scale, dtype):
    """Kernels that mask before they scale would find NaN."""

    class Scaled(type(make_case(1, 1, 1, 1, 1, 1, True))):
        scale = 0.0

    Scaled.scale = scale
    for size in (1, 5, 40):
        case = Scaled(size, size, 1, 4, 2, 8, causal)
        tensors = kernel_math.tensors(case, dtype)
        found = kernel_math.run(PROVIDERS[name](), *tensors, case)
        kernel_math.check(
            found,
            kernel_math.truth(*tensors, case),
            kernel_math.torch_own(*tensors, make_case(size, size, 1, 4, 2, 8, causal)),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", CPU_PROVIDERS)
def test_nan_comes_out_as_nan(kernel_math, make_case, name, causal, dtype):
    """Whatever the number of keys: torch's op gives 0 and an lse of 0 where all of a row's few scores are NaN."""
    for size in (1, 2, 3, 7, 8, 15, 16, 17, 40):
        case = make_case(size, size, 1, 4, 2, 8, causal)
        for broken in (slice(0, 1), slice(size // 2, size), slice(0, size)):
            q, k, v, grad_out = kernel_math.tensors(case, dtype)
            k[broken, 0, 1] = torch.nan
            found = kernel_math.run(PROVIDERS[name](), q, k, v, grad_out, case)
            rows = torch.zeros(size, 1, 4, dtype=torch.bool)
            rows[broken.start if causal else 0 :, :, 2:] = True  # heads 2 and 3 read this key/value head
            assert torch.equal(found["lse"].isnan(), rows)
            assert torch.equal(found["out"].isnan().all(-1), rows) and torch.equal(found["out"].isnan().any(-1), rows)
            assert found["dq"].isnan().any(-1)[rows].all()  # hidden keys count 0 times NaN there
            assert found["dk"][broken, 0, 1].isnan().all() and not found["dk"][:, 0, 0].isnan().any()
        q, k, v, grad_out = kernel_math.tensors(case, dtype)
        q[size // 2, 0, 1] = torch.nan
        found = kernel_math.run(PROVIDERS[name](), q, k, v, grad_out, case)
        assert found["lse"].isnan().sum() == 1 and found["out"].isnan().sum() == case.d
        assert found["dk"][: size // 2 + 1, 0, 0].isnan().all() and not found["dk"][:, 0, 1].isnan().any()


def test_zeros_are_no_nan(kernel_math):
    """Their lse is 0 as well, and their output."""
    zero = torch.zeros(1, 1, 2, 8)
    out, lse = PROVIDERS["cpu"]().forward(zero, zero, zero, causal=True, scale=1.0)
    assert (out == 0).all() and (lse == 0).all()


def bad_blocks():
    q, kv = torch.zeros(4, 1, 4, 8), torch.zeros(6, 1, 2, 8)
    yield "causal rectangle", (q, kv, kv, True), "equal numbers"
    yield "three dims", (q[:, 0], kv, kv, False), r"expected q \[s, b, h, d\]"
    yield "v differs from k", (q, kv, kv[:3], False), "expected q"
    yield "batch", (q, kv.expand(6, 2, 2, 8), kv.expand(6, 2, 2, 8), False), "batch or head dim"
    yield "heads", (q[:, :, :3], kv, kv, False), "multiple"
    yield "dtype", (q, kv.double(), kv.double(), False), "convert"


@pytest.mark.parametrize(("block", "message"), [pytest.param(b, m, id=i) for i, b, m in bad_blocks()])
def test_bad_blocks_are_refused(block, message):
    *tensors, causal = block
    with pytest.raises(ValueError, match=message):
        PROVIDERS["reference"]().forward(*tensors, causal=causal, scale=1.0)


def test_backward_refuses_an_lse_of_other_shape(kernel_math, make_case):
    case = make_case(4, 4, 1, 2, 2, 8, True)
    q, k, v, grad_out = kernel_math.tensors(case, torch.float32)
    with pytest.raises(ValueError, match=r"lse has shape \(1, 2, 4\)"):
        PROVIDERS["cpu"]().backward(grad_out, q, k, v, q, torch.zeros(1, 2, 4), causal=True, scale=1.0)
