"""Plans whose ranks keep what they receive: proved, followed token by token, broken in every way, and priced."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from megatron_longctx.schedules import (
    SCHEDULES,
    Block,
    Costs,
    Heads,
    Kind,
    Move,
    Plan,
    PlanError,
    PlanOptions,
    Workload,
    backward_plan,
    build_plan,
    describe,
    keeping,
    keeps_received,
    moved_tokens,
    seal,
    transpose,
    verify,
)
from megatron_longctx.schedules.keep import KEPT_TOKENS
from megatron_longctx.schedules.select import Problem, rank_modes
from megatron_longctx.schedules.simulate import kept_bytes, peak_bytes, reads_own, simulate
from megatron_longctx.testing.plans import helper_plan, tangled_plan
from megatron_longctx.topology import Cluster, Mesh, load_cluster

Token = tuple[Kind, int, int, int]
"""Kind, home, slot, and one of as many heads as there are parts."""


def options(n: int) -> PlanOptions:
    return PlanOptions(inner_size=2 if n % 2 == 0 else n)


def plans(n: int) -> list[Plan]:
    found = [
        build_plan(schedule, n, length, causal, options(n))
        for schedule, length, causal in product(SCHEDULES, (0, 1, n + 1, 4 * n + 3), (True, False))
    ]
    found += [build_plan("ulysses", n, 4 * n + 3, causal, PlanOptions(head_chunks=2)) for causal in (True, False)]
    return found + {2: [helper_plan(2, 9)], 3: [helper_plan(3, 11), tangled_plan(12)]}.get(n, [])


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_every_mode_is_proved_with_what_it_keeps(n: int) -> None:
    for plan in plans(n):
        forward = keeping(plan)
        assert forward.steps == plan.steps
        verify(forward)
        verify(backward_plan(forward), forward)
        verify(seal(transpose(forward)), forward)
        follow(forward, backward_plan(forward))


def tokens(block: Block, parts: int, kind: Kind | None = None) -> set[Token]:
    each = parts // block.heads.parts
    heads = range(block.heads.part * each, (block.heads.part + 1) * each)
    return {(kind or block.kind, block.home, slot, h) for slot in range(block.start, block.stop) for h in heads}


def follow(forward: Plan, backward: Plan) -> None:
    """What a rank reads in backward is its own, has been received, or lies there since forward: counted token by token.
    Of queries that are not its own it needs the whole result: no other call of any rank may be about them."""
    parts = max((a.heads.parts for s in forward.steps for attends in s.attends for a in attends), default=1)
    n = forward.n
    received: list[set[Token]] = [set() for _ in range(n)]
    computed: dict[Token, int] = {}
    for step in forward.steps:
        for block, _, destination, _ in step.moves:
            received[destination] |= tokens(block, parts)
        for attends in step.attends:
            for attend in attends:
                for token in (token for query in attend.queries for token in tokens(query, parts)):
                    computed[token] = computed.get(token, 0) + 1
    for rank in range(n):
        kept = {token for block in forward.kept[rank] for token in tokens(block, parts)}
        assert kept <= received[rank]
        held: set[Token] = set()
        for step in backward.steps:
            for attend in step.attends[rank]:
                keys = {token for key in attend.keys for token in tokens(key, parts) if key.home != rank}
                assert keys <= kept or keys <= held
                queries = [query for query in attend.queries if query.home != rank]
                if all(tokens(query, parts) <= kept for query in queries) and queries:
                    assert all(computed[token] == 1 for q in attend.queries for token in tokens(q, parts))
                    assert all(tokens(query, parts, Kind.GRAD) <= held for query in queries)
                else:
                    assert all(tokens(query, parts, Kind.Q_GRAD) <= held for query in queries)
            for block, _, destination, _ in step.moves:
                held |= tokens(block, parts) if destination == rank else set()


def kinds(plan: Plan) -> set[Kind]:
    return {move.block.kind for step in plan.steps for move in step.moves}


def test_what_is_kept_does_not_travel_again() -> None:
    def backward(schedule: str, keep: bool = True) -> Plan:
        plan = build_plan(schedule, 4, 64, options=PlanOptions(inner_size=2))
        return backward_plan(keeping(plan) if keep else plan)

    assert kinds(backward("ulysses")) == {Kind.GRAD, Kind.DQ, Kind.DKV}
    assert kinds(backward("ulysses", keep=False)) == {Kind.KV, Kind.Q_GRAD, Kind.DQ, Kind.DKV}
    for schedule in ("ring", "zigzag", "all_gather", "double_ring"):
        assert kinds(backward(schedule)) == {Kind.DKV}
    # Several calls compute a query's attention: its out is not known where the first of them runs.
    assert kinds(backward("helper")) == kinds(backward("usp")) == {Kind.Q_GRAD, Kind.DQ, Kind.DKV}
    # Three quarters of a rank's tokens go to the others and as many come, for a quarter of the heads.
    assert moved_tokens(backward("ulysses"), 1)[Kind.GRAD] == (12, 12)


def test_auto_keeps_with_ulysses_up_to_a_number_of_tokens() -> None:
    assert keeps_received("auto", "ulysses", 4, 4 * KEPT_TOKENS)
    assert not keeps_received("auto", "ulysses", 4, 4 * KEPT_TOKENS + 1)
    assert not keeps_received("auto", "ulysses", 4, 4 * KEPT_TOKENS, batch=2)
    assert not keeps_received("auto", "usp", 4, 64)
    assert keeps_received("true", "usp", 4, 2**24) and not keeps_received("true", "usp", 1, 64)
    assert not keeps_received("false", "ulysses", 4, 64)


def refuse(plan: Plan, message: str, forward: Plan | None = None) -> None:
    with pytest.raises(PlanError, match=message):
        verify(plan, forward)


def with_moves(plan: Plan, edit: dict[Kind, list[Move]]) -> Plan:
    step = plan.steps[0]
    moves = tuple(move for move in step.moves if move.block.kind not in edit)
    return replace(plan, steps=(step._replace(moves=moves + sum(map(tuple, edit.values()), ())), *plan.steps[1:]))


def test_plans_that_keep_wrongly_are_refused() -> None:
    plan = keeping(build_plan("ulysses", 3, 12))
    backward = backward_plan(plan)
    part = Heads(0, 3)
    kept = list(plan.kept[0])
    keys = Block(Kind.KV, 1, 0, 4, heads=part)
    assert keys in kept

    def keeps(blocks: list[Block], of: Plan = plan) -> Plan:
        return replace(of, kept=(tuple(blocks), *plan.kept[1:]))

    refuse(keeps([*kept, Block(Kind.KV, 1, 0, 4)]), r"rank 0 keeps kv1\[0:4\], which it never receives")
    refuse(keeps([*kept, Block(Kind.KV, 0, 0, 4)]), r"rank 0 keeps kv0\[0:4\], which is no query or key of another")
    refuse(keeps([*kept, Block(Kind.OUT, 1, 0, 4, 0)]), "which is no query or key of another rank")
    refuse(keeps([*kept, Block(Kind.KV, 1, 0, 9)]), "is not a span of its home rank's tokens")
    refuse(replace(plan, kept=plan.kept[1:]), "says of 2 ranks what they keep, has 3")
    refuse(backward, "takes something else for kept than ulysses keeps", build_plan("ulysses", 3, 12))
    refuse(plan, "though it is no backward plan", plan)
    # Backward without what it takes for kept, or without the gradients that it does not.
    refuse(keeps([b for b in kept if b != keys], backward), r"rank 0 attends kv.*before it arrives")
    queries = [block for block in kept if block.kind is Kind.KV]
    refuse(keeps(queries, backward), r"rank 0 attends q_grad.*before it arrives")
    refuse(with_moves(backward, {Kind.GRAD: []}), r"rank 0 attends grad1\[0:4\] heads 1/3 before it arrives")
    with pytest.raises(ValueError, match="is a backward plan: expected a forward plan"):
        keeping(backward)


def test_queries_whose_out_comes_from_several_calls_are_not_kept() -> None:
    plan = build_plan("usp", 4, 64, options=PlanOptions(inner_size=2))
    kept = [{move.block for step in plan.steps for move in step.moves if move.destination == r} for r in range(4)]
    queries = [tuple(sorted(block for block in blocks if block.kind is Kind.Q)) for blocks in kept]
    refuse(seal(replace(plan, kept=tuple(queries))), r"rank \d keeps the out of q\d\[.*\].*, some of it from elsewhere")


WORK = Workload(8, 8, 64)


def test_the_price_of_keeping() -> None:
    """Of q, k, v, out, its gradient and LSE only the gradient comes in backward; dq, dk and dv go home as before."""
    length = 4 * 4096
    slow = Cluster("slow", 1, 4, Mesh(1.0))
    instant = Costs(1e6, 1e6, call_s=0.0, merge_gibps=1e9, step_s=0.0, message_s=0.0)
    plan = build_plan("ulysses", 4, length)
    kept = keeping(plan)
    token = 2 * 8 * 64 // 4  # bytes of one token of a quarter of the heads of one tensor
    lse = 4 * 8 // 4
    fetched, less = (simulate(backward_plan(each), slow, WORK, instant).seconds for each in (plan, kept))
    # To and from every other rank over a link of its own.
    assert fetched == pytest.approx(4096 * (8 * token + lse) / 2**30, rel=1e-3)
    assert less == pytest.approx(4096 * 4 * token / 2**30, rel=1e-3)
    assert simulate(kept, slow, WORK, instant).seconds == simulate(plan, slow, WORK, instant).seconds


def test_memory_of_what_is_kept() -> None:
    plan, tensor, lse = build_plan("ulysses", 4, 4096), 1024 * 2 * 8 * 64, 1024 * 4 * 8
    kept = keeping(plan)
    assert kept_bytes(plan, WORK) == 0 and kept_bytes(kept, WORK) == 4 * tensor + lse
    assert not kept.buffers or dict(kept.buffers).keys() == {Kind.OUT}  # nothing that is kept lies in shared buffers
    assert not reads_own(backward_plan(kept)) and reads_own(backward_plan(plan))
    # With more ranks than KV heads, several hold the same one.
    grouped = Workload(8, 2, 64)
    assert kept_bytes(kept, grouped) == 2 * tensor + lse + 2 * tensor // 4 * 2
    gathered = keeping(build_plan("all_gather", 4, 4096))
    assert reads_own(backward_plan(gathered))
    more = kept_bytes(gathered, WORK)
    assert more == 3 * 2 * tensor  # rank 0 has the last tokens, which see everything
    buffers = build_plan("all_gather", 4, 4096).buffer_tokens(Kind.KV) * WORK.token_bytes(Kind.KV)
    assert peak_bytes(gathered, WORK) == peak_bytes(build_plan("all_gather", 4, 4096), WORK) + more - buffers


def test_modes_are_chosen_by_what_they_will_keep() -> None:
    cluster, workload = load_cluster("h200_x8").resized(4), Workload(32, 32, 128)

    def ulysses(length: int, keep: str) -> float:
        problem = Problem(4, length, workload, keep_received=keep)
        (found,) = rank_modes(problem, cluster, candidates=[("ulysses", PlanOptions())])
        return found.seconds

    short, long = 4 * KEPT_TOKENS, 4 * KEPT_TOKENS + 4
    assert ulysses(short, "auto") == ulysses(short, "true") < ulysses(short, "false")
    assert ulysses(long, "auto") == ulysses(long, "false") > ulysses(long, "true")


def test_a_plan_says_what_it_keeps() -> None:
    said = describe(keeping(build_plan("ulysses", 4, 64)), {Kind.KV: 1024})
    assert "kept of other ranks' q, with their out, for backward: 12 tokens at most" in said
    assert "kept of other ranks' kv, for backward: 12 tokens = 12 KiB at most" in said
    assert "kept of" not in describe(build_plan("ulysses", 4, 64))
