"""Forks: when they are safe, and results and errors of work in one."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from megatron_longctx.core.errors import JobFailed
from megatron_longctx.training import forks


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the threads of this process as those of its start."""
    monkeypatch.setattr(forks, "_THREADS", forks._threads())


def test_a_process_with_a_new_thread_is_not_forked(alone: None) -> None:
    assert forks.start_method() == "fork"
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert forks.start_method() == "spawn"
    end.set()
    thread.join()


def test_a_process_that_uses_cuda_is_not_forked(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "readlink", lambda fd: "/dev/nvidia-uvm")
    assert forks.start_method() == "spawn"


def test_looking_for_gpus_leaves_the_environment_unchanged() -> None:
    before = dict(os.environ)
    assert isinstance(forks.sees_gpu(), bool)
    assert dict(os.environ) == before


def _work(what: str) -> Any:
    os.environ["OF_A_FORK"] = "1"
    errors = {"refused": ValueError("a=1: expected b. Do c."), "unreadable": FileNotFoundError(2, "No such file", "x")}
    if what in errors:
        raise errors[what]
    if what == "dies":
        os._exit(7)
    return {"result": what}


def test_work_in_a_fork_returns_its_result_and_leaves_this_process_as_it_was() -> None:
    assert forks.in_fork(_work, "fine") == {"result": "fine"}
    assert "OF_A_FORK" not in os.environ


def test_errors_of_work_in_a_fork_are_raised_here() -> None:
    with pytest.raises(ValueError, match=r"^a=1: expected b\. Do c\.$"):
        forks.in_fork(_work, "refused")
    with pytest.raises(FileNotFoundError) as caught:
        forks.in_fork(_work, "unreadable")
    assert caught.value.filename == "x"
    with pytest.raises(JobFailed, match="ended with exit code 7"):
        forks.in_fork(_work, "dies")
