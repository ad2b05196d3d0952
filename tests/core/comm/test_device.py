"""Scratch memory that is reused, and the clock that times a stream without making the host wait."""

from __future__ import annotations

import time

import pytest
import torch

from megatron_longctx.core.comm import BufferPool, StreamClock, timed

CPU = torch.device("cpu")


def test_memory_is_reused_and_grows() -> None:
    pool = BufferPool(CPU)
    assert pool.get("kv", (0, 4), torch.float32).shape == (0, 4) and pool.num_bytes == 0
    first = pool.get("kv", (4, 2, 3), torch.float32)
    assert first.shape == (4, 2, 3) and first.dtype == torch.float32 and first.is_contiguous() and first.device == CPU
    assert pool.num_bytes == 24 * 4
    for shape in ((4, 2, 3), (2, 2, 3), (24,), (3, 8), (0, 5)):  # no larger than before
        again = pool.get("kv", shape, torch.float32)
        assert again.shape == shape and again.is_contiguous()
        assert again.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert pool.num_bytes == 24 * 4
    larger = pool.get("kv", (25,), torch.float32)
    assert larger.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert pool.num_bytes == 25 * 4
    assert pool.get("kv", (4, 2, 3), torch.float32).data_ptr() == larger.data_ptr()
    assert pool.get("scalar", (), torch.float32).shape == ()


def test_names_and_dtypes_have_separate_memory() -> None:
    pool = BufferPool(CPU)
    names = (("kv", 0), ("kv", 1), "kv")
    tensors = [pool.get(name, (8,), dtype) for name in names for dtype in (torch.float32, torch.bfloat16)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    for value, tensor in enumerate(tensors):
        assert (tensor == value).all()
    assert pool.num_bytes == 3 * 8 * 4 + 3 * 8 * 2


class Timeline:
    """A fake CUDA stream. Work advances `now` by milliseconds. The host knows what happened before `done`, and waiting
    advances that."""

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
    timeline = Timeline()
    monkeypatch.setattr(torch.cuda, "Event", timeline.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: timeline)
    return timeline


def running_clock(device: str) -> StreamClock:
    clock = StreamClock(torch.device(device))
    clock.running = True
    return clock


def run_pass(timeline: Timeline, clock: StreamClock, wait_ms: float) -> None:
    """Two waits between work."""
    for _ in range(2):
        timeline.now += 10.0
        with timed(clock):
            timeline.now += wait_ms
    timeline.now += 10.0


def test_each_wait_counts_once_and_only_take_makes_the_host_wait(timeline: Timeline) -> None:
    clock = running_clock("cuda")
    for wait_ms in (1.0, 5.0):
        run_pass(timeline, clock, wait_ms)
    assert timeline.done < 0, "the host has not waited"
    assert clock.take() == pytest.approx(2 * 0.001 + 2 * 0.005)
    assert timeline.done == timeline.now - 10.0, "the host waits for the last timed event only"
    assert clock.take() == 0
    created = len(timeline.events)
    run_pass(timeline, clock, 5.0)
    assert clock.take() == pytest.approx(2 * 0.005) and len(timeline.events) == created, "events are reused"


def test_a_clock_that_does_not_run_costs_nothing(timeline: Timeline) -> None:
    clock = StreamClock(torch.device("cuda"))
    run_pass(timeline, clock, 1.0)
    with timed(None):
        pass
    assert not timeline.events and clock.take() == 0


def test_a_wait_that_raises_is_stopped(timeline: Timeline) -> None:
    clock = running_clock("cuda")
    with pytest.raises(ArithmeticError), timed(clock):
        timeline.now += 3.0
        raise ArithmeticError
    run_pass(timeline, clock, 6.0)
    assert clock.take() == pytest.approx(0.003 + 2 * 0.006)


def test_cpus_measure_while_the_clock_runs() -> None:
    clock = StreamClock(CPU)
    with timed(clock):
        time.sleep(0.01)
    assert clock.take() == 0
    clock.running = True
    with timed(clock):
        time.sleep(0.01)
    assert clock.take() >= 0.01 and clock.take() == 0


@pytest.mark.gpu
def test_a_gpu_measures_the_time_on_its_stream() -> None:
    clock = running_clock(f"cuda:{torch.cuda.current_device()}")
    with timed(clock):
        torch.cuda._sleep(2 * 10**7)  # type: ignore[no-untyped-call]
    assert clock.take() > 1e-3 and clock.take() == 0
