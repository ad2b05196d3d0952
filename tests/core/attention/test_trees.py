"""Trees of shared prefixes in every mode: attention of separate sequences, in plans that are quickly proven."""

from __future__ import annotations

import functools
import random
import time
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_longctx.core.kernels import AttentionKernel, KernelRequest, choose_kernel
from megatron_longctx.core.plans import MODES, ModeOptions, Plan, backward_plan, build_plan
from megatron_longctx.core.plans.mask import documents
from megatron_longctx.testing.references import dense_attention, random_qkv
from megatron_longctx.testing.tolerances import relative_error
from megatron_longctx.testing.verify import verify
from tests.shared.threads import Inputs, attend

NAMES = "out", "dq", "dk", "dv"


class Tree(NamedTuple):
    """n: the number of ranks. d: the head dim."""

    n: int
    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    d: int = 4

    def tokens(self, node: int) -> Tensor:
        """Return the tokens from the root to the end of a node."""
        own = torch.arange(self.lengths[node]) + sum(self.lengths[:node])
        return own if self.parents[node] < 0 else torch.cat([self.tokens(self.parents[node]), own])


def random_tree(nodes: int, n: int, longest: int = 6) -> Tree:
    """Return trees of up to 6 nodes from root to leaf, about half of them of 1 token."""
    draw, depths, parents = random.Random(nodes), [0], list[int]()
    for _ in range(nodes):
        parents.append(draw.choice([each - 1 for each, depth in enumerate(depths) if depth < 6]))
        depths.append(depths[parents[-1] + 1] + 1)
    return Tree(n, tuple(draw.choice((1, draw.randint(1, longest))) for _ in parents), tuple(parents))


TREES = {
    # The shape of NeMo Automodel's prefix_tree_magi_parity: a prompt with three completions.
    "prompt": Tree(4, (48, 16, 24, 8), (-1, 0, 0, 0), 64),
    "ranks without tokens": Tree(8, (1, 1, 1), (-1, 0, 0)),
    "one node": random_tree(1, 2),
    "20 nodes": random_tree(20, 4),
    "200 nodes": random_tree(200, 8),
}


@functools.cache
def case(name: str) -> tuple[Inputs, dict[str, Tensor]]:
    """Return inputs, and the sums over separate sequences, in the first of which each token has its gradient."""
    tree = TREES[name]
    whole = random_qkv(sum(tree.lengths), 1, 8, 8, tree.d, torch.float64)
    expected = {key: torch.zeros_like(whole[0]) for key in NAMES}
    counted = torch.zeros(sum(tree.lengths), dtype=torch.bool)
    for leaf in sorted({*range(len(tree.lengths))} - {*tree.parents}):
        path = tree.tokens(leaf)
        q, k, v, grad = (x[path] for x in whole)
        found = dense_attention(q, k, v, grad * ~counted[path, None, None, None])
        counted[path] = True
        expected["out"][path] = found["out"]
        for key in NAMES[1:]:
            expected[key].index_add_(0, path, found[key])
    return Inputs(*(x.requires_grad_() for x in whole[:3]), whole[3]), expected


def plan_of(mode: str, n: int, lengths: tuple[int, ...], parents: tuple[int, ...]) -> Plan:
    return build_plan(mode, n, documents(lengths, parents=parents), ModeOptions())


def kernel(d: int) -> AttentionKernel:
    return choose_kernel("reference", KernelRequest("cpu", torch.float64, d, 8, 8))


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("mode", MODES)
def test_a_tree_is_its_branches_apart(mode: str, name: str) -> None:
    (inputs, expected), tree = case(name), TREES[name]
    plan = plan_of(mode, *tree[:3])
    verify(plan)
    verify(backward_plan(plan), plan)
    if len(tree.lengths) == 200 and mode != "zigzag":
        return  # many calls of the kernel: the plan is proven
    found = attend(plan, inputs, tree.d**-0.5, lambda: kernel(tree.d))
    assert all(relative_error(found[key], expected[key]) < 1e-11 for key in NAMES)


@pytest.mark.parametrize("mode", MODES)
def test_a_branch_that_is_left_out_changes_nothing_elsewhere(mode: str) -> None:
    inputs, _ = case("20 nodes")
    n, lengths, parents, d = TREES["20 nodes"]
    kept = torch.ones(sum(lengths), dtype=torch.bool)
    kept[sum(lengths[:-1]) :] = False
    whole = inputs._replace(grad_out=inputs.grad_out * kept[:, None, None, None])
    less = Inputs(*(x.detach()[kept].requires_grad_() for x in inputs[:3]), inputs.grad_out[kept])
    found = attend(plan_of(mode, n, lengths, parents), whole, 0.5, lambda: kernel(d))
    expected = attend(plan_of(mode, n, lengths[:-1], parents[:-1]), less, 0.5, lambda: kernel(d))
    assert all(relative_error(found[key][kept], expected[key]) < 1e-12 for key in NAMES)
    assert not any(found[key][~kept].any() for key in ("dk", "dv"))


@pytest.mark.parametrize("mode", MODES)
def test_trees_of_64_responses_are_proven_in_less_than_a_second(mode: str) -> None:
    plan = plan_of(mode, 8, (640, *[31] * 64), (-1, *[0] * 64))
    begun = time.thread_time()  # of this thread alone: other processes do not count
    verify(plan)
    assert time.thread_time() - begun < 1
