"""What each mode promises beyond being right: balance, few messages, links used."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from megatron_longctx.layout import contiguous, zigzag
from megatron_longctx.schedules import (
    SCHEDULES,
    Attend,
    Block,
    Kind,
    Move,
    Plan,
    PlanError,
    Step,
    build_plan,
    seal,
    verify,
)
from megatron_longctx.schedules.double_ring import double_ring
from megatron_longctx.schedules.prune import prune
from megatron_longctx.schedules.tasp import tasp


@pytest.mark.parametrize("n", range(2, 12))
def test_idle_slots_of_helper_and_ring_are_the_papers(n: int) -> None:
    assert build_plan("helper", n, 16 * n).idle_slots() == (0 if n % 2 else Fraction(1, 2 * n))
    assert build_plan("ring", n, 16 * n).idle_slots() == Fraction(n * n - n, 2 * n * n)


@pytest.mark.parametrize("n", [3, 4, 7, 8])
def test_helpers_halve_the_steps(n: int) -> None:
    plan = build_plan("helper", n, 16 * n)
    assert sum(any(step.attends) for step in plan.steps) == n // 2 + 1
    kinds = Counter(move.block.kind for step in plan.steps for move in step.moves)
    assert kinds[Kind.Q] == kinds[Kind.OUT] > 0


def test_a_helped_result_that_is_dropped_is_noticed() -> None:
    plan = build_plan("helper", 4, 64)
    steps = tuple(
        step._replace(moves=tuple(m for m in step.moves if m.block.kind is not Kind.OUT)) for step in plan.steps
    )
    with pytest.raises(PlanError, match="never reaches its home"):
        verify(type(plan)(plan.name, plan.layout, plan.causal, steps, plan.buffers))


@pytest.mark.parametrize("n", [3, 5, 7, 8])
def test_tasp_uses_every_link_once_a_step(n: int) -> None:
    plan = build_plan("tasp", n, 2 * n * (n - 1) * 4, causal=False)
    for step in plan.steps[:-1]:
        links = {(move.source, move.destination) for move in step.moves}
        assert len(links) == n * (n - 1)
    one_ring = build_plan("zigzag", n, 2 * n * (n - 1) * 4, causal=False)
    most = [
        max(Counter({link: tokens for link, tokens in _tokens(step).items()}).values())
        for step in (plan.steps[0], one_ring.steps[0])
    ]
    assert most[0] * (n - 1) == most[1]  # each link carries an (n-1)-th of what one ring's links carry


def _tokens(step):
    tokens: Counter[tuple[int, int]] = Counter()
    for move in step.moves:
        tokens[move.source, move.destination] += move.block.tokens
    return tokens


def test_tasp_attends_in_two_calls_a_step() -> None:
    plan = build_plan("tasp", 8, 8 * 7 * 2 * 4)
    assert max(len(attends) for step in plan.steps for attends in step.attends) == 2


@pytest.mark.parametrize("rings", [(), ((0, 1, 2),), ((0, 1, 1, 2),)])
def test_tasp_refuses_what_are_no_rings(rings) -> None:
    with pytest.raises(ValueError, match="expected at least one ring that passes each of the 4 ranks once"):
        tasp(zigzag(4, 64), True, rings)


@pytest.mark.parametrize(("n", "inner"), [(4, 2), (8, 4), (6, 3), (6, 1), (5, 5)])
def test_double_ring_crosses_nodes_once_a_round(n: int, inner: int) -> None:
    plan = seal(double_ring(zigzag(n, 16 * n), False, inner))
    verify(plan)
    crossing = sum(
        move.block.tokens
        for step in plan.steps
        for move in step.moves
        if move.source // inner != move.destination // inner
    )
    assert crossing == (n // inner - 1) * 16 * n
    if n == 8:  # a flat ring would cross between the same two nodes with every block it passes there
        flat = build_plan("zigzag", n, 16 * n, causal=False)
        by_ring = sum(m.block.tokens for s in flat.steps for m in s.moves if m.source // 4 != m.destination // 4)
        assert by_ring > crossing


@pytest.mark.parametrize("n", [4, 6, 8, 12])
def test_nothing_travels_that_nobody_needs(n: int) -> None:
    for schedule in SCHEDULES:
        for causal in (True, False):
            plan = build_plan(schedule, n, 4 * n + 1, causal)
            assert prune(plan) == plan


def test_prune_keeps_what_is_passed_on() -> None:
    # Rank 2 needs the block of rank 0 and gets it by way of rank 1, which does not; and rank 3 gets it for nothing.
    block = Block(Kind.KV, 0, 0, 2)
    call = Attend((Block(Kind.Q, 2, 0, 2),), (block,), False)
    idle: tuple[tuple[Attend, ...], ...] = ((),) * 4
    steps = (
        Step((Move(block, 0, 1), Move(block, 0, 3)), idle),
        Step((Move(block, 1, 2),), idle),
        Step((Move(block, 2, 3),), ((), (), (call,), ())),
    )
    pruned = prune(Plan("by hand", contiguous(4, 8), False, steps))
    assert [step.moves for step in pruned.steps] == [(Move(block, 0, 1),), (Move(block, 1, 2),), ()]


def test_double_ring_refuses_nodes_that_do_not_divide_the_ranks() -> None:
    with pytest.raises(ValueError, match=r"inner_size=3: expected a divisor of the 8 ranks.*1, 2, 4, 8"):
        double_ring(zigzag(8, 64), True, 3)
