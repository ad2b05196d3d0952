"""Extreme numbers: logits with a large common offset, sinks far above and below all logits, and NaN."""

import functools

import pytest
import torch
from torch import Tensor

from megatron_longctx.core.kernels import KernelRequest, choose_kernel
from megatron_longctx.core.kernels.partials import Partial, merge_partials
from megatron_longctx.core.plans import MODES, ModeOptions, build_plan
from megatron_longctx.inference.paged import PackedPartials, merge_ranks
from megatron_longctx.testing.references import dense_attention, kernel_attention, random_qkv
from megatron_longctx.testing.tolerances import assert_as_good_as, lse_rounding, relative_error
from tests.shared.threads import Inputs, attend

LENGTH, HEADS, DIM = 128, 4, 16
OFFSETS = (0.0, 1e2, 1e3)
OPTIONS = ModeOptions(inner_size=2)
KERNEL = functools.partial(choose_kernel, "auto", KernelRequest("cpu", torch.float32, DIM, HEADS, HEADS))


def tensors(offset: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs whose logits are all shifted by about `offset`, since keys have a common component."""
    q, k, v, grad_out = random_qkv(LENGTH, 1, HEADS, HEADS, DIM, torch.float32)
    if offset:
        q[..., 0], k[..., 0] = 4.0, offset / 4 * DIM**0.5
    return q, k, v, grad_out


@pytest.mark.parametrize("offset", OFFSETS)
def test_errors_grow_only_by_the_rounding_of_lse(offset: float) -> None:
    given = tensors(offset)
    truth, own = dense_attention(*given), kernel_attention(KERNEL(), *given, True)
    beyond = lse_rounding(*given, causal=True)
    for mode in MODES:
        leaves = [x.clone().requires_grad_() for x in given[:3]]
        found = attend(build_plan(mode, 4, LENGTH, OPTIONS), Inputs(*leaves, given[3]), DIM**-0.5, KERNEL)
        assert_as_good_as(found, own, truth, (mode, offset), beyond if offset else None)
    assert beyond["dq"] < 0.2 * float(truth["dq"].norm()), "a bound that matters"


@pytest.mark.parametrize("mode", MODES)
def test_sinks_that_take_everything_and_sinks_that_take_nothing(mode: str) -> None:
    """The heads' sinks take nearly everything, some, almost nothing, and nothing."""
    q, k, v, grad_out = (x.double() for x in tensors(0.0))
    sink = torch.tensor([40.0, 5.0, -20.0, -torch.inf], dtype=torch.float64)
    truth = dense_attention(q, k, v, grad_out, sink=sink)
    assert float(truth["out"][:, :, 0].abs().max()) < 1e-12 < float(truth["dsink"][2].abs()) < 1e-6
    inputs = Inputs(*(x.requires_grad_() for x in (q, k, v)), grad_out, sink.requires_grad_())
    found = attend(build_plan(mode, 4, LENGTH, OPTIONS), inputs, DIM**-0.5, KERNEL)
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        assert torch.isfinite(found[name]).all(), name
        for head in range(HEADS):
            part = (..., head, slice(None)) if value.ndim > 1 else (head,)
            norm = float(value[part].norm())
            assert float((found[name][part] - value[part]).norm()) <= 1e-9 * norm, (name, head)
    assert relative_error(found["dsink"][:2], truth["dsink"][:2]) < 1e-9 and found["dsink"][3] == 0


@pytest.mark.parametrize("mode", MODES)
def test_every_query_that_sees_a_nan_gets_nan(mode: str) -> None:
    length, broken = 20, 13
    plan = build_plan(mode, 4, length, OPTIONS)
    for name, expected in (("q", {broken}), ("k", set(range(broken, length))), ("v", set(range(broken, length)))):
        q, k, v, grad_out = random_qkv(length, 1, HEADS, HEADS, DIM, torch.float32)
        {"q": q, "k": k, "v": v}[name][broken] = torch.nan
        out = attend(plan, Inputs(q, k, v, grad_out), DIM**-0.5, KERNEL)["out"]
        assert torch.equal(out.isnan().any(-1), out.isnan().all(-1))
        found = set(out.isnan().flatten(1).any(1).nonzero().flatten().tolist())
        assert found >= expected if name == "v" else found == expected  # hidden keys of a block add 0 times NaN


def test_merges_keep_nan() -> None:
    """In any of several partials, beside numbers and beside empty partials."""
    for broken in range(3):
        for others in (0.5, -torch.inf):
            outs = [torch.full((1, 1, 1, 4), float(others == 0.5)) for _ in range(3)]
            lses = [torch.full((1, 1, 1), others) for _ in range(3)]
            outs[broken].fill_(torch.nan)
            lses[broken].fill_(torch.nan)
            out, lse = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1)
            merge_partials([Partial(0, 0, *part) for part in zip(outs, lses, strict=True)], out, lse)
            assert out.isnan().all() and lse.isnan().all()
            packed = PackedPartials(torch.zeros(3, 5), 1, 1, 4)
            packed.out.copy_(torch.cat(outs))
            packed.lse.copy_(torch.cat(lses))
            assert merge_ranks(packed, torch.empty(1, 1, 4)).isnan().all()
