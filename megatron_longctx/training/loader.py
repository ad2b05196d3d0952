"""The batches of a rank, read ahead of the step that takes them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ..comm.local_ranks import exit_with_parent
from ..mcore.data import Batch
from .signals import STOP_SIGNALS


class Loader(Iterator[Batch]):
    """PyTorch's `DataLoader` over micro-batches, and one batch more that is ready before it is asked for.

    Its processes start with the first batch; they end with this one, whatever ends it.

    Args:
        data: gives the batch of some samples.
        shares: the samples of every micro-batch, in order.
        workers: processes that read, each a batch at a time; 0: a thread reads.
        device: of the model; batches for GPUs come in page-locked memory.
        prepare: called with every batch ahead of its use, in a thread of this process, one batch after the other.
    """

    def __init__(
        self,
        data: Dataset[Batch],
        shares: Iterable[Sequence[int]],
        workers: int,
        device: torch.device,
        prepare: Callable[[Batch], None] | None = None,
    ) -> None:
        on_gpu = device.type == "cuda"
        self._loader = DataLoader(
            _Read(data),
            sampler=shares,
            batch_size=None,  # the samples of a batch are read together
            num_workers=workers,
            pin_memory=on_gpu,
            # Importing again takes longer than the first steps; workers use neither devices nor threads of torch.
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=_begin,
            generator=torch.Generator(),  # or it would draw from the model's
        )
        self._prepare = prepare
        self._batches: Any = None
        self._next: Future[Batch] | None = None
        self._thread = ThreadPoolExecutor(1, "next batch", partial(torch.cuda.set_device, device) if on_gpu else None)
        # Ends the thread and the processes. At its own end a process would wait for those, which ignore its signals.
        self.close = Finalize(None, self._end, exitpriority=1)

    def __next__(self) -> Batch:
        """Raises:
        ValueError: data that cannot be trained on, in a worker's own words.
        StopIteration: there is no more.
        """
        if self._batches is None:
            # Signals to stop are for the rank, which finishes its step with what its workers read.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                self._batches = iter(self._loader)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        batch = (self._next or self._thread.submit(self._take)).result()
        self._next = self._thread.submit(self._take)
        return batch

    def _end(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        if hasattr(self._batches, "_shutdown_workers"):  # not by forgetting it: an error on its way may hold it
            self._batches._shutdown_workers()

    def _take(self) -> Batch:
        batch: Batch | ValueError = next(self._batches)
        if isinstance(batch, ValueError):
            raise batch
        if self._prepare is not None:
            self._prepare(batch)
        return batch


class _Read(Dataset[Batch | ValueError]):
    """What a worker refuses, it gives as a result: raised there, it would arrive as the text of a traceback."""

    def __init__(self, data: Dataset[Batch]) -> None:
        self._data = data

    def __getitem__(self, samples: Sequence[int]) -> Batch | ValueError:
        try:
            return self._data[samples]
        except ValueError as error:
            return error


def _begin(number: int) -> None:
    """In a worker: end with the rank, without a word about it."""
    exit_with_parent()
    sys.excepthook = _said


def _said(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Standard error gets what went wrong here. That a rank is gone before it has taken a batch is the rank's to say:
    `multiprocessing`'s thread that hands batches over would print a traceback."""
    if not isinstance(error, EOFError | ConnectionError):
        sys.__excepthook__(kind, error, trace)
