"""Which way short passes go: both are tried, nobody waits, and the faster one stays."""

from __future__ import annotations

import pytest

from megatron_longctx.attention.trial import SETTLED, Trial


class Device:
    """Gives marks on a time line that passes move on, and has done those before `done`."""

    def __init__(self, replayed: float, eager: float) -> None:
        self.took = {"replayed": replayed, "eager": eager}
        self.now = 0.0
        self.done = float("inf")
        self.ran: list[str] = []

    def mark(self) -> Mark:
        return Mark(self, self.now)

    def passes(self, trial: Trial, count: int) -> list[str]:
        self.ran = []
        for _ in range(count):
            trial.run(lambda: self._pass("replayed"), lambda: self._pass("eager"))
        return self.ran

    def _pass(self, way: str) -> None:
        self.ran.append(way)
        self.now += self.took[way]


class Mark:
    def __init__(self, device: Device, at: float) -> None:
        self._device, self._at = device, at

    def query(self) -> bool:
        return self._at <= self._device.done

    def elapsed_time(self, stop: Mark) -> float:
        return stop._at - self._at


@pytest.mark.parametrize(("replayed", "eager", "stays"), [(4.6, 4.3, "eager"), (5.3, 6.2, "replayed")])
def test_the_faster_way_stays(replayed: float, eager: float, stays: str) -> None:
    device = Device(replayed, eager)
    trial = Trial(device.mark)
    tried = device.passes(trial, SETTLED)
    assert tried[:2] == ["eager", "eager"], "kernels are compiled before anything is captured"
    assert tried.count("replayed") > 8 and tried[-1] == "eager" and trial.replays is None
    assert device.passes(trial, 100) == [stays] * 100
    assert trial.replays is (stays == "replayed")


def test_a_pass_that_is_slow_once_does_not_decide() -> None:
    device = Device(1.0, 2.0)
    trial = Trial(device.mark)
    device.passes(trial, 70)
    device.took["replayed"] = 50.0
    device.passes(trial, 1)
    device.took["replayed"] = 1.0
    device.passes(trial, SETTLED - 71)
    assert device.passes(trial, 3) == ["replayed"] * 3


def test_nothing_is_taken_before_the_device_is_there() -> None:
    device = Device(1.0, 2.0)
    trial = Trial(device.mark)
    device.passes(trial, SETTLED - 1)
    device.done = device.now
    assert device.passes(trial, 20) == ["eager"] * 20 and trial.replays is None
    device.done = device.now
    assert device.passes(trial, 2) == ["replayed"] * 2


def test_what_a_pass_gives_is_given_on() -> None:
    trial = Trial(Device(1.0, 1.0).mark)
    assert [trial.run(lambda: "replayed", lambda: "eager") for _ in range(3)] == ["eager", "eager", "replayed"]
