"""Batches of a rank, read ahead of the step that uses them."""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.util import Finalize
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ..mcore.data import TrainingBatch
from .ranks import exit_with_parent
from .signals import SIGNALS, blocked

_END_WITHIN_S = 5.0  # for each of the thread and the workers, which a hanging file system may hold


class Loader(Iterator[TrainingBatch]):
    """PyTorch's `DataLoader` over micro-batches, plus one batch that is ready before `next` is called.

    Worker processes start with the first batch. They end with this process, however it ends.

    Args:
        data: returns the batch of a list of samples.
        shares: the samples of every micro-batch, in order.
        workers: processes that read, one batch each at a time; 0 for reading in a thread.
        device: the model's device. Batches for GPUs are in pinned memory.
        prepare: called with every batch ahead of its use, in one thread of this process.
    """

    def __init__(
        self,
        data: Dataset[TrainingBatch],
        shares: Iterable[Sequence[int]],
        workers: int,
        device: torch.device,
        prepare: Callable[[TrainingBatch], None] | None = None,
    ) -> None:
        on_gpu = device.type == "cuda"
        self._loader = DataLoader(
            _ErrorsAsResults(data),
            sampler=shares,
            batch_size=None,  # `data` returns whole batches
            num_workers=workers,
            pin_memory=on_gpu,
            # Spawned workers would import for longer than the first steps take. They use no device and no threads.
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=_init_worker,
            generator=torch.Generator(),  # the default generator is the model's
        )
        self._prepare = prepare
        self._batches: Any = None
        self._next: Future[TrainingBatch] | None = None
        self._wanted: SimpleQueue[Future[TrainingBatch] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(device,), name="next batch", daemon=True)
        self._thread.start()
        # Ends the thread and the workers. At exit, Python would wait for the workers, which ignore its signals.
        self.close = Finalize(None, self._end, exitpriority=1)

    def __next__(self) -> TrainingBatch:
        """Return the next batch. Raise the ValueError of the worker that refused its data."""
        if self._batches is None:
            with blocked(SIGNALS):  # workers ignore them, so that the rank can finish its step
                self._batches = iter(self._loader)
        batch = (self._next or self._want()).result()
        self._next = self._want()
        return batch

    def _want(self) -> Future[TrainingBatch]:
        wanted: Future[TrainingBatch] = Future()
        self._wanted.put(wanted)
        return wanted

    def _read(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while (wanted := self._wanted.get()) is not None:
            try:
                wanted.set_result(self._take())
            except BaseException as error:
                wanted.set_exception(error)

    def _end(self) -> None:
        self._wanted.put(None)
        self._thread.join(_END_WITHIN_S)
        if hasattr(self._batches, "_shutdown_workers"):  # explicitly: a raised error may still refer to the iterator
            self._batches._shutdown_workers()  # asks them to end, and waits a few seconds for each
            for worker in self._batches._workers:
                worker.kill()  # one that is stopped would never end, and Python waits for it at exit
                worker.join(_END_WITHIN_S)

    def _take(self) -> TrainingBatch:
        batch: TrainingBatch | ValueError = next(self._batches)
        if isinstance(batch, ValueError):
            raise batch
        if self._prepare is not None:
            self._prepare(batch)
        return batch


class _ErrorsAsResults(Dataset[TrainingBatch | ValueError]):
    """Returns a ValueError as a result: raised in a worker, it would arrive as the text of a traceback."""

    def __init__(self, data: Dataset[TrainingBatch]) -> None:
        self._data = data

    def __getitem__(self, samples: Sequence[int]) -> TrainingBatch | ValueError:
        try:
            return self._data[samples]
        except ValueError as error:
            return error


def _init_worker(number: int) -> None:
    exit_with_parent()
    _drop_sockets()
    sys.excepthook = _print_unless_rank_ended


def _drop_sockets() -> None:
    """Close the sockets that this process has inherited: the other ranks would not see that the rank has ended.

    Their numbers refer to nothing from now on, and stay taken, because objects here may still close them.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in Path("/proc/self/fd").iterdir():
        if fd.is_socket():
            os.dup2(nothing, int(fd.name))
    os.close(nothing)


def _print_unless_rank_ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a worker's error, but not that the rank ended before it took a batch.

    The thread of `multiprocessing` that sends batches would print a traceback of that.
    """
    if not isinstance(error, EOFError | ConnectionError):
        sys.__excepthook__(kind, error, trace)
