"""When short passes are replayed: where the device waits for the host in most of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.attention.executor import ForwardPass
from megatron_longctx.attention.pace import SETTLED, Pace
from megatron_longctx.attention.program import programs
from megatron_longctx.attention.replay import Replay
from megatron_longctx.comm import BufferPool, MixedTransport, PeerTransport
from megatron_longctx.schedules import Kind, build_plan
from tests.attention.test_host_work import engine


def after(*starved: bool) -> Pace:
    pace = Pace()
    for each in starved:
        pace.note(each)
    return pace


def test_a_host_that_keeps_ahead_keeps_its_passes() -> None:
    assert Pace().keeps
    assert after(*[False] * 1000).keeps


def test_the_first_passes_do_not_count() -> None:
    assert after(*[True] * 4, *[False] * 16).keeps
    assert after(*[True] * 19).keeps and not after(*[True] * 20).keeps


@pytest.mark.parametrize(("late", "keeps"), [(7, True), (8, False), (16, False)])
def test_half_of_a_window_decides(late: int, keeps: bool) -> None:
    window = [True] * late + [False] * (16 - late)
    assert after(*[False] * 4, *window).keeps is keeps
    assert after(*[False] * 20, *window).keeps is keeps, "also later"


def test_what_is_late_now_and_then_does_not_add_up() -> None:
    """A step's first layer, after the host has waited for the step before."""
    assert after(*[False] * 4, *([True] + [False] * 7) * 100).keeps


def test_a_steady_loop_is_settled_in_time() -> None:
    assert not after(*[True] * SETTLED).keeps


@pytest.mark.parametrize("schedule", ["zigzag", "all_gather", "ulysses"])
def test_the_device_is_asked_before_every_kernel(schedule: str) -> None:
    """A pass is late if the device had run dry before any of its kernel calls, the last one too."""
    program = programs(build_plan(schedule, 4, 256), 1)[0]
    calls = sum(len(step.calls) for step in program.steps)
    q, k = (torch.empty(64, 1, heads, 8, dtype=torch.bfloat16) for heads in (32, 16))
    for answers in ([False] * calls, [False] * (calls - 1) + [True], [True] + [False] * (calls - 1)):
        left = iter(answers)
        run = ForwardPass(program, engine(), {Kind.Q: (q,), Kind.KV: (k, k)}, 1.0)
        run.run(idle=lambda left=left: next(left))  # type: ignore[misc]
        assert run.starved is any(answers)
        assert run.starved or next(left, None) is None, "asked once for each"


class Run:
    """A pass in which the device waits or does not."""

    def __init__(self, inputs: tuple[torch.Tensor, ...]) -> None:
        self.inputs, self.starved = inputs, False

    def run(self, begun: bool = False, idle: Callable[[], bool] | None = None) -> None:
        self.starved = idle is not None and idle()


def test_passes_are_captured_only_once_the_host_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    dry = False
    stream = type("Stream", (), {"query": lambda self: dry})()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    kind = Replay(Run, lambda run: run.inputs)
    x = torch.ones(3)
    for _ in range(100):
        assert kind((x,))[0] is x
    dry = True
    for _ in range(16):
        assert kind((x,))[0] is x
    with pytest.raises(AttributeError, match="post"):  # a run that is replayed is asked for its post
        kind((x,))


@pytest.mark.parametrize(
    ("transport", "length", "calls"),
    [
        (PeerTransport, 4 * 4096, SETTLED),
        (PeerTransport, 4 * 4096 + 3, SETTLED),  # some rank has no more than 4,096
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
