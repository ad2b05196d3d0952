"""Forks: when they are safe, and results and errors of work in one."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_longctx.core.errors import JobFailed
from megatron_longctx.training import forks


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the threads of this process as those of its start."""
    monkeypatch.setattr(forks, "_THREADS", forks._threads())


@contextlib.contextmanager
def thread(name: str) -> Iterator[None]:
    """Run a thread that Linux shows by this name."""
    begun, end = threading.Event(), threading.Event()

    def wait() -> None:
        Path("/proc/thread-self/comm").write_text(name)
        begun.set()
        end.wait()

    running = threading.Thread(target=wait)
    running.start()
    begun.wait()
    try:
        yield
    finally:
        end.set()
        running.join()


def test_a_process_with_a_new_thread_is_not_forked(alone: None) -> None:
    assert forks.obstacle() is None
    forks.in_fork(_work, "fine")  # OpenBLAS ends its threads before a fork: none may be taken for one of them
    with thread("cuda0001"):
        assert forks.obstacle() == "the launcher has started threads (cuda0001)"


def test_threads_of_jemalloc_survive_forks(alone: None) -> None:
    with thread("jemalloc_bg_thd"):
        assert forks.obstacle() is None


def test_a_process_that_uses_cuda_is_not_forked(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "readlink", lambda fd: "/dev/nvidia-uvm")
    assert forks.obstacle() == "CUDA is initialized in the launcher"
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert forks.obstacle() == "torchrun or Slurm has started it", "each rank then is a process that starts no others"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    """A host with two GPUs of compute capability 9.0, where nothing has set what torch and quack read."""
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in _READ:
        monkeypatch.delenv(name, raising=False)


_READ = ("PYTORCH_NVML_BASED_CUDA_CHECK", "QUACK_ARCH")  # by torch and by quack


def test_modules_that_ask_for_gpus_are_answered_without_cuda(asked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    with forks.without_cuda():
        monkeypatch.setattr(torch.cuda, "_device_count_nvml", _broken)
        assert os.environ["QUACK_ARCH"] == "90"
        assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    assert dict(os.environ) == before and torch.cuda._cached_device_count is None
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    monkeypatch.setenv("QUACK_ARCH", "100")
    with forks.without_cuda():
        assert os.environ["QUACK_ARCH"] == "100", "the user's"
    assert os.environ["QUACK_ARCH"] == "100"


def test_without_gpus_modules_are_told_so(asked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 0)
    with forks.without_cuda():
        monkeypatch.setattr(torch.cuda, "_device_count_nvml", _broken)
        assert not torch.cuda.is_available() and "QUACK_ARCH" not in os.environ


def test_a_driver_that_does_not_work_is_asked_by_nobody_else(asked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: _broken())
    with forks.without_cuda():
        assert not any(name in os.environ for name in _READ)


def _broken() -> int:
    raise RuntimeError("No CUDA GPUs are available")


def _work(what: str) -> Any:
    os.environ["OF_A_FORK"] = "1"
    errors = {"refused": ValueError("a=1: expected b. Do c."), "unreadable": FileNotFoundError(2, "No such file", "x")}
    errors["absent"] = ModuleNotFoundError("No module named 'x'", name="x")
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
    with pytest.raises(ModuleNotFoundError) as missing:
        forks.in_fork(_work, "absent")
    assert missing.value.name == "x", "the command says by it which extra is missing"
    with pytest.raises(JobFailed, match="ended with exit code 7"):
        forks.in_fork(_work, "dies")
