"""CPU providers, and packed providers over stand-ins, against fp64 attention written out in blocks.py."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.core.kernels import PROVIDERS, AttentionKernel, auto_order, dense_call
from megatron_longctx.core.kernels.providers import fa4, reference
from megatron_longctx.core.plans import KernelCall, Mask, Segment
from megatron_longctx.core.plans.mask import causal, documents
from megatron_longctx.core.plans.slices import FAR
from tests.core.kernels import packed_stand_ins
from tests.core.kernels.blocks import Case, check, run, run_in_blocks, tensors, truth
from tests.core.kernels.packed_stand_ins import RowsKernel
from tests.core.plans.masks import masks

CPU_PROVIDERS = auto_order("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def call(*segments: tuple[int, int, int, int], left: int = FAR, right: int = FAR) -> KernelCall:
    return KernelCall(tuple(Segment(*each) for each in segments), left, right)


CASES = {
    "multi-head causal": Case(17, 17, 2, 4, 4, 16, True),
    "grouped causal": Case(33, 33, 2, 6, 2, 8, True),
    "multi-query, more keys": Case(20, 45, 1, 4, 1, 32, False),
    "grouped, more queries": Case(45, 20, 2, 4, 2, 16, False),
    "head dim 20": Case(70, 70, 1, 2, 2, 20, True),
    "one token": Case(1, 1, 1, 2, 1, 8, True),
    "one query": Case(1, 40, 2, 4, 2, 16, False),
    "one key": Case(9, 1, 2, 4, 2, 16, False),
    "causal, ends aligned": Case(8, 30, 2, 4, 2, 16, call((0, 8, 0, 30), right=0)),
    "a window": Case(40, 40, 1, 4, 2, 16, call((0, 40, 0, 40), left=6, right=0)),
    "a window ahead too, more keys": Case(12, 40, 2, 2, 2, 8, call((0, 12, 0, 40), left=3, right=5)),
}
PACKED = {
    "documents": Case(40, 40, 2, 4, 2, 16, call((0, 7, 0, 7), (7, 8, 7, 8), (8, 40, 8, 40), right=0)),
    "rows between them": Case(50, 60, 2, 4, 2, 16, call((2, 9, 5, 30), (30, 40, 30, 41), (41, 44, 57, 58))),
    "window of documents": Case(40, 70, 1, 4, 1, 8, call((0, 20, 1, 31), (21, 40, 32, 70), left=4, right=0)),
    "a window over fewer keys than queries": Case(30, 9, 1, 4, 2, 8, call((0, 30, 0, 9), left=2)),
    "one segment of some rows": Case(9, 12, 1, 2, 2, 8, call((1, 9, 0, 12), right=0)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", CPU_PROVIDERS)
def test_forward_and_backward_match_fp64(name: str, case: Case, dtype: torch.dtype) -> None:
    of = tensors(case, dtype)
    check(run(PROVIDERS[name](), *of, case), case, *of)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["fa4", "flash"])
def test_packed_providers_match_fp64(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    torch.use_deterministic_algorithms(False)  # loads the code that looks up operators
    monkeypatch.setattr(fa4, "_interface", lambda: packed_stand_ins.fa4(seen))
    for function, of in vars(packed_stand_ins.aten_flash(seen)).items():
        monkeypatch.setattr(torch.ops.aten, function, of)
    kernel = PROVIDERS[name](deterministic=deterministic)
    for case in (*CASES.values(), *PACKED.values()):
        of = tensors(case, torch.float32)
        check(run(kernel, *of, case), case, *of)
        check(run(kernel, *of, case), case, *of)  # with the prepared segments
        assert not torch.are_deterministic_algorithms_enabled()
    assert set(seen) == {deterministic}


def test_compilations_are_logged_once_per_kind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(fa4, "_interface", lambda: packed_stand_ins.fa4([]))
    monkeypatch.setattr(fa4, "_logged", set())
    kernel = PROVIDERS["fa4"]()
    for case in (CASES["multi-head causal"], Case(18, 18, 2, 4, 4, 16, True), CASES["a window"], PACKED["documents"]):
        run(kernel, *tensors(case, torch.float32), case)
    logged = [record.message.partition(" is compiled")[0].partition("fa4: ")[2] for record in caplog.records]
    expected = product(("causal", "window", "causal, packed"), ("forward", "backward"))
    assert logged == [f"{direction} ({kind}, head dims 16 and 16)" for kind, direction in expected]


def test_values_of_another_head_dim() -> None:
    for kernel in (PROVIDERS["reference"](), RowsKernel()):
        for sees in (True, call((0, 12, 0, 12), left=4, right=0)):
            case = Case(12, 12, 2, 4, 2, 24, sees, e=16)
            of = tensors(case, torch.float32)
            check(run(kernel, *of, case), case, *of)


def kernels() -> list[AttentionKernel]:
    return [*(PROVIDERS[name]() for name in CPU_PROVIDERS), RowsKernel()]


@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: type(kernel).__name__)
@settings(deadline=None, max_examples=40)
@given(mask=masks(40), data=st.data())
def test_blocks_of_any_mask_merge_and_sum_to_the_whole(
    kernel: AttentionKernel, mask: Mask, data: st.DataObject
) -> None:
    g, repeat = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    case = Case(mask.length, mask.length, data.draw(st.integers(1, 2)), g * repeat, g, 8, mask.slices)
    of = tensors(case, torch.float64, seed=data.draw(st.integers(0, 99)))
    inner = data.draw(st.lists(st.integers(0, mask.length), max_size=3))
    found = run_in_blocks(kernel, *of, case, [0, *sorted(inner), mask.length])
    for key, value in truth(*of, case).items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: type(kernel).__name__)
def test_blocks_in_bf16_keep_the_error_rule(kernel: AttentionKernel) -> None:
    for mask in (causal(96), documents([40, 56], window=(20, 0))):
        case = Case(96, 96, 1, 4, 2, 32, mask.slices)
        of = tensors(case, torch.bfloat16)
        check(run_in_blocks(kernel, *of, case, [0, 24, 48, 72, 96]), case, *of)


@pytest.mark.parametrize("name", CPU_PROVIDERS)
def test_any_strides_give_the_same_result(name: str) -> None:
    case = Case(12, 12, 2, 4, 2, 8, True)
    q, k, v, _ = tensors(case, torch.float64)
    grad_out = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand(q.shape)
    plain = run(PROVIDERS[name](), q, k.contiguous(), v.contiguous(), grad_out.contiguous(), case)
    column_major = q.mT.contiguous().mT
    assert column_major.stride(-1) != 1
    odd = run(PROVIDERS[name](), column_major, k, v, grad_out, case)
    for key, value in plain.items():
        torch.testing.assert_close(odd[key], value, rtol=1e-12, atol=1e-12, msg=key)
    for lse in (plain["lse"].permute(1, 2, 0).contiguous().permute(2, 0, 1), plain["lse"].contiguous()):
        grads = PROVIDERS[name]().backward(grad_out, q, k, v, plain["out"], lse, case.call, scale=case.scale)
        for key, value in zip(("dq", "dk", "dv"), grads, strict=True):
            torch.testing.assert_close(value, plain[key], rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CPU_PROVIDERS)
@pytest.mark.parametrize(("s", "t", "is_causal"), [(5, 0, False), (0, 5, False), (0, 0, True)])
def test_blocks_without_queries_or_keys(name: str, s: int, t: int, is_causal: bool, dtype: torch.dtype) -> None:
    case = Case(s, t, 2, 4, 2, 8, is_causal)
    found = run(PROVIDERS[name](), *tensors(case, dtype), case)
    assert found["out"].shape == found["dq"].shape == (s, 2, 4, 8)
    assert found["dk"].shape == found["dv"].shape == (t, 2, 2, 8)
    assert found["lse"].shape == (s, 2, 4)
    assert (found["lse"] == -torch.inf).all()
    assert all((found[key] == 0).all() for key in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("sees", [True, False, call((0, 23, 0, 23), left=7, right=2)], ids=str)
def test_reference_streams_over_queries(sees: bool | KernelCall, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(23, 23, 2, 4, 2, 8, sees)
    of = tensors(case, torch.float64)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 5 * case.b * case.h * case.t)
    found = run(PROVIDERS["reference"](), *of, case)
    for key, value in truth(*of, case).items():
        torch.testing.assert_close(found[key], value, rtol=1e-11, atol=1e-11, msg=key)


def test_cpu_backward_repeats_bit_for_bit() -> None:
    case = Case(300, 300, 2, 4, 2, 32, True)
    of = tensors(case, torch.bfloat16)
    first, second = (run(PROVIDERS["cpu"](deterministic=True), *of, case) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_out_and_lse_of_other_float_dtypes_are_converted() -> None:
    case = Case(10, 10, 1, 2, 2, 8, True)
    q, k, v, grad_out = tensors(case, torch.bfloat16)
    kernel, scale = PROVIDERS["cpu"](), case.scale
    out, lse = kernel.forward(q, k, v, case.call, scale=scale)
    same = kernel.backward(grad_out, q, k, v, out, lse, case.call, scale=scale)
    wide = kernel.backward(grad_out.float(), q, k, v, out.float(), lse.double(), case.call, scale=scale)
    assert all(torch.equal(a, b) for a, b in zip(same, wide, strict=True))


def test_kernels_record_no_graph() -> None:
    case = Case(6, 6, 1, 2, 2, 8, True)
    q, k, v, _ = tensors(case, torch.float32)
    out, lse = PROVIDERS["cpu"]().forward(q.requires_grad_(), k, v, case.call, scale=1.0)
    assert not out.requires_grad and not lse.requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.4])
@pytest.mark.parametrize("name", CPU_PROVIDERS)
def test_scales_that_are_not_positive(name: str, scale: float, dtype: torch.dtype) -> None:
    """Kernels that mask before they scale would return NaN."""
    for size, is_causal in ((1, True), (5, False), (5, True), (40, True), (40, False)):
        case = Case(size, size, 1, 4, 2, 8, is_causal, scale=scale)
        of = tensors(case, dtype)
        check(run(PROVIDERS[name](), *of, case), case, *of)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", CPU_PROVIDERS)
def test_nan_comes_out_as_nan(name: str, is_causal: bool, dtype: torch.dtype) -> None:
    """For any number of keys: torch's op returns out 0 and lse 0 if all of a row's few scores are NaN."""
    for size in (1, 2, 3, 7, 8, 15, 16, 17, 40):
        case = Case(size, size, 1, 4, 2, 8, is_causal)
        for broken in (slice(0, 1), slice(size // 2, size), slice(0, size)):
            q, k, v, grad_out = tensors(case, dtype)
            k[broken, 0, 1] = torch.nan
            found = run(PROVIDERS[name](), q, k, v, grad_out, case)
            rows = torch.zeros(size, 1, 4, dtype=torch.bool)
            rows[broken.start if is_causal else 0 :, :, 2:] = True  # heads 2 and 3 read this key/value head
            assert torch.equal(found["lse"].isnan(), rows)
            assert torch.equal(found["out"].isnan().all(-1), rows) and torch.equal(found["out"].isnan().any(-1), rows)
            assert found["dq"].isnan().any(-1)[rows].all()  # hidden keys add 0 times NaN there
            assert found["dk"][broken, 0, 1].isnan().all() and not found["dk"][:, 0, 0].isnan().any()
        q, k, v, grad_out = tensors(case, dtype)
        q[size // 2, 0, 1] = torch.nan
        found = run(PROVIDERS[name](), q, k, v, grad_out, case)
        assert found["lse"].isnan().sum() == 1 and found["out"].isnan().sum() == case.d
        assert found["dk"][: size // 2 + 1, 0, 0].isnan().all() and not found["dk"][:, 0, 1].isnan().any()


def test_zero_inputs_do_not_become_nan() -> None:
    """Their lse and output are 0 too."""
    zero = torch.zeros(1, 1, 2, 8)
    out, lse = PROVIDERS["cpu"]().forward(zero, zero, zero, dense_call(1, 1, True), scale=1.0)
    assert (out == 0).all() and (lse == 0).all()


def bad_blocks() -> list[Any]:
    q, kv, whole = torch.zeros(4, 1, 4, 8), torch.zeros(6, 1, 2, 8), dense_call(4, 6)
    two = kv.expand(6, 2, 2, 8)
    return [
        pytest.param(q, kv, kv, dense_call(4, 7), r"keys \(0, 7\), with 4 queries and 6", id="keys"),
        pytest.param(q, kv, kv, call((0, 2, 0, 3), (2, 4, 3, 6)), "expected .* in a call of reference", id="segments"),
        pytest.param(q[:, 0], kv, kv, whole, r"expected q \[s, b, h, d\]", id="three dims"),
        pytest.param(q, kv, kv[:3], whole, "expected q", id="v differs from k"),
        pytest.param(q, two, two, whole, "batch or head dim", id="batch"),
        pytest.param(q[:, :, :3], kv, kv, whole, "multiple", id="heads"),
        pytest.param(q, kv.double(), kv.double(), whole, "convert", id="dtype"),
    ]


@pytest.mark.parametrize(("q", "k", "v", "wrong", "message"), bad_blocks())
def test_bad_blocks_are_refused(q, k, v, wrong, message) -> None:
    with pytest.raises(ValueError, match=message):
        PROVIDERS["reference"]().forward(q, k, v, wrong, scale=1.0)


def test_backward_refuses_an_lse_of_other_shape() -> None:
    case = Case(4, 4, 1, 2, 2, 8, True)
    q, k, v, grad_out = tensors(case, torch.float32)
    with pytest.raises(ValueError, match=r"lse has shape \(1, 2, 4\)"):
        PROVIDERS["cpu"]().backward(grad_out, q, k, v, q, torch.zeros(1, 2, 4), case.call, scale=1.0)


def test_prepared_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ones used last stay."""
    made: list[int] = []
    monkeypatch.setattr(RowsKernel, "prepare", lambda self, call, rows, device: made.append(rows[0]))
    kernel = RowsKernel()
    for size in [*range(1, 601), 600, 89, 88]:
        x = torch.zeros(size, 1, 1, 8)
        kernel.forward(x, x, x, dense_call(size, size), scale=1.0)
    assert kernel._prepared.cache_info().currsize == 512 and made[600:] == [88]
