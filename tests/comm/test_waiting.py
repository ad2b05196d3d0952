"""What the clock of waits adds up: on a device's own time line, without the host waiting for it."""

from __future__ import annotations

import time

import pytest
import torch

from megatron_longctx.comm import StreamClock, measured


class Timeline:
    """In the place of a CUDA stream. Work moves `now` on, in ms. The host knows what came before `done`, and waits by
    moving that on."""

    def __init__(self) -> None:
        self.now, self.done = 0.0, -1.0
        self.events: list[Event] = []

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        self.events.append(Event(self))
        return self.events[-1]


class Event:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.at: float | None = None

    def record(self, stream: Timeline) -> None:
        assert stream is self._timeline
        self.at = stream.now

    def synchronize(self) -> None:
        assert self.at is not None
        self._timeline.done = max(self._timeline.done, self.at)

    def elapsed_time(self, stop: Event) -> float:
        assert self.at is not None and stop.at is not None
        assert max(self.at, stop.at) <= self._timeline.done, "CUDA refuses this"
        return stop.at - self.at


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    found = Timeline()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found)
    return found


def pass_over(timeline: Timeline, clock: StreamClock, late: float) -> None:
    """Two waits between work."""
    for _ in range(2):
        timeline.now += 10.0
        with measured(clock):
            timeline.now += late
    timeline.now += 10.0


def test_every_wait_counts_once_and_the_host_waits_only_when_it_asks(timeline: Timeline) -> None:
    clock = StreamClock(torch.device("cuda"))
    clock.running = True
    for late in (1.0, 5.0):
        pass_over(timeline, clock, late)
    assert timeline.done < 0, "the host has not waited"
    assert clock.take() == pytest.approx(2 * 0.001 + 2 * 0.005)
    assert timeline.done == timeline.now - 10.0, "and now only as long as it had to"
    assert clock.take() == 0
    made = len(timeline.events)
    pass_over(timeline, clock, 5.0)
    assert clock.take() == pytest.approx(2 * 0.005) and len(timeline.events) == made, "events serve again"


def test_nobody_pays_who_does_not_ask(timeline: Timeline) -> None:
    clock = StreamClock(torch.device("cuda"))
    pass_over(timeline, clock, 1.0)
    with measured(None):
        pass
    assert not timeline.events and clock.take() == 0


def test_a_wait_that_fails_is_over(timeline: Timeline) -> None:
    clock = StreamClock(torch.device("cuda"))
    clock.running = True
    with pytest.raises(ArithmeticError), measured(clock):
        timeline.now += 3.0
        raise ArithmeticError
    pass_over(timeline, clock, 6.0)
    assert clock.take() == pytest.approx(0.003 + 2 * 0.006)


def test_cpus_measure_while_the_clock_runs() -> None:
    clock = StreamClock(torch.device("cpu"))
    with measured(clock):
        time.sleep(0.01)
    assert clock.take() == 0
    clock.running = True
    with measured(clock):
        time.sleep(0.01)
    assert clock.take() >= 0.01 and clock.take() == 0


@pytest.mark.gpu
def test_a_gpu_measures_what_its_stream_waits() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    clock = StreamClock(device)
    clock.running = True
    with measured(clock):
        torch.cuda._sleep(2 * 10**7)  # type: ignore[no-untyped-call]
    assert clock.take() > 1e-3 and clock.take() == 0
