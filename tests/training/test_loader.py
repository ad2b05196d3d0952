"""Batches read ahead: their order, preparation before use, errors of workers, and the end of workers."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, _utils
from torch.utils.data._utils.pin_memory import pin_memory

from megatron_longctx.mcore.data import TrainingBatch
from megatron_longctx.training import loader
from megatron_longctx.training.loader import Loader
from megatron_longctx.training.run_folder import RunLock
from tests.shared.jobs import PATIENCE_S

CPU = torch.device("cpu")
SHARES = [range(first, first + 2) for first in range(0, 20, 2)]


class Numbers(Dataset[TrainingBatch]):
    """Batches whose tokens are the numbers of the samples. Some samples fail."""

    def __init__(self, failures: dict[int, Exception] | None = None) -> None:
        self.failures = failures or {}

    def __getitem__(self, samples: Sequence[int]) -> TrainingBatch:
        for sample in samples:
            if sample in self.failures:
                raise self.failures[sample]
        numbers = torch.tensor([list(samples)])
        return TrainingBatch(numbers, numbers, numbers.float(), documents=(1, 1))


@pytest.fixture
def make_loader() -> Iterator[Any]:
    loaders = []

    def make(data: Dataset[TrainingBatch], workers: int, **options: Any) -> Loader:
        loaders.append(Loader(data, SHARES, workers, CPU, **options))
        return loaders[-1]

    yield make
    for each in loaders:
        each.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_are_in_order_for_any_number_of_workers(make_loader: Any, workers: int) -> None:
    before, loader = torch.get_rng_state(), make_loader(Numbers(), workers)
    assert not multiprocessing.active_children(), "they start with the first batch"
    found = [next(loader)]
    assert len(multiprocessing.active_children()) == workers
    found += loader
    assert [batch.tokens[0].tolist() for batch in found] == [list(share) for share in SHARES]
    assert all(batch.documents == (1, 1) for batch in found)
    assert torch.equal(torch.get_rng_state(), before), "the loader draws from another generator"


@pytest.mark.parametrize("workers", [0, 1])
def test_the_next_batch_is_prepared_while_one_is_in_use(make_loader: Any, workers: int) -> None:
    prepared: list[tuple[int, threading.Thread]] = []
    second = threading.Event()

    def prepare(batch: TrainingBatch) -> None:
        prepared.append((int(batch.tokens[0, 0]), threading.current_thread()))
        if len(prepared) == 2:
            second.set()

    loader = make_loader(Numbers(), workers, prepare=prepare)
    assert int(next(loader).tokens[0, 0]) == 0
    assert second.wait(PATIENCE_S), "before `next` is called"
    assert [number for number, _ in prepared] == [0, 2]
    assert {thread for _, thread in prepared}.isdisjoint({threading.current_thread()})
    assert len(list(loader)) == 9 and [number for number, _ in prepared] == list(range(0, 20, 2))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_workers_refusal_is_raised_unchanged_at_its_batch(make_loader: Any, workers: int) -> None:
    loader = make_loader(Numbers({5: ValueError("data.prefix=x: expected y. Do z.")}), workers)
    assert [int(next(loader).tokens[0, 0]) for _ in range(2)] == [0, 2]
    with pytest.raises(ValueError) as caught:
        next(loader)
    assert str(caught.value) == "data.prefix=x: expected y. Do z."


def test_other_errors_of_a_worker_have_its_traceback(make_loader: Any) -> None:
    with pytest.raises(KeyError, match=r"(?s)worker process 0.*in __getitem__.*raise self.failures"):
        next(make_loader(Numbers({1: KeyError("x")}), 1))


def test_errors_of_prepare_are_raised(make_loader: Any) -> None:
    def prepare(batch: TrainingBatch) -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match=r"^no room$"):
        next(make_loader(Numbers(), 0, prepare=prepare))


def test_workers_ignore_stop_signals(make_loader: Any) -> None:
    loader = make_loader(Numbers(), 2)
    next(loader)
    for worker in multiprocessing.active_children():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            assert worker.pid is not None
            os.kill(worker.pid, number)
    assert len(list(loader)) == 9


def _result_of(process: Callable[[Connection], None]) -> Any:
    """Return what a forked process sends before it ends."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    rank = context.Process(target=process, args=(there,))
    rank.start()
    there.close()
    result = here.recv() if here.poll(PATIENCE_S) else "nothing"
    rank.join(PATIENCE_S)
    if rank.exitcode is None:
        rank.kill()
        return f"{result}, and it has not ended"
    return result


def _kill_worker(pipe: Connection) -> None:
    loader = Loader(Numbers(), SHARES, 1, CPU)
    next(loader)
    (worker,) = multiprocessing.active_children()
    result = "nothing"
    try:
        try:
            worker.kill()
            result = f"{len(list(loader))} batches more"
        finally:  # if the awaited batch fails first, torch's SIGCHLD handler would raise its error anywhere
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    except (RuntimeError, OSError, EOFError) as error:
        result = repr(error)
    pipe.send(result)
    os._exit(0)


def test_a_worker_that_dies_is_noticed() -> None:
    assert "Error" in _result_of(_kill_worker)


def _stop_worker(pipe: Connection) -> None:
    loader._END_WITHIN_S = _utils.MP_STATUS_CHECK_INTERVAL = 0.2
    batches = Loader(Numbers(), SHARES, 1, CPU)
    next(batches)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid or 0, signal.SIGSTOP)
    batches.close()
    worker.join(PATIENCE_S)
    pipe.send(worker.exitcode)


def test_a_stopped_worker_does_not_keep_its_rank_from_ending() -> None:
    assert _result_of(_stop_worker) == -signal.SIGKILL


class Hanging(Numbers):
    """A file system that does not answer."""

    asked = threading.Event()

    def __getitem__(self, samples: Sequence[int]) -> TrainingBatch:
        if 2 in samples:
            self.asked.set()
            time.sleep(PATIENCE_S)
        return super().__getitem__(samples)


def _hang_in_the_thread(pipe: Connection) -> None:
    loader._END_WITHIN_S = 0.2
    batches = Loader(Hanging(), SHARES, 0, CPU)
    next(batches)
    Hanging.asked.wait()
    pipe.send("one batch")  # and this process ends


def test_a_read_that_hangs_does_not_keep_its_rank_from_ending() -> None:
    assert _result_of(_hang_in_the_thread) == "one batch"


def open_files(pid: int) -> set[str]:
    """Return the sockets and locks that a process has open."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this list
            found.add(os.readlink(fd))
    return {name for name in found if name.startswith("socket:") or name.endswith("/lock")}


def _what_workers_hold(pipe: Connection) -> None:
    _, there = socket.socketpair()
    with tempfile.TemporaryDirectory() as folder, there, RunLock(Path(folder, "lock")) as lock:
        lock.keep_from_children()
        batches = Loader(Numbers(), SHARES, 1, CPU)
        next(batches)
        (worker,) = multiprocessing.active_children()
        ours, theirs = (open_files(pid) for pid in (os.getpid(), worker.pid or 0))
        assert len(ours) >= 3
        pipe.send(ours & theirs)
        batches.close()


def test_workers_hold_neither_sockets_nor_the_lock_of_their_rank() -> None:
    assert _result_of(_what_workers_hold) == set()


def _kill_rank(pipe: Connection) -> None:
    loader = Loader(Numbers(), SHARES, 2, CPU)
    for _ in range(2):  # one batch of each worker: both have begun
        next(loader)
    workers = [worker.pid for worker in multiprocessing.active_children()]
    os.kill(workers[1] or 0, signal.SIGSTOP)
    pipe.send(workers)
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_with_a_rank_that_is_killed_even_if_stopped() -> None:
    workers = _result_of(_kill_rank)
    deadline = time.monotonic() + PATIENCE_S
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in workers):
        assert time.monotonic() < deadline, workers
        time.sleep(0.05)


class FailingToSend(Numbers):
    """Errors of the thread that sends batches, as if the rank had ended meanwhile, and one of the worker."""

    def __getitem__(self, samples: Sequence[int]) -> TrainingBatch:
        for error in (EOFError("gone"), ConnectionResetError("reset"), KeyError("of the worker's own")):
            sys.excepthook(type(error), error, None)
        return super().__getitem__(samples)


def test_workers_do_not_report_the_end_of_their_rank(make_loader: Any, capfd: pytest.CaptureFixture[str]) -> None:
    next(make_loader(FailingToSend(), 1))
    err = capfd.readouterr().err
    assert "of the worker's own" in err and "gone" not in err and "reset" not in err


def test_all_tensors_of_a_batch_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 100)
    pinned = pin_memory(Numbers()[range(2)])
    assert all(int(tensor[0, 0]) == 100 for tensor in pinned.tensors.values()) and len(pinned.tensors) == 3
    assert pinned.documents == (1, 1)
