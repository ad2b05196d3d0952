"""Forks of a process that has imported everything: they start in milliseconds and share the memory of its modules."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..core.errors import JobFailed


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


_THREADS = _threads()  # those of numpy's OpenBLAS, which survives forks, and this one


def start_method() -> str:
    """Return how to start processes: `fork`, or `spawn` if a fork of this process could hang or would have no GPU.

    A lock that another thread holds, also one of torch's, stays locked in a fork. CUDA does not survive a fork.
    """
    threads, uses_cuda = _threads() > _THREADS, False
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            uses_cuda |= os.readlink(fd) == "/dev/nvidia-uvm"  # open from CUDA's initialization on
    return "spawn" if threads or uses_cuda else "fork"


def sees_gpu() -> bool:
    """Return whether torch sees a CUDA device. Unlike `torch.cuda.is_available`, it leaves CUDA uninitialized."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in this thread alone, so that this process can be forked afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def in_fork(fn: Callable[..., Any], *args: Any) -> Any:
    """Return the result of `fn(*args)`, which can be pickled, computed in a fork: this process stays as it is.

    Raises:
        ValueError, OSError: what `fn` raised.
        JobFailed: the fork ended otherwise.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(writer, fn, args), daemon=True)
    process.start()
    writer.close()
    try:
        succeeded, result = reader.recv()
    except EOFError:
        process.join()
        raise JobFailed(f"the check of the job ended with exit code {process.exitcode}") from None
    finally:  # also if interrupted
        process.kill()
        process.join()
    if not succeeded:
        raise result
    return result


def _send_result(writer: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the parent as well, which ends this process
    try:
        writer.send((True, fn(*args)))
    except (ValueError, OSError) as error:
        writer.send((False, error))
