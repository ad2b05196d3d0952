"""The executor of recordings computes, bit for bit, what the executor of programs computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_longctx.core.attention.kv_format import Int8KV
from megatron_longctx.core.kernels import AttentionKernel, KernelRequest, choose
from megatron_longctx.core.plans import MODES, Mask, ModeOptions, Plan, build_plan, keep_received, sum_in_nodes
from megatron_longctx.core.plans.cache_modes import CACHE_MODES
from megatron_longctx.core.plans.mask import documents
from megatron_longctx.inference.batch import Batch
from megatron_longctx.inference.cache_manager import CacheManager
from megatron_longctx.inference.cached_attention import CachedAttention, CacheShape
from megatron_longctx.testing.references import random_qkv
from tests.shared.plans import helper_plan, one_sided_plan, tangled_plan
from tests.shared.threads import Inputs, ThreadedRanks, attend

MASKS = {
    "causal": documents([53]),
    "full": documents([48], causal=False),
    "window": documents([53], window=(11, None)),
    "documents": documents([20, 3, 17, 13]),
    "tree with prefixes": documents([20, 18, 15], prefixes=[5, 0, 3], parents=[-1, 0, 0]),
    "fewer tokens than ranks": documents([3]),
}
HOSTS = {"p2p": None, "peer": [(0, 1, 2, 3)] * 4, "hybrid": [(0, 1), (0, 1), (2, 3), (2, 3)]}
OPTIONS = {"usp": ModeOptions(inner_size=2), "double_ring": ModeOptions(inner_size=2)}
HEADS, KV_HEADS, DIM = 8, 4, 4


def plan_of(mode: str, mask: Mask, options: ModeOptions | None = None) -> Plan:
    return build_plan(mode, 4, mask, options or OPTIONS.get(mode))


def kernel(mask: Mask, dtype: torch.dtype) -> AttentionKernel:
    packed = len(mask.slices) > 1
    request = KernelRequest("cpu", dtype, DIM, HEADS, KV_HEADS, windows=mask.has_windows, packed=packed)
    return choose("reference", request)


def inputs(mask: Mask, sink: bool, e: int, differentiable: bool = True) -> Inputs:
    q, k, v, grad = random_qkv(mask.length, 2, HEADS, KV_HEADS, DIM, torch.float32, e=e)
    sinks = torch.linspace(-2, 3, HEADS).requires_grad_(differentiable) if sink else None
    return Inputs(*(x.requires_grad_(differentiable) for x in (q, k, v)), grad, sinks)


def check(plan: Plan, hosts: Any = None, *, sink: bool = False, e: int = DIM, **settings: Any) -> None:
    given = inputs(plan.mask, sink, e, differentiable=settings.get("kv") is None)

    def found(executor: str) -> dict[str, Tensor]:
        make = lambda: kernel(plan.mask, torch.float32)  # noqa: E731
        return attend(plan, given, DIM**-0.5, make, hosts, executor=executor, **settings)

    before = found("program")
    now = found("plan")
    assert now.keys() == before.keys() and all(torch.equal(now[name], x) for name, x in before.items())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_and_mask_over_every_transport(mode: str, mask: str) -> None:
    plan, turn = plan_of(mode, MASKS[mask]), [*MODES].index(mode) + [*MASKS].index(mask)
    hosts = [HOSTS[name] for name in ("p2p", "peer", "hybrid")]
    check(plan, hosts[turn % 3], overlap=mask != "documents")
    check(keep_received(plan), hosts[(turn + 1) % 3], sink=True, e=DIM + 2)


@pytest.mark.parametrize("hosts", HOSTS)
def test_sums_in_nodes_and_plans_of_other_shapes(hosts: str) -> None:
    check(sum_in_nodes(plan_of("zigzag", MASKS["full"]), 2), HOSTS[hosts])
    check(sum_in_nodes(plan_of("double_ring", MASKS["causal"]), 2), HOSTS[hosts])
    for plan in (helper_plan(3, 24), one_sided_plan(8), tangled_plan(12)):
        ranks = tuple(range(plan.n))
        check(
            plan, {"p2p": None, "peer": [ranks] * plan.n, "hybrid": [ranks[:-1]] * (plan.n - 1) + [ranks[-1:]]}[hosts]
        )


@pytest.mark.parametrize("mode", ["zigzag", "ulysses", "helper"])
def test_keys_and_values_in_8_bits(mode: str) -> None:
    for mask, hosts in zip(("causal", "documents", "window"), HOSTS.values(), strict=True):
        check(plan_of(mode, MASKS[mask]), hosts, kv=Int8KV(DIM, torch.float32))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("mode", CACHE_MODES)
def test_prompts_over_a_cache(mode: str, int8: bool) -> None:
    shape = CacheShape(1, HEADS, KV_HEADS, DIM, torch.float32, int8=int8)

    def rounds(executor: str, peers: bool) -> list[Tensor]:
        ranks = ThreadedRanks(2, [(0, 1)] * 2 if peers else None)

        def of_rank(rank: int) -> list[Tensor]:
            manager = CacheManager(2, 64, 4)
            attention = CachedAttention(None, shape, manager.slots_per_rank, torch.device("cpu"))
            attention._executor, attention.rank, attention.world = executor, rank, 2
            attention._runtime = replace(attention._runtime, transport=ranks.transport(rank))
            sessions, outs = [manager.open() for _ in range(2)], []
            for number, counts in enumerate(((23, 9), (1, 8), (12, 2))):
                batch = Batch(2, manager.slots_per_rank, manager.append(dict(zip(sessions, counts, strict=True))))
                attention.begin(batch, mode, joined=number == 2)
                q, k, v, _ = random_qkv(attention._num_new, 1, HEADS, KV_HEADS, DIM, torch.float32, seed=rank + number)
                outs.append(attention(0, q, k, v))
            return outs

        return [x for each in ranks.run(of_rank) for x in each]

    for peers in (False, True):
        assert all(map(torch.equal, rounds("plan", peers), rounds("program", peers)))
