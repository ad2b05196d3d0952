"""Which way short passes go: both are tried, nobody waits, and the faster one stays."""

from __future__ import annotations

import pytest

from megatron_longctx.attention.trial import SETTLED, Trial


class Device:
    """Gives marks on a time line that passes move on, and has done those before `done`. Times in ms.

    launch: of a pass as it is, by the host; a replay's takes no time.
    """

    def __init__(self, replayed: float, eager: float, launch: float = 0.0) -> None:
        self.took = {"replayed": replayed, "eager": eager}
        self.launch = launch
        self.now = self.host = 0.0
        self.done = float("inf")
        self.ran: list[str] = []

    def trial(self) -> Trial:
        return Trial(self.mark, lambda: self.host / 1e3)

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
        self.host += self.launch if way == "eager" else 0.0


class Mark:
    def __init__(self, device: Device, at: float) -> None:
        self._device, self._at = device, at

    def query(self) -> bool:
        return self._at <= self._device.done

    def elapsed_time(self, stop: Mark) -> float:
        return stop._at - self._at


@pytest.mark.parametrize(
    ("replayed", "eager", "launch", "stays"),
    [(4.6, 4.3, 3.0, "eager"), (5.3, 6.2, 3.0, "replayed"), (4.6, 4.3, 6.7, "replayed"), (4.6, 4.3, 4.2, "replayed")],
    ids=["copies cost", "passes cost", "launches cost", "launches cost almost as much"],
)
def test_the_better_way_stays(replayed: float, eager: float, launch: float, stays: str) -> None:
    device = Device(replayed, eager, launch)
    trial = device.trial()
    tried = device.passes(trial, SETTLED)
    assert tried[:4] == ["eager"] * 4, "kernels are compiled before anything is captured"
    assert tried.count("replayed") > 8 and tried[-1] == "eager" and trial.replays is None
    assert device.passes(trial, 100) == [stays] * 100
    assert trial.replays is (stays == "replayed")


def test_what_the_first_pass_prepares_is_no_launch() -> None:
    device = Device(2.0, 1.0, launch=500.0)
    trial = device.trial()
    device.passes(trial, 1)
    device.launch = 0.5
    device.passes(trial, SETTLED - 1)
    assert device.passes(trial, 2) == ["eager"] * 2


def test_a_host_that_waits_for_room_later_does_not_count() -> None:
    device = Device(2.0, 1.0, launch=0.5)
    trial = device.trial()
    device.passes(trial, SETTLED - 10)
    device.launch = 1.0
    device.passes(trial, 10)
    assert device.passes(trial, 2) == ["eager"] * 2


def test_a_pass_that_is_slow_once_does_not_decide() -> None:
    device = Device(1.0, 2.0)
    trial = device.trial()
    device.passes(trial, 70)
    device.took["replayed"] = 50.0
    device.passes(trial, 1)
    device.took["replayed"] = 1.0
    device.passes(trial, SETTLED - 71)
    assert device.passes(trial, 3) == ["replayed"] * 3


def test_nothing_is_taken_before_the_device_is_there() -> None:
    device = Device(1.0, 2.0)
    trial = device.trial()
    device.passes(trial, SETTLED - 1)
    device.done = device.now
    assert device.passes(trial, 20) == ["eager"] * 20 and trial.replays is None
    device.done = device.now
    assert device.passes(trial, 2) == ["replayed"] * 2


def test_what_a_pass_gives_is_given_on() -> None:
    trial = Device(1.0, 1.0).trial()
    assert [trial.run(lambda: "replayed", lambda: "eager") for _ in range(5)] == ["eager"] * 4 + ["replayed"]
