"""The lines of work that takes long."""

import logging
import threading
import time
from pathlib import Path

import pytest

from megatron_longctx.config import progress as module
from megatron_longctx.config.progress import Progress


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log, with a line every millisecond."""
    monkeypatch.setattr(module, "EVERY_S", 0.001)
    caplog.set_level(logging.INFO)
    return caplog


def test_work_that_blocks_has_a_line(often: pytest.LogCaptureFixture) -> None:
    with Progress("waiting"):
        while not often.messages:
            time.sleep(0.001)
    assert often.messages[0].startswith("waiting: ") and often.messages[0].endswith(" so far")


def test_one_rank_tells_for_all(often: pytest.LogCaptureFixture) -> None:
    with Progress("waiting", told=False):
        time.sleep(0.01)
    assert not often.messages


def test_a_line_says_how_far_the_work_is_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with Progress("tokenizing", 500, "MB") as progress:
        now[0] += 10
        assert progress.line() == "tokenizing: 0 of 500 MB, 10 s so far"
        progress.advance(125)
        assert progress.line() == "tokenizing: 125 of 500 MB, 10 s so far, 12.5 MB/s, about 30 s left"
        now[0] += 290
        assert progress.line().endswith("5.0 min so far, 0.417 MB/s, about 15.0 min left")
    with Progress("reading", unit="documents") as progress:
        assert [each for each in progress.each("abc")] == ["a", "b", "c"]
        now[0] += 1
        assert progress.line() == "reading: 3 documents, 1 s so far, 3 documents/s"


def test_no_thread_is_left_so_that_the_process_can_be_forked() -> None:
    before = {path.name for path in Path("/proc/self/task").iterdir()}
    for _ in range(50):
        with Progress("short"):
            pass
        assert {path.name for path in Path("/proc/self/task").iterdir()} <= before
    assert "progress" not in {thread.name for thread in threading.enumerate()}
