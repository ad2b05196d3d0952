"""Calls that keep what they have received: the same output and gradients, fewer messages in backward."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.attention.program import programs
from megatron_longctx.schedules import SCHEDULES, Kind, PlanOptions, build_plan, keeping
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import dense_attention, random_qkv, shard

HEADS = {
    1: ((4, 2),),
    2: ((4, 4), (4, 2), (4, 1)),
    3: ((6, 6), (6, 3), (6, 1)),
    4: ((8, 8), (8, 2), (8, 4), (4, 1)),
}
"""MHA, GQA and MQA, by the number of ranks."""
INNER = {1: 1, 2: 2, 3: 3, 4: 2}

Leaves = list[Tensor]


def attention_of(schedule: str, keep: str, head_chunks: int = 1) -> ContextParallelAttention:
    options = PlanOptions(inner_size=INNER[dist.get_world_size()], head_chunks=head_chunks)
    return ContextParallelAttention(
        dist.group.WORLD, schedule=schedule, kernel="reference", options=options, keep_received=keep
    )


def leaves_of(tensors: tuple[Tensor, ...], layout: Any, rank: int) -> tuple[Leaves, Tensor]:
    *leaves, grad_out = (shard(x, layout, rank) for x in tensors)
    return [x.requires_grad_() for x in leaves], grad_out


def gradients(out: Tensor, leaves: Leaves, grad_out: Tensor) -> dict[str, Tensor]:
    dq, dk, dv = torch.autograd.grad(out, leaves, grad_out)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def worst_errors(rank: int, n: int) -> dict[str, float]:
    """By mode, the largest difference from the fp64 reference."""
    worst = {}
    for schedule, chunks in (*((name, 1) for name in SCHEDULES), ("ulysses", 2)):
        attention = attention_of(schedule, "true", chunks)
        worst.setdefault(schedule, 0.0)
        heads = HEADS[n] if SCHEDULES[schedule].splits_heads else HEADS[n][:2][-1:]
        heads = heads if chunks == 1 else ((2 * n * 2, 2 * n),)
        for (h, g), length, causal in product(heads, (4 * n, 4 * n + 3, max(n - 1, 1)), (True, False)):
            tensors = random_qkv(length, 2, h, g, 8, torch.float64, seed=length)
            layout, truth = attention.layout(length), dense_attention(*tensors, causal)
            leaves, grad_out = leaves_of(tensors, layout, rank)
            out = attention(*leaves, length=length, causal=causal)
            # A gradient with strides of its own, which messages cannot take as it lies.
            strided = grad_out.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
            for name, found in gradients(out, leaves, strided).items():
                if found.numel():
                    difference = (found - shard(truth[name], layout, rank)).abs().max().item()
                    worst[schedule] = max(worst[schedule], difference)
    return worst


def _every_mode(rank: int, n: int) -> dict[str, Any]:
    found: dict[str, Any] = {"errors": worst_errors(rank, n)}
    for schedule in ("ulysses", "usp", "all_gather") if n > 1 else ():
        found["in flight", schedule] = in_flight(rank, n, schedule)
        found["other calls", schedule] = other_calls(rank, n, schedule)
    if n > 1:
        found["saved"] = [saved(rank, n, "ulysses", keep) for keep in ("false", "true", "auto")]
    return found


def in_flight(rank: int, n: int, schedule: str) -> bool:
    """Several layers before the first backward, which come in both orders: none has another's blocks."""
    attention, fetching = (attention_of(schedule, keep) for keep in ("true", "false"))
    length, (h, g) = 8 * n + 3, HEADS[n][1]
    layout = attention.layout(length)
    layers = [random_qkv(length, 2, h, g, 8, torch.float64, seed=seed) for seed in range(3)]
    expected = []
    for tensors in layers:
        leaves, grad_out = leaves_of(tensors, layout, rank)
        expected.append(gradients(fetching(*leaves, length=length), leaves, grad_out))
    equal = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        calls = []
        for tensors in layers:
            leaves, grad_out = leaves_of(tensors, layout, rank)
            calls.append((attention(*leaves, length=length), leaves, grad_out))
        for i in order:
            for name, value in gradients(*calls[i]).items():
                equal.append(torch.equal(value, expected[i][name]))
    return all(equal)


def other_calls(rank: int, n: int, schedule: str) -> dict[str, bool]:
    """Calls without a graph, with a given result, with some inputs only; a backward that is run again."""
    attention, (h, g) = attention_of(schedule, "true"), HEADS[n][1]
    length = 4 * n + 3
    tensors = random_qkv(length, 2, h, g, 8, torch.float64, seed=5)
    leaves, grad_out = leaves_of(tensors, attention.layout(length), rank)
    out = attention(*leaves, length=length)
    plain = gradients(out, leaves, grad_out)

    def same(found: dict[str, Tensor]) -> bool:
        return all(torch.equal(found[name], plain[name]) for name in plain)

    given = attention(*leaves, length=length, result=attention.forward(*leaves, length=length))
    again = attention(*leaves, length=length)
    torch.autograd.grad(again, leaves, grad_out, retain_graph=True)
    (only_v,) = torch.autograd.grad(
        attention(leaves[0].detach(), leaves[1].detach(), leaves[2], length=length), leaves[2:], grad_out
    )
    with torch.no_grad():
        without = attention(*leaves, length=length)
    return {
        "given": same(gradients(given, leaves, grad_out)),
        "again": same(gradients(again, leaves, grad_out)),
        "only v": torch.equal(only_v, plain["dv"]),
        "without": torch.equal(without, plain["out"]),
    }


def saved(rank: int, n: int, schedule: str, keep: str) -> tuple[int, int]:
    """Bytes that autograd keeps of a call, and of them those of the caller's own tensors."""
    length, heads = 64 * n, 2 * n
    attention = attention_of(schedule, keep)
    leaves, _ = leaves_of(random_qkv(length, 1, heads, heads, 8, torch.float32), attention.layout(length), rank)
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attention(*leaves, length=length)
    own = {x.untyped_storage().data_ptr() for x in (*leaves, out)}
    return sum(found.values()), sum(size for pointer, size in found.items() if pointer in own)


@pytest.fixture(scope="module", params=(1, 2, 3, 4), ids=lambda n: f"{n} ranks")
def found(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    return request.param, run_distributed(_every_mode, request.param, request.param)


def test_exact_in_fp64_whatever_is_kept(found: Any) -> None:
    n, ranks = found
    for schedule in SCHEDULES:
        assert max(rank["errors"][schedule] for rank in ranks) < 1e-12, (schedule, n)


def test_every_call_in_flight_has_kept_its_own(found: Any) -> None:
    for rank in found[1]:
        assert all(value for key, value in rank.items() if key[0] == "in flight"), rank


def test_calls_with_nothing_to_keep_are_as_without(found: Any) -> None:
    for rank in found[1]:
        for key, value in rank.items():
            assert key[0] != "other calls" or all(value.values()), (key, value)


def test_ulysses_keeps_what_it_attends_in_the_place_of_its_own(found: Any) -> None:
    n, ranks = found
    tensor = 64 * 2 * n * 8 * 4  # one of q, k, v, out of a rank
    lse = 64 * 2 * n * 4
    for rank in ranks if n > 1 else ():
        fetched, kept, auto = rank["saved"]
        assert fetched == (4 * tensor + lse, 4 * tensor)
        assert kept == auto == (4 * tensor + lse, 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_kept_tensor_is_left_and_found(schedule: str) -> None:
    """Forward and backward count alike what is kept; of what is kept nothing lies in memory that passes share."""
    plan = keeping(build_plan(schedule, 4, 67, options=PlanOptions(inner_size=2)))
    for rank in range(4):
        forward, backward = programs(plan, rank)
        kept = {call.attend: call for step in forward.steps for call in step.calls if call.num_kept}
        taken = {call.attend: call for step in backward.steps for call in step.calls if call.num_kept}
        assert forward.num_kept == backward.num_kept and {*kept} == {*taken}
        for attend, call in kept.items():
            assert (call.kept, call.num_kept) == (taken[attend].kept, taken[attend].num_kept)
            for places in (call.queries if call.keeps_queries else (), call.keys if call.keeps_keys else ()):
                assert len(places) > 1 or all(forward.slots[place.slot].kept for place in places)
        assert not any(slot.kept for slot in backward.slots)


def test_ulysses_needs_no_copy_to_bring_its_blocks_together() -> None:
    for plan in (build_plan("ulysses", 4, 67), keeping(build_plan("ulysses", 4, 67))):
        for rank, way in product(range(4), (0, 1)):
            (call,) = [call for step in programs(plan, rank)[way].steps for call in step.calls]
            assert len(call.queries) == 1 and len(call.keys) == (0 if call.keeps_keys and way else 1)


def test_a_kept_call_reads_nothing_of_its_own() -> None:
    assert programs(keeping(build_plan("ulysses", 4, 64)), 1)[1].reads_home == {Kind.GRAD}
    assert programs(build_plan("ulysses", 4, 64), 1)[1].reads_home == {Kind.Q_GRAD, Kind.KV}


def test_an_unknown_wish_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keep_received=always: expected one of auto, true, false"):
        ContextParallelAttention(keep_received="always")
