"""Calls of one rank: results, refused settings, and the bounded number of masks in memory."""

import threading

import pytest
import torch

from megatron_longctx.core.attention import ContextParallelAttention, function
from megatron_longctx.core.kernels import KernelRequest, choose_kernel, dense_call
from megatron_longctx.core.plans import ModeOptions
from megatron_longctx.core.plans.mask import Mask, documents, full
from megatron_longctx.mcore.sequence import ShardedSequence
from megatron_longctx.testing.references import dense_attention, random_qkv
from megatron_longctx.testing.tolerances import relative_error


def test_one_rank_needs_no_process_group_and_returns_its_kernels_results() -> None:
    attention = ContextParallelAttention(schedule="zigzag", kernel="reference")
    assert (attention.rank, attention.world) == (0, 1)
    for length, causal, heads in ((7, True, (4, 2)), (7, False, (3, 1)), (0, True, (4, 4))):
        *leaves, grad_out = random_qkv(length, 2, *heads, 8, torch.float64)
        q, k, v = (x.requires_grad_() for x in leaves)
        out = attention(q, k, v, mask=length if causal else full(length))
        found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), grad_out), strict=True))
        for name, truth in dense_attention(q, k, v, grad_out, causal).items():
            assert relative_error({"out": out.detach(), **found}[name], truth) < 1e-12, (length, name)
    (state,) = attention._devices.values()
    assert state.transport is None and state.pool.num_bytes == 0
    q, k, v, _ = random_qkv(33, 2, 4, 2, 8, torch.bfloat16)
    kernel = choose_kernel("cpu", KernelRequest("cpu", torch.bfloat16, 8, 4, 2))
    expected, _ = kernel.forward(q, k, v, dense_call(33, 33, True), scale=8**-0.5)
    assert torch.equal(ContextParallelAttention(kernel="cpu")(q, k, v, mask=33), expected)


def test_settings_reach_the_plan_and_wrong_ones_are_refused() -> None:
    attention = ContextParallelAttention(schedule="all_gather", options=ModeOptions(6), unit=2)
    assert attention.plan(8).name == "all_gather" and attention.plan(full(8)).mask == full(8)
    with pytest.raises(ValueError, match="length=7: expected a multiple of unit=2"):
        attention.layout(7)
    with pytest.raises(ValueError, match=r"expected one of .*ring"):
        ContextParallelAttention(schedule="spiral")
    with pytest.raises(ValueError, match=r"keep_received=always: expected True, False or None"):
        ContextParallelAttention(keep_received="always")
    with pytest.raises(ValueError, match=r"sum_in_node=always: expected True, False or None"):
        ContextParallelAttention(sum_in_node="always")
    with pytest.raises(ValueError, match="kernel='warp' is unknown"):
        ContextParallelAttention(kernel="warp")(*random_qkv(4, 1, 2, 1, 8, torch.float32)[:3], mask=4)


@pytest.mark.parametrize("sink", [torch.zeros(3), torch.zeros(1), torch.zeros(4, 1), torch.zeros(4).int()])
def test_wrong_sinks_are_refused(sink: torch.Tensor) -> None:
    q, k, v, _ = random_qkv(5, 1, 4, 2, 8, torch.float32)
    attention = ContextParallelAttention(kernel="reference")
    for call in (attention, attention.forward):
        with pytest.raises(ValueError, match=r"sink=torch\.\w+ \[.*expected floating-point numbers, \[4\] on cpu"):
            call(q, k, v, mask=5, sink=sink)
    assert attention(q, k, v, mask=5, sink=torch.zeros(4)).shape == q.shape


@pytest.mark.parametrize("mask", [documents([3]), 7, documents([])])
def test_masks_of_other_lengths_are_refused(mask: Mask | int) -> None:
    q, k, v, _ = random_qkv(5, 1, 4, 2, 8, torch.float32)
    with pytest.raises(ValueError, match=r"q has shape .* holds \d of \d tokens in the zigzag layout"):
        ContextParallelAttention(kernel="reference")(q, k, v, mask=mask)


def test_prepared_masks_are_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are prepared on another thread, while the first one makes calls."""
    attention = ContextParallelAttention(kernel="reference")
    q, k, v, grad = random_qkv(25, 1, 2, 1, 4, torch.float64)
    sequence = ShardedSequence(attention, 25)
    sequence.windows |= {(None, None), (3, 0)}
    attention(q.requires_grad_(), k, v, mask=25).backward(grad)
    attention(q[:, :, :1], k, v, mask=25)
    other = threading.Thread(target=lambda: sequence.prepare([20, 5]))
    other.start()
    for length in range(1, 25):
        attention(q, k, v, mask=documents([length, 25 - length]))
    other.join()
    made: list[object] = []
    monkeypatch.setattr(function, "Pass", lambda *_: made.append(_))
    pack = sequence.pack([20, 5])
    for heads in (1, 2):
        for window in sequence.windows:
            attention(q[:, :, :heads], k, v, mask=pack.mask(window=window)).backward(grad[:, :, :heads])
    assert not made
    with pytest.raises(AttributeError):  # a mask that was not prepared
        attention(q, k, v, mask=documents([2, 3, 20]))
    assert made


def test_bound_masks_are_limited() -> None:
    """Every packed batch has another mask. The masks in use stay."""
    attention = ContextParallelAttention(kernel="reference")
    q, k, v, _ = random_qkv(25, 1, 1, 1, 4, torch.float32)
    often = documents([20, 5])
    packs = [documents([a, b, 25 - a - b]) for a in range(1, 24) for b in range(1, 25 - a)]
    assert len(set(packs)) == 276
    sizes = []
    for number, pack in enumerate([*packs, *(documents([a, 25 - a]) for a in range(1, 25))]):
        attention(q, k, v, mask=pack)
        if number == 0:
            attention(q, k, v, mask=often)
            passes = next(reversed(attention._bound.values()))
        elif number % 10 == 0:
            attention(q, k, v, mask=often)
        sizes.append(len(attention._bound))
    assert max(sizes) == sizes[-1] == sizes[100] < 100, "the limit"
    attention(q, k, v, mask=often)
    assert next(reversed(attention._bound.values())) is passes, "bound once"


def test_a_known_call_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Mask] = []
    monkeypatch.setattr(ContextParallelAttention, "_check", lambda self, q, k, v, mask: checked.append(mask))
    attention, q, one, two = ContextParallelAttention(), torch.zeros(16, 1, 2, 8), Mask.of(16), documents([9, 7])
    for mask in (one, one, 16, two, two, one, one):  # another mask makes every call new
        attention(q, q, q, mask=mask)
    assert checked == [one, two, one]
