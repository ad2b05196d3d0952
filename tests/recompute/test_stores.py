"""Results of attention between forward and backward: what is kept where, for how long."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megatron_longctx.attention import AttentionResult, ContextParallelAttention
from megatron_longctx.recompute import AttentionTape, DeviceStore, HostStore
from megatron_longctx.schedules.mask import full
from megatron_longctx.testing.references import random_qkv


def _result(seed: int, device: str = "cpu") -> AttentionResult:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(2, 4, 6, 8, generator=generator).permute(2, 0, 1, 3)  # strided, as kernels give it
    lse = torch.randn(2, 4, 6, generator=generator).permute(2, 0, 1)
    return AttentionResult(out.to(device), lse.to(device))


def _same(found: AttentionResult, expected: AttentionResult) -> bool:
    return all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(found, expected, strict=True))


def test_the_device_store_hands_back_the_same_tensors() -> None:
    result = _result(0)
    kept = DeviceStore().keep(result)
    assert kept.take() is result
    with pytest.raises(AssertionError, match="once"):
        kept.take()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_host_store_gives_back_equal_results_in_any_order(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for order in (range(4), reversed(range(4)), (2, 0, 3, 1)):
        store = HostStore()
        kept = [store.keep(_result(i, device)) for i in range(4)]
        for i in order:
            found = kept[i].take()
            assert found.out.device.type == device and _same(found, _result(i, device))


def _held(references: list[weakref.ref[torch.Tensor]]) -> list[bool]:
    gc.collect()
    return [reference() is not None for reference in references]


def test_only_the_latest_result_stays_on_the_device() -> None:
    store = HostStore()
    kept, references = [], []
    for i in range(3):
        result = _result(i)
        references.append(weakref.ref(result.out))
        kept.append(store.keep(result))
        del result
    assert _held(references) == [False, False, True]
    latest = kept.pop().take()
    assert latest.out is references[2](), "backward begins with it: no copy"
    fetched_ahead = kept[1]._here  # type: ignore[attr-defined]
    assert fetched_ahead is not None and kept[0]._here is None  # type: ignore[attr-defined]
    assert kept.pop().take() is fetched_ahead
    assert kept[0]._here is not None  # type: ignore[attr-defined]


def test_a_tape_computes_once_and_is_played_back_once() -> None:
    attention = ContextParallelAttention(kernel="reference")
    q, k, v, grad = random_qkv(7, 1, 4, 2, 8, torch.float64)
    sink = torch.tensor([0.0, 9.0, -1.0, 3.0], dtype=torch.float64, requires_grad=True)
    leaves = [*(x.requires_grad_() for x in (q, k, v)), sink]
    expected = attention(q, k, v, mask=full(7), scale=0.3, sink=sink)
    gradients = torch.autograd.grad(expected, leaves, grad)
    for store in (DeviceStore(), HostStore()):
        tape = AttentionTape(store)
        arguments = {"mask": full(7), "scale": 0.3, "sink": sink}
        first = tape.attend(attention, (q, k, v), **arguments)
        assert not first.requires_grad and torch.equal(first, expected)
        tape.rewind()
        replayed = tape.attend(attention, (q, k, v), **arguments)
        assert torch.equal(replayed, expected)
        assert all(map(torch.equal, torch.autograd.grad(replayed, leaves, grad), gradients))
        with pytest.raises(RuntimeError, match="expected one backward per forward"):
            tape.attend(attention, (q, k, v), **arguments)


def test_a_given_result_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = ContextParallelAttention(kernel="reference")
    q, k, v, _ = random_qkv(7, 1, 4, 2, 8, torch.float64)
    result = attention.forward(q, k, v, mask=7)
    assert result.out.shape == (7, 1, 4, 8) and result.lse.shape == (7, 1, 4)

    def forbidden(*_: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("megatron_longctx.attention.function.Run", forbidden)
    out = attention(q.requires_grad_(), k, v, mask=7, result=result)
    assert torch.equal(out, result.out) and out.requires_grad and not result.out.requires_grad
    with pytest.raises(ValueError, match=r"q has shape"):
        attention(q, k, v, mask=8, result=result)
