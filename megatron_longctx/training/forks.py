"""Forks of a process that has imported everything: they start in milliseconds and share the memory of its modules."""

import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..config.progress import Progress
from ..core.errors import JobFailed
from ..core.kernels.providers import fa4
from .rendezvous import RankInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")


def _threads() -> dict[str, str]:
    """Return the names of this process's threads by their ids, without jemalloc's (of pyarrow), which survive forks."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names[task.name] = (task / "comm").read_text().strip()
    return {number: name for number, name in names.items() if name != "jemalloc_bg_thd"}


_THREADS = _threads()  # those of numpy's OpenBLAS, which ends them before a fork, and this one


def obstacle() -> str | None:
    """Return why this process is not to be forked; None if it can be. A fork could hang or would have no GPU.

    A lock that another thread holds, also one of torch's, stays locked in a fork. CUDA does not survive a fork.
    """
    if RankInfo.from_environment(os.environ) is not None:
        return "torchrun or Slurm has started it"
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            uses_cuda |= os.readlink(fd) == "/dev/nvidia-uvm"  # open from CUDA's initialization on
    if uses_cuda:
        return "CUDA is initialized in the launcher"
    own = str(os.getpid())  # of a fork, the first thread is another one
    started = sorted(name for number, name in _threads().items() if number not in _THREADS and number != own)
    return f"the launcher has started threads ({', '.join(started)})" if started else None


def start_method() -> str:
    """Return how this process starts ranks: by `fork`, or by `spawn` after a line that says why."""
    if reason := obstacle():
        logger.info("ranks are not forks and start some seconds later, because %s", reason)
    return "spawn" if reason else "fork"


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Let modules be imported that ask for GPUs: a fork has asked, they get its answers, and CUDA stays uninitialized.

    FlashAttention-4 imports `tvm_ffi`, which asks whether there is a GPU, and `quack`, which asks for its compute
    capability. If this process cannot be forked, or CUDA does not work, nothing is changed.
    """
    found = None if obstacle() else in_fork(_gpus)
    if found is None:
        yield
        return
    # torch asks the driver's library of management then, which is no better: it opens the devices. But it counts them
    # once, and here it has.
    answers = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **({"QUACK_ARCH": found[0]} if found else {})}
    answers = {name: answer for name, answer in answers.items() if name not in os.environ}
    before, torch.cuda._cached_device_count = torch.cuda._cached_device_count, len(found)
    os.environ.update(answers)
    try:
        yield
    finally:
        for name in answers:
            del os.environ[name]
        torch.cuda._cached_device_count = before


def _gpus() -> list[str] | None:
    """Return the compute capability of every GPU, such as `90`; None if the driver does not work."""
    try:
        return ["{}{}".format(*torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count())]
    except RuntimeError:
        return None


def import_megatron(*names: str) -> None:
    """Import modules of this package that import Megatron, which takes seconds, for the forks of this process."""
    with without_cuda(), Progress("importing Megatron"):
        for name in names:
            importlib.import_module(name)


def checked(fn: Callable[..., T], *args: Any) -> T:
    """Return the result of `fn(*args)`, the check of a job, so that ranks can be forks of this process afterwards.

    If the check can use CUDA, a fork computes it (`in_fork`); otherwise torch computes it in this thread alone.
    """
    with without_cuda():
        if torch.cuda.is_available() and obstacle() is None:
            fa4.package_problem()  # imports it, which the check and the ranks would each do
            result: T = in_fork(fn, *args)
            return result
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return fn(*args)
    finally:
        torch.set_num_threads(threads)


def in_fork(fn: Callable[..., Any], *args: Any) -> Any:
    """Return the result of `fn(*args)`, which can be pickled, computed in a fork: this process stays as it is.

    Raise a ValueError, OSError or ImportError of `fn` here. Raises JobFailed: the fork ended otherwise.
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
    except (ValueError, OSError, ImportError) as error:
        writer.send((False, error))
