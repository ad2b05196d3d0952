"""Write Megatron's standard ``torch_dist`` checkpoint files from threads of the saving process.

Megatron's own strategy starts a manager process and forks writers, so that the same code can save in the background.
For a synchronous save that costs seconds whatever the size, forks a process that holds a CUDA context, and makes
every script need a ``__main__`` guard. The planning, the files and the metadata here are Megatron's.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy


class InProcessSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """``torch_dist`` saving with ``thread_count`` files per rank, each written by a thread.

    For synchronous saves only: the results never leave the process.
    """

    def __init__(self, thread_count: int = 2) -> None:
        super().__init__("torch_dist", 1, thread_count=thread_count)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        """Plan the save; the returned request must be executed by this process."""
        with _results_stay_in_process():
            return super().async_save(sharded_state_dict, checkpoint_dir)

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, save_state_dict_ret: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        if request.async_fn is None:
            return request
        transforms = [writer.transforms] if hasattr(writer, "transforms") else []

        def write(rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
            results.put(_write_buckets(transforms, buckets))

        return request._replace(async_fn=write)


def _write_buckets(transforms: list[Any], buckets: list[Any]) -> dict[int, Any] | Exception:
    """Write each bucket to its file; the outcome in the form that Megatron's writer collects."""
    results: queue.Queue[Any] = queue.Queue()
    pending: queue.Queue[Any] = queue.Queue()

    def write_one(index: int) -> None:
        pending.put(index)
        FileSystemWriterAsync.write_preloaded_data(transforms, index, buckets[index], results, pending, use_fsync=True)

    with ThreadPoolExecutor(max_workers=len(buckets)) as pool:
        for future in [pool.submit(write_one, index) for index in range(len(buckets))]:
            future.result()
    written: dict[int, Any] = {}
    for _ in buckets:
        index, outcome = results.get_nowait()
        if isinstance(outcome, Exception):
            return _operating_systems(outcome)
        written[index] = outcome
    return dict(sorted(written.items()))


def _operating_systems(error: Exception) -> Exception:
    """The failure of the operating system that `error` came of, if any: torch's own says nothing of a full disk."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


@contextlib.contextmanager
def _results_stay_in_process() -> Iterator[None]:
    """Give the writer a plain queue: the module-level one of Megatron belongs to a manager process it would start."""
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before
