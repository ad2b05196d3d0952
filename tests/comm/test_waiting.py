"""What the clock of waits adds up: passes as they are, and graphs by how often they were replayed."""

from __future__ import annotations

import time
import weakref

import pytest
import torch

from megatron_longctx.comm import GraphWaits, WaitClock
from tests.comm.timeline import Graph, Timeline


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    return Timeline(monkeypatch)


def running() -> WaitClock:
    clock = WaitClock(torch.device("cuda"))
    clock.running = True
    return clock


def pass_over(timeline: Timeline, clock: WaitClock, waits: int = 2) -> None:
    for _ in range(waits):
        timeline.work(10.0)
        if clock.measures:
            clock.start()
        timeline.wait()
        if clock.measures:
            clock.stop()
    timeline.work(10.0)


def capture(timeline: Timeline, clock: WaitClock) -> tuple[Graph, GraphWaits | None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), clock.in_graph() as waits:
        pass_over(timeline, clock)
    return graph, waits  # type: ignore[return-value]


def replay(timeline: Timeline, clock: WaitClock, captured: tuple[Graph, GraphWaits | None], late: float) -> None:
    timeline.late = late
    graph, waits = captured
    graph.replay()
    assert waits is not None
    clock.replayed(waits)


def test_passes_as_they_are_count_with_their_own_waits_once(timeline: Timeline) -> None:
    clock = running()
    for late in (1.0, 5.0):
        timeline.late = late
        pass_over(timeline, clock)
    assert timeline.done < 0, "the host has not waited"
    assert clock.take() == pytest.approx(2 * 0.001 + 2 * 0.005)
    assert clock.take() == 0
    made = len(timeline.events)
    pass_over(timeline, clock)
    assert clock.take() == pytest.approx(2 * 0.005) and len(timeline.events) == made, "events serve again"


def test_every_replay_counts_with_what_the_last_one_waited(timeline: Timeline) -> None:
    clock = running()
    captured = capture(timeline, clock)
    assert clock.take() == 0, "capturing is no wait"
    for late in (7.0, 9.0, 2.0):
        replay(timeline, clock, captured, late)
    assert timeline.done < 0, "the host has not waited"
    assert clock.take() == pytest.approx(3 * 2 * 0.002)
    assert timeline.done == timeline.now, "and now only as long as it had to"
    assert clock.take() == 0
    for late in (3.0, 4.0):
        replay(timeline, clock, captured, late)
        assert clock.take() == pytest.approx(2 * late / 1000)


def test_graphs_and_passes_as_they_are_add_up(timeline: Timeline) -> None:
    clock = running()
    first, second = capture(timeline, clock), capture(timeline, clock)
    replay(timeline, clock, first, 1.0)
    pass_over(timeline, clock)
    replay(timeline, clock, second, 3.0)
    replay(timeline, clock, first, 2.0)
    assert clock.take() == pytest.approx(2 * (2 * 0.002 + 0.001 + 0.003))
    replay(timeline, clock, second, 5.0)
    assert clock.take() == pytest.approx(2 * 0.005), "not the other's once more"


def test_what_a_dropped_graph_waited_counts_once(timeline: Timeline) -> None:
    clock = running()
    captured = capture(timeline, clock)
    replay(timeline, clock, captured, 4.0)
    replay(timeline, clock, captured, 4.0)
    held = weakref.ref(captured[1])
    del captured
    timeline.graphs.clear()
    replay(timeline, clock, capture(timeline, clock), 1.0)
    assert held() is not None and clock.take() == pytest.approx(2 * (2 * 0.004 + 0.001))
    assert held() is None and clock.take() == 0


def test_a_graph_that_was_captured_while_nobody_asked_has_no_waits(timeline: Timeline) -> None:
    clock = WaitClock(torch.device("cuda"))
    graph, waits = capture(timeline, clock)
    assert waits is None and not timeline.events and len(graph.operations) == 5
    clock.running = True
    graph.replay()
    assert clock.take() == 0
    assert len(capture(timeline, clock)[0].operations) == 5 + 4, "both waits, from beginning to end"


def test_graphs_that_others_capture_are_left_alone(timeline: Timeline) -> None:
    clock = running()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pass_over(timeline, clock)
    assert not timeline.events
    graph.replay()
    assert clock.take() == 0
    pass_over(timeline, clock)
    assert len(timeline.events) == 4


def test_a_capture_that_fails_leaves_nothing(timeline: Timeline) -> None:
    clock = running()
    with (
        pytest.raises(ArithmeticError),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        clock.in_graph(),
    ):
        pass_over(timeline, clock)
        raise ArithmeticError
    timeline.late = 6.0
    pass_over(timeline, clock)
    assert clock.take() == pytest.approx(2 * 0.006)


def test_cpus_measure_while_the_clock_runs() -> None:
    clock = WaitClock(torch.device("cpu"))
    assert not clock.measures
    clock.running = True
    assert clock.measures
    clock.start()
    time.sleep(0.01)
    clock.stop()
    assert clock.take() >= 0.01 and clock.take() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_measures_within_replays() -> None:
    """Also when the graph is dropped while it still runs. Graphs that others capture are left alone."""
    device = torch.device("cuda", torch.cuda.current_device())
    clock = WaitClock(device)
    clock.running = True
    counter, cycles, replays = torch.zeros((), device=device), 2 * 10**7, 5

    def spin() -> None:
        counter.add_(1)
        measured = clock.measures
        if measured:
            clock.start()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        if measured:
            clock.stop()
        counter.add_(1)

    for _ in range(20):  # until it runs at its full clock
        spin()
        one = clock.take()
    assert one > 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), clock.in_graph() as waits:
        spin()
    assert waits is not None and clock.take() == 0
    for _ in range(replays):
        graph.replay()
        clock.replayed(waits)
    del graph, waits
    assert clock.take() == pytest.approx(replays * one, rel=0.5) and clock.take() == 0
    assert counter.item() == 2 * (20 + replays)

    theirs = torch.cuda.CUDAGraph()
    with torch.cuda.graph(theirs):
        spin()
    theirs.replay()
    assert clock.take() == 0
