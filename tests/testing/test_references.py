"""References agree with torch, and the error rule accepts and refuses the right results."""

import pytest
import torch
import torch.nn.functional as F

from megatron_longctx.core.kernels import KernelRequest, choose_kernel
from megatron_longctx.core.layout import build_layout
from megatron_longctx.testing.references import dense_attention, kernel_attention, random_qkv, shard, unshard
from megatron_longctx.testing.tolerances import assert_as_good_as, relative_error


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("g", [4, 2, 1])
def test_dense_attention_agrees_with_torch(causal, g):
    tensors = random_qkv(13, 2, 4, g, 8, torch.float64)
    found = dense_attention(*tensors, causal, scale=0.2)
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    q, k, v = (x.permute(1, 2, 0, 3) for x in leaves)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.2, enable_gqa=True).permute(2, 0, 1, 3)
    grads = torch.autograd.grad(out, leaves, tensors[3])
    by_kernel = kernel_attention(
        choose_kernel("reference", KernelRequest("cpu", torch.float64, 8, 4, g)), *tensors, causal, 0.2
    )
    for name, expected in zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True):
        assert relative_error(found[name], expected) < 1e-13
        assert relative_error(by_kernel[name], expected) < 1e-13


def test_dense_attention_of_an_empty_sequence():
    found = dense_attention(*random_qkv(0, 1, 2, 1, 4, torch.float64), True)
    assert {name: tuple(x.shape) for name, x in found.items()} == {
        "out": (0, 1, 2, 4),
        "dq": (0, 1, 2, 4),
        "dk": (0, 1, 1, 4),
        "dv": (0, 1, 1, 4),
    }


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("length", [0, 2, 7, 12])
def test_shard_and_unshard_are_inverse(name, length):
    layout = build_layout(name, 3, length)
    x = torch.arange(length * 2.0).view(length, 2)
    shards = [shard(x, layout, rank) for rank in range(3)]
    assert [len(s) for s in shards] == [layout.num_tokens(rank) for rank in range(3)]
    assert shards[0][:, 0].tolist() == [2.0 * token for token in layout.tokens(0)]
    assert torch.equal(unshard(shards, layout), x)


def test_the_error_rule():
    generator = torch.Generator().manual_seed(0)
    truth = {"out": torch.randn(64, 8, generator=generator, dtype=torch.float64)}
    noise = torch.randn(64, 8, generator=generator, dtype=torch.float64)

    def off_by(factor, dtype=torch.float32):
        return {"out": (truth["out"] + factor * noise).to(dtype)}

    assert_as_good_as(off_by(1.9e-3), off_by(1e-3), truth)
    with pytest.raises(AssertionError, match=r"a case: out is .* off, at most"):
        assert_as_good_as(off_by(2.1e-3), off_by(1e-3), truth, "a case")
    # If the single-device kernel happens to be exact, errors up to rounding are allowed, and no larger ones.
    exact = {"out": truth["out"]}
    assert_as_good_as(off_by(0, torch.bfloat16), {"out": truth["out"].bfloat16()}, truth)
    with pytest.raises(AssertionError, match="off"):
        assert_as_good_as(off_by(1e-9, torch.float64), exact, truth)
    with pytest.raises(AssertionError, match=r"out \(63, 8\), not \(64, 8\)"):
        assert_as_good_as({"out": truth["out"][1:]}, exact, truth)
    with pytest.raises(AssertionError, match=r"out is torch.float32, not torch.float64"):
        assert_as_good_as(off_by(0), exact, truth)
    with pytest.raises(AssertionError, match="not finite"):
        assert_as_good_as({"out": truth["out"] * torch.nan}, exact, truth)


def test_the_error_rule_where_the_truth_is_zero():
    truth = {"dq": torch.zeros(3, 4, dtype=torch.float64)}
    own = {"dq": torch.zeros(3, 4)}
    assert_as_good_as({"dq": torch.full((3, 4), 1e-7)}, own, truth)
    with pytest.raises(AssertionError, match="dq is not zero"):
        assert_as_good_as({"dq": torch.full((3, 4), 1e-3)}, own, truth)
    assert relative_error(torch.full((4,), 1e-3), torch.zeros(4)) == pytest.approx(2e-3)
