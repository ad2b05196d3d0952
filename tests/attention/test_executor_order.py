"""What the executor issues, and in which order: seen by a transport that moves nothing."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_longctx.attention.engine import Engine
from megatron_longctx.attention.executor import BackwardPass, ForwardPass
from megatron_longctx.attention.post import DirectPost
from megatron_longctx.attention.program import HOME, programs
from megatron_longctx.comm import BufferPool, Exchange
from megatron_longctx.kernels import AttentionKernel
from megatron_longctx.schedules import ALL_HEADS, SCHEDULES, Block, Kind, PlanOptions, build_plan
from megatron_longctx.testing.plans import helper_plan, tangled_plan

# Modes that share heads among ranks have tests of their own: not every number of ranks fits them.
WHOLE_HEADS = tuple(name for name, mode in SCHEDULES.items() if not mode.splits_heads)


class Recorder(TorchDispatchMode):
    """Notes copies and computations; views do not count."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if not any(
            view in name for view in ("slice", "view", "select", "permute", "detach", "empty", "as_strided", "expand")
        ):
            self.events.append(name)
        return function(*args, **(kwargs or {}))


class SilentTransport:
    """Marks are numbers; messages are noted and never sent."""

    def __init__(self, events):
        self.events = events
        self.marks = 0
        self.started = []

    def now(self):
        self.marks += 1
        self.events.append(f"mark {self.marks}")
        return self.marks

    def start(self, sends, receives, after=()):
        for tensor, _ in (*sends, *receives):
            assert tensor.is_contiguous()
        self.started.append((len(sends), len(receives), tuple(after)))
        self.events.append("start")
        for tensor, _ in receives:
            if tensor.is_floating_point():
                torch.Tensor.fill_(tensor, 0.5)
        return Exchange()

    def wait(self, exchange):
        assert not exchange.done
        exchange.done = True
        self.events.append("wait")


class ZeroKernel(AttentionKernel):
    """Results with awkward strides, as kernels give them."""

    name = "zero"

    def __init__(self, events):
        super().__init__()
        self.events = events

    def why_not(self, request):
        return None

    def _forward(self, block):
        self.events.append("kernel")
        s, b, h, d = block.q.shape
        out = torch.zeros(b, h, s, d).permute(2, 0, 1, 3)
        return out, torch.zeros(b, h, s).permute(2, 0, 1)

    def _backward(self, block, grad_out, out, lse):
        self.events.append("kernel")
        return tuple(torch.zeros_like(x) for x in (block.q, block.k, block.v))


def run(plan, rank, backward, kv_heads=2):
    recorder = Recorder()
    transport = SilentTransport(recorder.events)
    engine = Engine(ZeroKernel(recorder.events), transport, BufferPool(torch.device("cpu")))
    program = programs(plan, rank)[backward]
    s, b, h, g, d = program.num_tokens, 2, 4, kv_heads, 8
    # Every tensor strided: heads first in memory, a gradient that is one number expanded.
    q = torch.zeros(b, h, s, d).permute(2, 0, 1, 3)
    lse = torch.zeros(b, h, s).permute(2, 0, 1)
    kv = torch.zeros(s, b, g, d)
    home = {Kind.Q: (q,), Kind.KV: (kv, kv), Kind.Q_GRAD: (q, q, torch.zeros(1, 1, 1, 1).expand(s, b, h, d), lse)}
    with recorder:
        (BackwardPass if backward else ForwardPass)(program, engine, home, 1.0).run()
    return recorder.events, transport, program


PLANS = [build_plan(name, 4, 16) for name in WHOLE_HEADS]
PLANS += [
    build_plan("all_gather", 4, 16, True, PlanOptions(4)),
    build_plan("ulysses", 4, 16),
    build_plan("ulysses", 2, 16, True, PlanOptions(head_chunks=2)),
    build_plan("usp", 4, 16, True, PlanOptions(inner_size=2)),
    helper_plan(2, 8),
    helper_plan(3, 12),
    tangled_plan(12),
]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.name}-{plan.n}")
def test_messages_start_right_after_a_mark(plan, backward):
    """Nothing is computed or copied between the mark that a message may wait for and the message.

    The messages run beside the computation and wait for marks only: a copy made in between would be sent half done.
    """
    for rank in range(plan.n):
        events, transport, program = run(plan, rank, backward)
        starts = [i for i, event in enumerate(events) if event == "start"]
        assert len(starts) == len(program.steps) == len(transport.started)
        for start in starts:
            since = (
                len(events[:start]) - next(i for i, e in enumerate(events[:start][::-1]) if e.startswith("mark")) - 1
            )
            assert set(events[since + 1 : start]) <= {"wait"}, events[since : start + 1]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.name}-{plan.n}")
def test_messages_wait_for_what_the_program_says(plan, backward):
    for rank in range(plan.n):
        events, transport, program = run(plan, rank, backward)
        # The first mark comes before all steps; a step's own comes last, after that of what the next one sends first.
        number = packed = 1
        ends = []
        for t, (step, (_, _, after)) in enumerate(zip(program.steps, transport.started, strict=True)):
            assert after == ((packed, ends[step.after]) if step.after >= 0 else (packed,))
            later = [name for first in program.first_sends[t + 1 : t + 2] for name in first]
            if any(name != (Kind.KV, ALL_HEADS) for name in later):  # all heads of keys are packed before all steps
                number = packed = number + 1
            number += 1
            ends.append(number)
        assert events.count("wait") == len(program.steps), "every exchange is waited for, once"
        assert events.count("kernel") == sum(len(step.calls) for step in program.steps)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_next_exchange_starts_before_this_step_computes(backward):
    events, _, _ = run(build_plan("zigzag", 4, 16), 1, backward)
    order = [event for event in events if event in ("start", "wait", "kernel")]
    steps = 5 if backward else 4
    assert order == ["start", "kernel", *["wait", "start", "kernel"] * 3, *["wait", "start"] * (steps - 4), "wait"]


def test_nothing_but_the_packing_of_keys_and_values_comes_before_the_first_messages():
    events, _, _ = run(build_plan("ring", 4, 16), 0, False)
    assert events[:3] == ["aten::stack", "mark 1", "start"]


def test_arrived_results_are_read_before_their_buffer_is_used_again():
    """Even the first and only partial of all queries is not kept as it lies in the buffer."""
    forward, backward = programs(build_plan("zigzag", 2, 8), 0)
    engine = Engine(ZeroKernel([]), SilentTransport([]), BufferPool(torch.device("cpu")))
    q, lse, kv = torch.ones(4, 2, 4, 8), torch.ones(4, 2, 4), torch.ones(4, 2, 2, 2, 8)
    home = {Kind.Q: (q,), Kind.KV: kv.unbind(1), Kind.Q_GRAD: (q, q, q, lse)}
    run, run_back = ForwardPass(forward, engine, home, 1.0), BackwardPass(backward, engine, home, 1.0)
    lent = [q.clone(), lse.clone(), q.clone(), kv.clone()]
    run.merge(Block(Kind.OUT, 0, 0, 4, 1), (lent[0], lent[1]))
    run_back.merge(Block(Kind.DQ, 0, 0, 4, 1), (lent[2],))
    run_back.merge(Block(Kind.DKV, 0, 0, 4, 1), (lent[3],))
    run.settle()
    run_back.settle()
    for tensor in lent:
        tensor.fill_(torch.nan)
    assert [torch.equal(x, y) for x, y in zip(run.output.finish(), (q, lse), strict=True)] == [True, True]
    assert torch.equal(run_back.dq.finish(), q)
    assert torch.equal(torch.stack((run_back.dk.finish(), run_back.dv.finish()), dim=1), kv)


def test_parts_of_the_heads_are_packed_in_one_copy_and_own_rows_join_beside_the_messages():
    """Of 4 ranks the last has neighbouring parts for all others: a copy each of q, k and v, and one of its own rows."""
    events, _, _ = run(build_plan("ulysses", 4, 16), 3, False, kv_heads=4)
    first, kernel = events.index("start"), events.index("kernel")
    assert events[:first].count("aten::copy_") == events[first:kernel].count("aten::copy_") == 3
    assert events[first:kernel].index("aten::copy_") < events[first:kernel].index("wait")
    assert "aten::cat" not in events and "aten::stack" not in events
    events, _, _ = run(build_plan("ulysses", 4, 16), 1, False, kv_heads=4)  # the first part, and the last two
    assert events[: events.index("start")].count("aten::copy_") == 6


class NumberingTransport(SilentTransport):
    """Every message brings another number, as soon as it is started: the earliest that memory is used again."""

    def start(self, sends, receives, after=()):
        exchange = super().start(sends, receives, after)
        for tensor, _ in receives:
            self.marks += 1
            tensor.fill_(self.marks / 64)
        return exchange


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "plan",
    [*PLANS, build_plan("ulysses", 2, 16, True, PlanOptions(head_chunks=4)), build_plan("ulysses", 8, 64)],
    ids=lambda plan: f"{plan.name}-{plan.n}",
)
def test_results_wait_where_they_are_only_while_nothing_else_comes_there(plan, backward):
    """The same results as where every one is read in the step after it has come."""
    found = []
    for at_once in (False, True):
        for rank in range(plan.n):
            program = programs(plan, rank)[backward]
            if at_once:
                program.__dict__["results_last"] = (False,) * len(program.steps)
            s, b, h, d = program.num_tokens, 1, 8, 8
            q, lse, kv = torch.ones(s, b, h, d), torch.ones(s, b, h), torch.ones(s, b, h, d)
            home = {Kind.Q: (q,), Kind.KV: (kv, kv), Kind.Q_GRAD: (q, q, q, lse)}
            engine = Engine(ZeroKernel([]), NumberingTransport([]), BufferPool(torch.device("cpu")))
            run = (BackwardPass if backward else ForwardPass)(program, engine, home, 1.0)
            run.run()
            found.append(run.gradients() if backward else run.output.finish())
    half = len(found) // 2
    for early, late in zip(found[half:], found[:half], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(early, late, strict=True))


def test_buffers_for_the_results_of_chunks_are_used_again():
    """So that not all of these may wait; those of the last chunks may."""
    last = programs(build_plan("ulysses", 2, 16, True, PlanOptions(head_chunks=4)), 0)[0].results_last
    assert not all(last) and last[-1]
    assert all(programs(build_plan("ulysses", 4, 16), 0)[0].results_last)


class Meeting:
    """Messages that lie with their senders, and are noted when they have been read."""

    def __init__(self, events):
        self.events = events

    def meet(self, step, receives):
        return [torch.full_like(tensor, 0.5) for tensor, _ in receives]

    def read(self, step):
        self.events.append(f"read {step}")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_what_was_met_is_there_before_it_is_passed_on(backward, monkeypatch):
    """USP exchanges heads at once, then sends around what it got: those messages wait for a mark after the reading."""
    plan = build_plan("usp", 4, 16, True, PlanOptions(inner_size=2))

    def meeting(post, step):
        return Meeting(post._transport.events) if step == 0 else None

    monkeypatch.setattr(DirectPost, "meeting", meeting)
    for rank in range(plan.n):
        events, transport, program = run(plan, rank, backward)
        assert program.waits_at_once[0] and len(transport.started) == len(program.steps) - 1
        passes = [send for send in program.steps[1].sends if send.place is not None and send.place.slot != HOME]
        assert passes, "nothing is passed on"
        (_, _, after) = transport.started[0]
        assert events.index(f"mark {after[0]}") > events.index("read 0")
