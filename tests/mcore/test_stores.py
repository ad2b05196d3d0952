"""Layers' inputs and attention's results between forward and backward: where they are stored, and for how long."""

import gc
import weakref
from collections.abc import Iterable
from itertools import cycle

import pytest
import torch

from megatron_longctx.core.attention import AttentionResult, ContextParallelAttention
from megatron_longctx.core.layout import build_layout
from megatron_longctx.core.plans.mask import causal, documents, full
from megatron_longctx.mcore.stores import AttentionTape, HostStore, Store, StoredTensors, _HostTensors, first_tokens
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import random_qkv
from megatron_longctx.testing.tolerances import relative_error
from megatron_longctx.training.ranks import world_group

Run = tuple[StoredTensors, StoredTensors]  # a layer's input and a result


def _result(seed: int, device: str = "cpu") -> AttentionResult:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(2, 4, 6, 8, generator=generator).permute(2, 0, 1, 3)  # strided, as kernels return it
    lse = torch.randn(2, 4, 6, generator=generator).permute(2, 0, 1)
    return AttentionResult(out.to(device), lse.to(device))


def _same(found: AttentionResult, expected: AttentionResult) -> bool:
    return all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(found, expected, strict=True))


def _runs(store: HostStore, seeds: Iterable[int], device: str = "cpu") -> list[Run]:
    runs = []
    for seed in seeds:
        store.begin_run()
        result = _result(seed, device)
        runs.append((store.put(result.out[:, :1] + 1), store.put(*result)))
    return runs


def test_the_device_store_returns_the_same_tensors_once() -> None:
    result = _result(0)
    stored = Store().put(*result)
    assert all(x is y for x, y in zip(stored.take(), result, strict=True))
    with pytest.raises(RuntimeError, match="expected one backward per forward"):
        stored.take()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_host_store_returns_equal_tensors_in_any_order(device: str) -> None:
    store = HostStore()
    # Two micro-batches of four layers: the first of a pipeline goes back first, or last, or layers come at random.
    for order in ((3, 2, 1, 0, 7, 6, 5, 4), range(7, -1, -1), (2, 0, 7, 3, 1, 5, 6, 4)):
        runs = _runs(store, range(8), device)
        for i in order:
            (layer_input,), found = runs[i][0].take(), AttentionResult(*runs[i][1].take())
            assert found.out.device.type == layer_input.device.type == device and _same(found, _result(i, device))
            assert torch.equal(layer_input, found.out[:, :1] + 1)
    with pytest.raises(RuntimeError, match="expected one backward per forward"):
        runs[0][1].take()


def _runs_on_device(runs: list[Run]) -> list[int]:
    """Return the runs whose tensors are all on the device; no run is there in part."""
    present = [tuple(stored._on_device is not None for stored in run) for run in runs]
    assert set(present) <= {(True, True), (False, False)}
    return [i for i, run in enumerate(present) if all(run)]


def test_two_runs_at_most_are_on_the_device_and_one_is_fetched_ahead() -> None:
    store = HostStore()
    runs = _runs(store, range(4))
    assert _runs_on_device(runs) == [2, 3], "backward begins with them"
    latest = runs[3][1]._on_device
    runs[3][0].take()
    assert runs[3][1].take() == latest, "no copy"
    runs.pop()
    assert _runs_on_device(runs) == [2]
    for i in (2, 1):
        runs[i][0].take()
        assert all(stored._on_device is not None for stored in runs[i - 1]), "both are fetched one layer ahead"
        runs[i][1].take()
        runs.pop()
        assert _runs_on_device(runs) == [i - 1]
    runs += _runs(store, range(4))  # another micro-batch's forward, before this one's last layer has returned
    assert _runs_on_device(runs) == [3, 4]
    runs[0][0].take()
    assert not _runs_on_device(runs[1:]), "one micro-batch's backward leaves no room for the other's tensors"


def test_tensors_that_have_left_are_freed() -> None:
    store, references, stored = HostStore(), [], []
    for i in range(4):
        store.begin_run()
        result = _result(i)
        references.append(weakref.ref(result.out))
        stored.append(store.put(*result))
        del result
    gc.collect()
    assert [reference() is not None for reference in references] == [False, False, True, True]


def test_host_memory_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = []
    store, empty = HostStore(), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: allocated.append(a) or empty(*a, **k))
    for step in range(3):
        runs = _runs(store, range(3))
        if step == 1:
            runs.clear()  # a forward without a backward
        for run in reversed(runs):
            for stored in run:
                stored.take()
        del runs
        assert len(allocated) == 3 * 3, "an input, an out and an lse of each of three runs"


def test_a_tape_computes_once_and_replays_once() -> None:
    attention = ContextParallelAttention(kernel="reference")
    q, k, v, grad = random_qkv(7, 1, 4, 2, 8, torch.float64)
    sink = torch.tensor([0.0, 9.0, -1.0, 3.0], dtype=torch.float64, requires_grad=True)
    leaves = [*(x.requires_grad_() for x in (q, k, v)), sink]
    expected = attention(q, k, v, mask=full(7), scale=0.3, sink=sink)
    gradients = torch.autograd.grad(expected, leaves, grad)
    for store in (Store(), HostStore()):
        tape = AttentionTape(store)
        arguments = {"mask": full(7), "scale": 0.3, "sink": sink}
        first = tape.attend(attention, (q, k, v), **arguments)
        assert not first.requires_grad and torch.equal(first, expected)
        other = tape.attend(attention, (q, k, v), **arguments | {"scale": 0.1})
        tape.rewind()
        replayed = tape.attend(attention, (q, k, v), **arguments)
        assert torch.equal(replayed, expected)
        assert all(map(torch.equal, torch.autograd.grad(replayed, leaves, grad), gradients))
        assert torch.equal(tape.attend(attention, (q, k, v), **arguments | {"scale": 0.1}), other)
        with pytest.raises(RuntimeError, match="expected one backward per forward"):
            tape.attend(attention, (q, k, v), **arguments)


def test_a_given_result_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = ContextParallelAttention(kernel="reference")
    q, k, v, _ = random_qkv(7, 1, 4, 2, 8, torch.float64)
    result = attention.forward(q, k, v, mask=7)
    assert result.out.shape == (7, 1, 4, 8) and result.lse.shape == (7, 1, 4)

    def forbidden(*_: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("megatron_longctx.core.attention.function.forward_pass", forbidden)
    out = attention(q.requires_grad_(), k, v, mask=7, result=result)
    assert torch.equal(out, result.out) and out.requires_grad and not result.out.requires_grad
    with pytest.raises(ValueError, match=r"q has shape"):
        attention(q, k, v, mask=8, result=result)


PARTLY_KEPT = {
    "plain": (causal(50), ("zigzag", "ring", "ulysses", "helper")),
    "few tokens": (causal(4), ("zigzag",)),
    "window": (causal(50, (9, 0)), ("zigzag", "all_gather")),
    "pack": (documents((9, 30, 1, 12)), ("zigzag", "all_gather")),
    "tree": (documents((9, 6, 1, 12, 8), parents=(-1, 0, 1, 0, 3)), ("zigzag", "helper")),
    "not causal": (full(40), ("ulysses",)),
}


def _partly_kept(mode: str, name: str, kept: float, store: type[Store]) -> tuple[int, list[float]]:
    """Return how many results are kept, and the errors of the output and of all gradients."""
    mask = PARTLY_KEPT[name][0]
    attention = ContextParallelAttention(world_group(), schedule=mode)
    *qkv, grad = (attention.shard(x, mask) for x in random_qkv(mask.length, 2, 6, 3, 8, torch.float64))
    inputs = [x.requires_grad_() for x in (*qkv, torch.ones(6, dtype=torch.float64))]
    tape = AttentionTape(store(kept))
    found = []
    for run in range(3):
        out = (
            tape.attend(attention, (inputs[0], inputs[1], inputs[2]), mask=mask, scale=None, sink=inputs[3])
            if run < 2
            else attention(*inputs[:3], mask=mask, sink=inputs[3])
        )
        if run == 0:
            tape.rewind()
            (result,) = tape._results
            tensors = result._on_host if isinstance(result, _HostTensors) else result._on_device
            rows = len((tensors or ())[0])
        found.append([out, *torch.autograd.grad(out, inputs, grad)] if run else [out])
    return rows, [relative_error(x.detach(), y.detach()) for x, y in zip(found[1], found[2], strict=True)]


def _all_partly_kept(rank: int) -> list[tuple[str, int, int, list[float]]]:
    found = []
    for name, (mask, modes) in PARTLY_KEPT.items():
        for mode, (kept, store) in zip(modes, cycle(((0.5, Store), (0.3, HostStore))), strict=False):
            tokens = ContextParallelAttention(world_group(), schedule=mode).layout(mask).num_tokens(rank)
            rows, errors = _partly_kept(mode, name, kept, store)
            found.append((f"{name}, {mode}, {kept}", rows, tokens, errors))
    return found


def test_results_that_are_not_kept_are_computed_again() -> None:
    for found in run_distributed(_all_partly_kept, 3):
        for where, rows, tokens, errors in found:
            assert all(error < 1e-12 for error in errors), where
            assert rows < tokens or tokens < 4, where


@pytest.mark.parametrize(
    ("layout", "n", "shares"),
    [("zigzag", 1, [0.25]), ("striped", 4, [0.25] * 4), ("zigzag", 4, [0.0625, 0.1875, 0.3125, 0.4375])],
)
def test_half_of_the_results_take_this_share_of_forward_again(layout: str, n: int, shares: list[float]) -> None:
    mask, placed = causal(4096), build_layout(layout, n, 4096)
    for rank, share in enumerate(shares):
        first, slots = first_tokens(mask, placed, rank, 0.5, torch.device("cpu"))
        assert len(slots) * 2 == placed.num_tokens(rank)
        own = [span for span in placed.spans[rank] if len(span)]
        pairs = sum(each + 1 for span in own for each in span if each < 2048)
        assert first.pairs == causal(2048).pairs and pairs / (mask.pairs / n) == pytest.approx(share, rel=0.01)


def test_a_quarter_of_the_results_is_of_the_last_tokens_of_each_document_on_each_rank() -> None:
    mask, placed, left = documents([20, 44]), build_layout("zigzag", 2, 64), list[int]()
    for rank in range(2):
        first, slots = first_tokens(mask, placed, rank, 0.25, torch.device("cpu"))
        own = [*placed.tokens(rank)]
        parts = [([x for x in own if start <= x < stop], start) for start, stop, _ in mask.documents]
        assert [own[i] for i in slots] == [x for part, _ in parts for x in part[int(0.75 * len(part)) :]]
        left += [x - start + 1 for part, start in parts for x in part[: int(0.75 * len(part))]]
    assert first.pairs == sum(left)
