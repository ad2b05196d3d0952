"""Programs: where every block lies, and what every message has to wait for."""

import pytest

from megatron_longctx.attention.program import HOME, Away, Place, Receive, Send, Slot, compile_program, programs
from megatron_longctx.layout import contiguous, striped
from megatron_longctx.schedules import (
    SCHEDULES,
    Attend,
    Block,
    Kind,
    Move,
    Plan,
    PlanOptions,
    Step,
    build_plan,
    seal,
    transpose,
)
from megatron_longctx.schedules.ring import ring
from megatron_longctx.testing.plans import helper_plan, kv, tangled_plan

# Modes that share heads among ranks have tests of their own: not every number of ranks fits them.
WHOLE_HEADS = tuple(name for name, mode in SCHEDULES.items() if not mode.splits_heads)


def key_places(step):
    return [call.keys for call in step.calls]


def test_a_ring_alternates_between_two_slots():
    program = compile_program(build_plan("ring", 4, 8, False), 1)
    assert (program.rank, program.num_tokens) == (1, 2)
    assert program.slots == (Slot(Kind.KV, 2), Slot(Kind.KV, 2))

    def at(slot):
        return Place(Kind.KV, slot, 0, 2)

    blocks = [kv(home, 0, 2) for home in range(4)]
    assert [step.sends for step in program.steps] == [
        (Send(blocks[1], at(HOME), 2),),
        (Send(blocks[0], at(0), 2),),
        (Send(blocks[3], at(1), 2),),
        (),
    ]
    assert [step.receives for step in program.steps] == [
        (Receive(blocks[0], at(0), 0),),
        (Receive(blocks[3], at(1), 0),),
        (Receive(blocks[2], at(0), 0),),
        (),
    ]
    assert [key_places(step) for step in program.steps] == [[(at(HOME),)], [(at(0),)], [(at(1),)], [(at(0),)]]
    # Only step 2 overwrites something: block 0, which is attended and passed on in step 1.
    assert [step.after for step in program.steps] == [-1, -1, 1, -1]
    assert all(call.queries[0] == Place(Kind.Q, HOME, 0, 2) for step in program.steps for call in step.calls)


def test_a_longer_ring_waits_for_the_step_before():
    program = compile_program(build_plan("ring", 6, 6, False), 0)
    assert len(program.slots) == 2
    assert [step.after for step in program.steps] == [-1, -1, 1, 2, 3, -1]


def test_a_slot_is_as_large_as_its_largest_block():
    # contiguous(4, 10): 2, 3, 2 and 3 tokens. Rank 0 receives the blocks of 3, 2 and 1.
    program = compile_program(build_plan("ring", 4, 10, False), 0)
    assert program.slots == (Slot(Kind.KV, 3), Slot(Kind.KV, 2))
    assert program.steps[1].receives == (Receive(kv(2, 0, 2), Place(Kind.KV, 1, 0, 2), 3),)
    # Rank 1 receives those of 0, 3 and 2: slot 0 serves 2 and 2 tokens, slot 1 serves 3.
    assert compile_program(build_plan("ring", 4, 10, False), 1).slots == (Slot(Kind.KV, 2), Slot(Kind.KV, 3))


def test_results_of_backward_wait_for_the_calls_that_make_them():
    _, backward = programs(build_plan("ring", 4, 8, False), 1)
    assert sorted(backward.slots) == [Slot(Kind.DKV, 2)] * 2 + [Slot(Kind.KV, 2)] * 2
    assert [step.after for step in backward.steps] == [-1, -1, 1, 2, 3]
    results = [[send for send in step.sends if send.place is None] for step in backward.steps]
    assert results == [
        [],
        [],
        *([Send(Block(Kind.DKV, home, 0, 2, 1), None, home, i)] for i, home in enumerate((0, 3, 2))),
    ]
    (arriving,) = [receive for receive in backward.steps[2].receives if receive.block.kind is Kind.DKV]
    assert (arriving.block, arriving.peer) == (Block(Kind.DKV, 1, 0, 2, 2), 2)
    for step in backward.steps:
        for call in step.calls:
            assert call.queries[0] == Place(Kind.Q_GRAD, HOME, 0, 2)
            away = call.attend.keys[0].home != 1
            results = tuple(backward.outgoing[part.result] for part in call.away)
            assert results == ((Block(Kind.DKV, call.attend.keys[0].home, 0, 2, 1),) if away else ())
            assert all(part.complete for part in call.away)


def test_gathered_keys_lie_side_by_side():
    # zigzag(4, 16), rank 2: the first halves of ranks 0 and 1 for all queries, rank 3 whole for the second half.
    program = compile_program(build_plan("all_gather", 4, 16), 2)
    assert program.slots == (Slot(Kind.KV, 8),)
    receives = program.steps[0].receives
    assert sorted(receives, key=lambda receive: receive.place.start) == list(receives)
    assert {receive.block for receive in receives} == {kv(0, 0, 2), kv(1, 0, 2), kv(3, 0, 4)}
    calls = program.steps[1].calls
    assert [(call.queries[0].start, call.queries[0].stop, call.attend.num_keys) for call in calls] == [
        (0, 4, 4),
        (2, 4, 4),
    ]
    assert all(len(call.keys) == 1 for call in calls)
    assert [call.keys[0] for call in calls] == [Place(Kind.KV, 0, 0, 4), Place(Kind.KV, 0, 4, 8)]


@pytest.mark.parametrize("bound", [None, 2, 5, 12, 20])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_gathered_keys_are_one_place_for_each_call(n, bound):
    plan = build_plan("all_gather", n, 4 * n + 3, True, PlanOptions(bound))
    for rank in range(n):
        for program in programs(plan, rank):
            assert all(len(call.keys) == 1 for step in program.steps for call in step.calls)


def test_one_rank_has_no_slots_and_no_messages():
    for schedule in WHOLE_HEADS:
        for program in programs(build_plan(schedule, 1, 5), 0):
            assert program.slots == ()
            assert [(step.sends, step.receives, step.after, len(step.calls)) for step in program.steps] == [
                ((), (), -1, 1)
            ]


def test_queries_that_travel():
    plan = helper_plan(2, 8)
    forward, backward = programs(plan, 0)
    assert sorted(forward.slots) == [Slot(Kind.Q, 2)]
    (call,) = forward.steps[1].calls
    assert call.queries[0] == Place(Kind.Q, 0, 0, 2)
    assert call.keys == (Place(Kind.KV, HOME, 0, 4),)
    assert call.away == (Away(Block(Kind.OUT, 1, 2, 4, 0), 0, True, True),)
    assert forward.outgoing == (Block(Kind.OUT, 1, 2, 4, 0),)
    assert forward.steps[2].sends == (Send(Block(Kind.OUT, 1, 2, 4, 0), None, 1, 0),)
    assert forward.steps[2].after == 1
    (call,) = backward.steps[1].calls
    assert (call.queries[0].kind, call.queries[0].slot) == (Kind.Q_GRAD, forward.slots.index(Slot(Kind.Q, 2)))
    assert call.away == (Away(Block(Kind.DQ, 1, 2, 4, 0), 0, True, True),)
    assert backward.steps[2].sends == (Send(Block(Kind.DQ, 1, 2, 4, 0), None, 1, 0),)


def test_parts_of_a_result_leave_together_when_the_last_is_computed():
    # usp of 2 x 2 ranks: rank 0 computes for rank 1 in steps 1 (own group) and 2, both parts of its heads' outputs.
    forward, _ = programs(build_plan("usp", 4, 16, True, PlanOptions(inner_size=2)), 0)
    away = [
        (t, part.block.start, part.complete) for t, s in enumerate(forward.steps) for c in s.calls for part in c.away
    ]
    assert {t for t, _, _ in away} == {1, 2}
    assert [t for t, _, complete in away if complete] == [2]
    assert len(forward.outgoing) == 1 and forward.steps[-1].after == 2


def test_results_passed_on_go_out_of_the_slot_they_came_into():
    forward, _ = programs(tangled_plan(12), 0)
    result = Block(Kind.OUT, 2, 0, 3, 1)
    (receive,) = forward.steps[2].receives
    assert (receive.block, receive.peer) == (result, 1)
    assert forward.steps[4].sends == (Send(result, receive.place, 2),)


def test_keys_in_a_buffer_and_at_home_are_two_places():
    forward, _ = programs(tangled_plan(12), 1)
    (helped,) = [call for call in forward.steps[1].calls if call.away]
    assert helped.keys == (Place(Kind.KV, 0, 0, 4), Place(Kind.KV, HOME, 0, 4))


AWKWARD = [helper_plan(2, 9), helper_plan(3, 11), tangled_plan(12), seal(ring(striped(3, 10), True))]
MODES = [build_plan(name, n, 4 * n + 3) for name in WHOLE_HEADS for n in (2, 3, 5, 8)]
BOUND = [build_plan("all_gather", 4, 64, True, PlanOptions(bound)) for bound in (2, 7, 24)]


@pytest.mark.parametrize("plan", [*AWKWARD, *MODES, *BOUND], ids=lambda plan: f"{plan.name}-{plan.n}")
def test_messages_of_two_ranks_match_and_slots_are_never_shared(plan):
    for each, which in ((plan, 0), (seal(transpose(plan)), 1)):
        compiled = [programs(plan, rank)[which] for rank in range(plan.n)]
        for t in range(len(each.steps)):
            for source in range(plan.n):
                for destination in range(plan.n):
                    sent = [s.block for s in compiled[source].steps[t].sends if s.peer == destination]
                    expected = [r.block for r in compiled[destination].steps[t].receives if r.peer == source]
                    assert sent == expected
        for program in compiled:
            check_slots(program)


def check_slots(program):
    """Replay memory row by row: a call or a send reads what it names, and nothing is overwritten before its use.

    A message of step t may land from the moment the calls of step `after` are done; so whatever it overwrites may not
    be read in a later step than that, nor sent in step t or later.
    """
    rows: dict[tuple[int, int], tuple[Block, int]] = {}
    reads: dict[tuple[int, int], int] = {}

    def read(place, block, offset, t):
        for i in range(place.start, place.stop):
            held, row = rows[place.slot, i]
            assert (held.kind, held.home, held.origin) == (block.kind, block.home, block.origin)
            assert held.start + row == block.start + offset + i - place.start
            reads[place.slot, i] = max(reads.get((place.slot, i), -1), t)

    for t, step in enumerate(program.steps):
        for send in step.sends:
            if send.place is not None and send.place.slot != HOME:
                read(send.place, send.block, 0, t)
        for call in step.calls:
            if call.queries[0].slot != HOME:
                read(call.queries[0], call.attend.queries[0]._replace(kind=call.queries[0].kind), 0, t)
            pieces = [(key, i) for key in call.attend.keys for i in range(key.tokens)]
            for place in call.keys:
                for i in range(place.start, place.stop):
                    key, offset = pieces.pop(0)
                    if place.slot != HOME:
                        read(Place(place.kind, place.slot, i, i + 1), key, offset, t)
                    else:
                        assert (key.home, key.start + offset) == (program.rank, i)
            assert not pieces
        for receive in step.receives:
            kind, size, parts, _ = program.slots[receive.place.slot]
            assert parts == receive.block.heads.parts
            assert kind is receive.place.kind is receive.block.kind
            assert 0 <= receive.place.start < receive.place.stop <= size
            assert receive.place.stop - receive.place.start == receive.block.tokens
            merged = receive.block.home == program.rank  # and so read in the next step, before its calls
            for i in range(receive.place.start, receive.place.stop):
                assert reads.get((receive.place.slot, i), -1) <= step.after
            for row, i in enumerate(range(receive.place.start, receive.place.stop)):
                rows[receive.place.slot, i] = (receive.block, row)
                reads[receive.place.slot, i] = t + 1 if merged else -1
        taken = [(r.place.slot, i) for r in step.receives for i in range(r.place.start, r.place.stop)]
        assert len(taken) == len(set(taken))


def test_keys_of_two_places_do_not_join_by_their_numbers():
    # Rows 0:2 of a buffer and rows 2:4 at home follow each other in number only.
    own, fetched = kv(1, 2, 4), kv(0, 0, 2)
    steps = (
        Step((Move(fetched, 0, 1),), ((), ())),
        Step((), ((), (Attend((Block(Kind.Q, 1, 0, 4),), (fetched, own), False),))),
    )
    program = compile_program(Plan("two places", contiguous(2, 8), False, steps), 1)
    assert program.steps[1].calls[0].keys == (Place(Kind.KV, 0, 0, 2), Place(Kind.KV, HOME, 2, 4))
