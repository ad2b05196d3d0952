"""The measured waiting of passes that are replayed from graphs: none is lost and none counts twice, whichever way they
go, when graphs are dropped, and when they are captured anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_longctx.attention.pace import SETTLED
from megatron_longctx.attention.replay import Replay
from megatron_longctx.comm import WaitClock, measured_wait
from tests.comm.timeline import Timeline


class Run:
    """A pass that waits once, between work; the memories that peers read take turns."""

    timeline: Timeline
    clock: WaitClock
    costs: dict[str, float]
    generation = 0
    turn = 0

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = inputs

    def run(self, begun: bool = False) -> None:
        if not begun:
            self.begin()
        self.timeline.work(self.costs["eager" if self.timeline.captured is None else "replayed"])
        with measured_wait(self.clock):
            self.timeline.wait()
        self.timeline.work(1.0)

    def post(self) -> Any:
        return SimpleNamespace(begin=self.begin, generation=Run.generation, join=lambda: None)

    @staticmethod
    def begin() -> int:
        Run.turn = 1 - Run.turn
        return Run.turn


class Passes:
    """Passes of one kind, each with a wait that is longer than the one before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replayed: float, eager: float) -> None:
        self.timeline = Timeline(monkeypatch)
        self.clock = WaitClock(torch.device("cuda"))
        for name, value in (
            ("timeline", self.timeline),
            ("clock", self.clock),
            ("costs", {"replayed": replayed, "eager": eager}),
            ("generation", 0),
            ("turn", 0),
        ):
            monkeypatch.setattr(Run, name, value, raising=False)
        device = torch.device("cuda")
        self.kind = Replay(Run, lambda run: tuple(x + 1 for x in run.inputs), device, None, self.clock)
        self.kind._pace._every = lambda times: [times]

    def run(self, count: int) -> list[float]:
        """How long each waits, in seconds."""
        lates = []
        for _ in range(count):
            self.timeline.late += 1.0
            lates.append(self.timeline.late / 1000)
            self.kind((torch.zeros(3),))
        return lates

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.timeline.graphs)


PREPARED = 17
"""Passes before the first replay: the last of them goes over what graphs will read."""


@pytest.mark.parametrize(("replayed", "eager"), [(50.0, 500.0), (500.0, 50.0)])
def test_every_pass_counts_once_whichever_way_it_takes(
    replayed: float, eager: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(monkeypatch, replayed, eager)
    passes.clock.running = True
    for _ in range(SETTLED + 20):
        (late,) = passes.run(1)
        assert passes.clock.take() == pytest.approx(late)
    assert passes.kind._pace.replays is (replayed < eager)
    assert passes.replays == SETTLED - PREPARED + (20 if replayed < eager else 0)
    assert len(passes.timeline.graphs) == 2, "captured once for each memory"


def test_replays_count_with_the_last_of_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs take turns; passes as they are count with their own waits."""
    passes = Passes(monkeypatch, 50.0, 500.0)
    passes.clock.running = True
    lates = passes.run(PREPARED + 7)
    assert passes.timeline.done < 0, "the host has not waited"
    assert passes.clock.take() == pytest.approx(sum(lates[:PREPARED]) + 4 * lates[-1] + 3 * lates[-2])
    assert passes.clock.take() == 0


def test_nothing_is_lost_with_graphs_that_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch, 500.0, 50.0)
    passes.clock.running = True
    passes.run(PREPARED)
    passes.clock.take()
    replayed = passes.run(SETTLED - PREPARED)
    eager = passes.run(4)
    assert passes.kind._pace.replays is False and not passes.kind._captured
    assert passes.clock.take() == pytest.approx(5 * sum(replayed[-2:]) + sum(eager))
    assert passes.clock.take() == 0


def test_nothing_is_lost_with_graphs_that_are_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Because the memory that peers read has moved."""
    passes = Passes(monkeypatch, 50.0, 500.0)
    passes.clock.running = True
    passes.run(PREPARED)
    passes.clock.take()
    before = passes.run(4)
    Run.generation = 1
    after = passes.run(4)
    assert len(passes.timeline.graphs) == 4
    assert passes.clock.take() == pytest.approx(2 * sum(before[-2:]) + 2 * sum(after[-2:]))


def test_graphs_that_do_not_measure_are_captured_anew_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch, 50.0, 500.0)
    passes.run(SETTLED + 4)
    graphs = passes.timeline.graphs
    assert len(graphs) == 2 and all(len(graph.operations) == 3 for graph in graphs)
    passes.clock.running = True
    for _ in range(6):
        (late,) = passes.run(1)
        assert passes.clock.take() == pytest.approx(late)
    assert len(graphs) == 4 and [graph.replays for graph in graphs[2:]] == [3, 3]


def test_nobody_pays_who_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch, 50.0, 500.0)
    passes.run(SETTLED + 20)
    assert len(passes.timeline.events) == 4 * 8, "those that time both ways"
    assert passes.clock.take() == 0
