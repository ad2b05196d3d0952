"""Which way short passes go: both are timed in place, and all ranks take the faster one."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_longctx.attention import ContextParallelAttention, context_parallel
from megatron_longctx.attention.engine import Engine
from megatron_longctx.attention.pace import SETTLED, Pace
from megatron_longctx.attention.program import programs
from megatron_longctx.attention.replay import Replay, _Captured
from megatron_longctx.comm import BufferPool, MixedTransport, PeerTransport
from megatron_longctx.schedules import build_plan

FIRST, TIMED, CAPTURED = 8, 8, 3
AS_IT_IS = FIRST + TIMED
"""Passes before the first replay."""


class Device:
    """A time line that passes move on, by so many ms each, and marks on it, of which those up to `done` are done.
    others: the times of the other ranks."""

    def __init__(self, replayed: float, eager: float) -> None:
        self.took = {"replayed": replayed, "eager": eager}
        self.now = 0.0
        self.done = float("inf")
        self.others: list[tuple[float, float]] = []
        self.asked: list[tuple[float, float]] = []
        self.pace = Pace(self.mark, self.every)
        self.ran: list[str] = []
        self.marks: list[Mark] = []

    def mark(self) -> Mark:
        self.marks.append(Mark(self, self.now))
        return self.marks[-1]

    def every(self, times: tuple[float, float]) -> list[tuple[float, float]]:
        self.asked.append(times)
        return [*self.others, times]

    def passes(self, count: int) -> list[str]:
        """Which way they went."""
        self.ran = []
        for _ in range(count):
            self.pace.run(lambda: self.work("replayed"), lambda: self.work("eager"))
        return self.ran

    def slow(self, ms: float) -> None:
        """One pass that takes so long, whichever way it goes."""
        usual, self.took = self.took, dict.fromkeys(self.took, ms)
        self.passes(1)
        self.took = usual

    def work(self, way: str) -> None:
        self.ran.append(way)
        self.now += self.took[way]


class Mark:
    def __init__(self, device: Device, at: float) -> None:
        self._device, self._at = device, at

    def synchronize(self) -> None:
        self._device.done = max(self._device.done, self._at)

    def elapsed_time(self, stop: Mark) -> float:
        assert max(self._at, stop._at) <= self._device.done, "CUDA refuses this"
        return stop._at - self._at


@pytest.mark.parametrize(
    ("replayed", "eager", "replays"),
    [
        (4.6, 4.3, False),
        (5.3, 6.2, True),
        (1.0, 1.0, False),
        (0.99, 1.0, False),  # a tie, nearly
        (0.97, 1.0, True),
    ],
)
def test_the_faster_way_stays(replayed: float, eager: float, replays: bool) -> None:
    device = Device(replayed, eager)
    tried = device.passes(SETTLED)
    assert tried == ["eager"] * AS_IT_IS + ["replayed"] * (CAPTURED + TIMED) and device.pace.replays is None
    assert device.passes(1000) == ["replayed" if replays else "eager"] * 1000
    assert device.pace.replays is replays
    assert len(device.marks) == 4 * TIMED, "before and after each, and none once a way is taken"


def test_a_way_that_was_taken_stays() -> None:
    device = Device(1.0, 2.0)
    device.passes(SETTLED + 1)
    device.took = {"replayed": 9.0, "eager": 1.0}
    assert device.passes(100) == ["replayed"] * 100


def test_the_first_passes_and_the_first_replays_do_not_count() -> None:
    device = Device(2.0, 1.0)
    for _ in range(FIRST):  # compiling
        device.slow(1000.0)
    device.passes(TIMED)
    assert device.ran == ["eager"] * TIMED
    for _ in range(CAPTURED):
        device.slow(1000.0)
    device.passes(TIMED)
    assert device.passes(3) == ["eager"] * 3, "else replays would seem faster than 1,000 ms"

    device = Device(1.0, 2.0)
    device.passes(AS_IT_IS)
    for _ in range(CAPTURED):
        device.slow(1000.0)
    device.passes(TIMED)
    assert device.passes(3) == ["replayed"] * 3


@pytest.mark.parametrize("period", [3, 4, 8])
def test_a_slow_pass_in_every_training_step_does_not_decide(period: int) -> None:
    """The first of a step comes when the device has run dry."""
    for replayed, eager, stays in ((1.0, 1.2, "replayed"), (1.2, 1.0, "eager")):
        device = Device(replayed, eager)
        for number in range(SETTLED):
            if number % period == 0:
                device.slow(30.0 if number < AS_IT_IS else 90.0)
            else:
                device.passes(1)
        assert device.passes(3) == [stays] * 3


def test_the_host_waits_once_for_what_was_timed() -> None:
    device = Device(2.0, 1.0)
    device.done = 0.0
    device.passes(SETTLED)
    assert device.done == 0.0 and not device.asked
    device.passes(50)
    assert device.done == SETTLED - CAPTURED - TIMED + 2 * (CAPTURED + TIMED), "the end of the last pass that was timed"
    assert len(device.marks) == 4 * TIMED and len(device.asked) == 1


@pytest.mark.parametrize(("other", "replays"), [((1.0, 5.0), True), ((1.0, 2.1), True), ((1.0, 2.0), False)])
def test_ranks_take_one_way_together(other: tuple[float, float], replays: bool) -> None:
    """Though this one's replays take longer."""
    device = Device(2.0, 1.0)
    device.others = [other]
    device.passes(SETTLED + 1)
    assert device.asked == [(2.0, 1.0)] and device.pace.replays is replays


def test_a_kind_that_comes_rarely_stays_as_it_is() -> None:
    device = Device(1.0, 2.0)
    assert device.passes(AS_IT_IS) == ["eager"] * AS_IT_IS and device.pace.replays is None


def test_what_a_pass_gives_is_given_on() -> None:
    pace = Device(1.0, 2.0).pace
    given = [pace.run(lambda: "replayed", lambda: "eager") for _ in range(SETTLED + 1)]
    assert given == ["eager"] * AS_IT_IS + ["replayed"] * (CAPTURED + TIMED) + ["eager"], "no time has passed"


def test_a_pass_that_fails_is_not_timed() -> None:
    device = Device(1.0, 2.0)
    device.passes(AS_IT_IS - 1)

    def fails() -> Any:
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        device.pace.run(fails, fails)
    device.passes(CAPTURED + TIMED)
    assert device.passes(3) == ["replayed"] * 3


class Run:
    """A pass that adds one; the memories that peers read take turns."""

    device: Device
    begun = 0

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = inputs

    def run(self) -> None:
        self.begin()
        self.device.work("eager")

    def post(self) -> Any:
        return SimpleNamespace(begin=self.begin, generation=0)

    @staticmethod
    def begin() -> int:
        Run.begun += 1
        return Run.begun % 2


class Graph:
    """In the place of a graph of a `Run`, with results in memory of its own."""

    def __init__(self, run: Run) -> None:
        self.run, self.results = run, tuple(torch.empty_like(x) for x in run.inputs)

    def replay(self) -> None:
        self.run.device.work("replayed")
        for x, result in zip(self.run.inputs, self.results, strict=True):
            torch.add(x, 1, out=result)


@pytest.mark.parametrize(("replayed", "stays"), [(1.0, True), (3.0, False)])
def test_graphs_are_held_only_where_they_are_faster(
    replayed: float, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And results are right before, meanwhile and after."""
    device = Device(replayed, eager=2.0)
    graphs: list[weakref.ref[Graph]] = []
    static: list[weakref.ref[Tensor]] = []

    def capture(self: Replay, run: Run, generation: int) -> _Captured:
        graph = Graph(run)
        graphs.append(weakref.ref(graph))
        static.extend(weakref.ref(x) for x in run.inputs)
        return _Captured(graph, graph.results, generation, run)  # type: ignore[arg-type]

    monkeypatch.setattr(Replay, "_capture", capture)
    monkeypatch.setattr(Run, "device", device, raising=False)
    monkeypatch.setattr(Run, "begun", 0)
    kind = Replay(Run, lambda run: tuple(x + 1 for x in run.inputs), torch.device("cpu"), None)
    kind._pace = device.pace
    held, given = [], []
    for number in range(SETTLED + 20):
        given = [*given[-2:], kind((torch.full((3,), float(number)), torch.full((2, 2), -float(number))))]
        values = [[x.unique().item() for x in found] for found in given]
        assert values == [[n + 1, 1 - n] for n in range(number + 1)][-3:], "in memory of their own"
        held.append(tuple(sum(ref() is not None for ref in refs) for refs in (graphs, static)))
    assert held[:AS_IT_IS] == [(0, 0)] * AS_IT_IS
    assert held[AS_IT_IS + CAPTURED - 1 : SETTLED] == [(2, 4)] * (TIMED + 1)
    assert held[SETTLED:] == [(2, 4) if stays else (0, 0)] * 20
    assert len(graphs) == 2 and Run.begun == SETTLED + 20, "the memories took turns in every pass, either way"


def test_what_graphs_read_goes_through_a_pass_as_it_is_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the very tensors that they read, which may lie otherwise than those given: copies are planned then. What
    such a pass gives may be its inputs, and stays as it was."""
    ran: list[tuple[str, Tensor]] = []
    monkeypatch.setattr(Run, "device", Device(1.0, 2.0), raising=False)
    monkeypatch.setattr(Run, "run", lambda self: (self.begin(), ran.append(("as it is", self.inputs[0]))))

    def capture(self: Replay, run: Run, generation: int) -> _Captured:
        ran.append(("captured", run.inputs[0]))
        graph = Graph(run)
        return _Captured(graph, graph.results, generation, run)  # type: ignore[arg-type]

    monkeypatch.setattr(Replay, "_capture", capture)
    kind = Replay(Run, lambda run: run.inputs, torch.device("cpu"), None)
    given = [torch.full((3, 4), float(number)).t() for number in range(3)]
    found = [kind._replay((x,))[0] for x in given]
    assert [way for way, _ in ran] == ["as it is", "captured", "captured"]
    assert all(x is ran[0][1] and x.is_contiguous() for _, x in ran)
    assert torch.equal(found[0], given[0]) and torch.equal(found[1], given[1] + 1)


class Spin:
    """A pass that keeps a GPU busy for so many cycles: as it is, and captured. It is its own post."""

    cycles = (0, 0)
    generation = 0

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = inputs

    def run(self, begun: bool = False) -> None:
        torch.cuda._sleep(self.cycles[begun])  # type: ignore[no-untyped-call]

    def post(self) -> Spin:
        return self

    def begin(self) -> int:
        return 0

    def join(self) -> None:
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("cycles", "stays"), [((10**7, 10**5), True), ((10**5, 10**7), False)])
def test_a_gpu_takes_the_faster_way_and_gives_memory_back(
    cycles: tuple[int, int], stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setattr(Spin, "cycles", cycles)
    kind = Replay(Spin, lambda run: (run.inputs[0] + 1,), device, None)
    x, wrong = torch.ones(2**21, device=device), torch.zeros((), dtype=torch.bool, device=device)

    def passes(count: int) -> int:
        """Bytes held afterwards; the host waits for the device only then."""
        nonlocal x
        for _ in range(count):
            (found,) = kind((x,))
            wrong.logical_or_((found != x + 1).any())
            x = found
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)

    before = passes(AS_IT_IS)
    assert passes(CAPTURED + TIMED) >= before + 2 * x.nbytes, "inputs and results of the graph"
    after = passes(1)
    assert kind._pace.replays is stays and not wrong.item()
    assert (after >= before + 2 * x.nbytes) if stays else (after < before + x.nbytes)


@pytest.mark.parametrize(
    ("transport", "length", "calls"),
    [
        (PeerTransport, 4 * 4096, SETTLED),
        (PeerTransport, 4 * 4096 + 3, 2),  # some rank has more than 4,096
        (PeerTransport, 4 * 4097, 2),
        (MixedTransport, 4 * 4096, 2),
        (None, 4 * 4096, 2),
    ],
)
def test_calls_that_may_be_replayed_are_measured_once_they_have_settled(
    transport: type | None, length: int, calls: int
) -> None:
    attention = ContextParallelAttention(graph_tokens=4096)
    attention.world, cpu = 4, torch.device("cpu")
    attention._links[cpu] = (None if transport is None else object.__new__(transport), BufferPool(cpu))
    assert attention.warm_up_calls(length) == calls


def test_all_ranks_try_both_ways_or_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever each of them holds: they would wait for each other to say which way is faster. With many lengths, too,
    of which only so many may be replayed."""
    ways: list[str] = []
    monkeypatch.setattr(context_parallel, "Replay", lambda *_: lambda inputs: (ways.append("both"), inputs)[1])
    monkeypatch.setattr(context_parallel, "_eager", lambda inputs, *_: (ways.append("eager"), inputs)[1])
    transport = object.__new__(PeerTransport)
    transport.group = None  # type: ignore[assignment]
    lengths = [*range(1, 40), *range(1, 40)]
    pairs = {length: [programs(build_plan("zigzag", 4, length), rank) for rank in range(4)] for length in lengths}
    found = []
    for rank in range(4):
        ways.clear()
        engine = Engine(None, transport, BufferPool(torch.device("cpu")), graph_tokens=6)  # type: ignore[arg-type]
        for length in lengths:
            program, _ = pairs[length][rank]
            x = torch.zeros(program.num_tokens, 1, 1, 8)
            context_parallel._run(program, engine, (), (x, x, x), lambda _: None, lambda _: ())
        found.append(list(ways))
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0].count("both") == 2 * 16, "those of 8 to 23 tokens"
