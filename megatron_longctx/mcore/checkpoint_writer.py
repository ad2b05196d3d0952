"""A rank's files of a checkpoint, written by a thread while training goes on.

Megatron plans the save, and makes the metadata of what was written; its own strategy forks processes to write, which
hold a CUDA context, cost seconds whatever the size and make every script need a ``__main__`` guard.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms, _write_item

from ..comm import on_rank_0
from . import checkpoint_digests
from .version import pop_common_state

_FILES = 2  # of a rank, each written by a thread
_THROUGH = 2**26  # bytes of page-locked memory
_SMALL = 2**16  # bytes of a tensor that is copied at once: what a forward pass changes is no larger


class PlannedSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """``torch_dist`` saving whose requests are for ``Writing``."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=_FILES)

    def async_save(self, *args: Any, **kwargs: Any) -> AsyncRequest:
        # Its writer asks for the module's queue, which belongs to a manager process that it would start.
        before, filesystem_async._results_queue = filesystem_async._results_queue, queue.Queue()
        try:
            return super().async_save(*args, **kwargs)
        finally:
            filesystem_async._results_queue = before


class SharedSaveStrategy(FullyParallelSaveStrategyWrapper):  # type: ignore[misc]
    """The same where the ranks of ``group`` hold replicas: they share the writing."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(PlannedSaveStrategy(), group)

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, *args: Any) -> AsyncRequest:
        if (common := pop_common_state(sharded_state_dict)) is not None:
            on_rank_0(lambda: torch.save(common, Path(checkpoint_dir) / COMMON_STATE_FNAME))
        return super().async_save(sharded_state_dict, checkpoint_dir, *args)


class HostCopies:
    """Host memory for what is saved, kept from one checkpoint to the next: a tensor's first copy into new memory takes
    several times as long as a later one. Used by one thread at a time."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: dict[int, list[torch.Tensor]] = {}
        self._taken: list[torch.Tensor] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of it, valid until `end`."""
        size = tensor.numel() * tensor.element_size()
        if not (free := self._free.setdefault(size, [])):
            free.append(torch.empty(size, dtype=torch.uint8))
            self.num_bytes += size
        self._taken.append(free.pop())
        found = self._taken[-1].view(tensor.dtype).view(tensor.shape)
        if not tensor.is_cuda:
            return found.copy_(tensor)
        # Straight into pageable memory, the driver keeps other threads from starting kernels meanwhile.
        through = torch.empty(_THROUGH // tensor.element_size(), dtype=tensor.dtype, pin_memory=True)
        copy_through(tensor.detach(), found, through, torch.cuda.current_stream().synchronize)
        return found

    def end(self) -> None:
        """All copies have been written."""
        for each in self._taken:
            self._free[each.numel()].append(each)
        self._taken = []


class Writing:
    """What this rank writes, from its construction on.

    Args:
        request: of ``PlannedSaveStrategy``.
        copies: where tensors are copied to first, so that they may change while they are written; None: they are not.
    """

    def __init__(self, request: AsyncRequest, folder: Path, copies: HostCopies | None) -> None:
        self._request, self._folder, self._copies = request, folder, copies
        self._staged = threading.Event()
        self._digests: checkpoint_digests.Digests = {}
        self._buckets: list[Any] = request.async_fn_args[1] if request.async_fn is not None else []
        self._stream = _side_stream()
        if copies is not None:
            self._buckets = [_mapped(bucket, _copied_if_small) for bucket in self._buckets]
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait_staged(self) -> None:
        """Until the tensors that are saved may change."""
        self._staged.wait()

    @property
    def ended(self) -> bool:
        """Whether this rank has written everything, or failed to."""
        return not self._thread.is_alive()

    def finish(self) -> checkpoint_digests.Digests:
        """Wait, then let Megatron write the metadata. Collective.

        Returns:
            digests of this rank's files.

        Raises:
            torch.distributed.checkpoint.api.CheckpointException: a rank could not write.
        """
        self._thread.join()
        for finalize in self._request.finalize_fns:
            finalize()
        return self._digests

    def _run(self) -> None:
        outcome: Any
        try:
            with self._stream():
                if self._copies is not None:
                    self._buckets = [_mapped(bucket, self._copies.of) for bucket in self._buckets]
                    self._staged.set()
                with ThreadPoolExecutor(max_workers=_FILES) as pool:
                    outcome = dict(enumerate(pool.map(_write_file, self._buckets)))
            if names := [bucket[1] for bucket in self._buckets]:
                self._digests = checkpoint_digests.of_files(self._folder, names)
        except Exception as error:
            outcome = _operating_systems(error)
        self._buckets = []
        if self._copies is not None:
            self._copies.end()
        if self._request.async_fn is not None:
            self._request.async_fn_args[2].put(outcome)
        self._staged.set()


def _mapped(bucket: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    path, name, (objects, tensors) = bucket
    return path, name, (objects, [(item, change(tensor)) for item, tensor in tensors])


def _copied_if_small(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.numel() * tensor.element_size() <= _SMALL else tensor


def copy_through(
    source: torch.Tensor, target: torch.Tensor, through: torch.Tensor, synchronize: Callable[[], None]
) -> None:
    """Copy to a contiguous tensor, a piece of the size of `through` at a time."""
    values, places, most = source.reshape(-1), target.view(-1), through.numel()
    for begin in range(0, values.numel(), most):
        piece = values[begin : begin + most]
        through[: piece.numel()].copy_(piece, non_blocking=True)
        synchronize()
        places[begin : begin + most].copy_(through[: piece.numel()])


def _write_file(bucket: Any) -> list[Any]:
    """A file of a checkpoint, on the disk; what its metadata has to say."""
    path, name, (objects, tensors) = bucket
    transforms = _StorageWriterTransforms()
    with open(path, "wb") as stream:
        written = [
            _write_item(transforms, stream, data.cpu() if tensor else data, item, name, SerializationFormat.TORCH_SAVE)
            for tensor, items in ((False, objects), (True, tensors))
            for item, data in items
        ]
        os.fsync(stream.fileno())
    return written


def _operating_systems(error: Exception) -> Exception:
    """The failure of the operating system that `error` came of, if any: torch's own says nothing of a full disk."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _side_stream() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """For another thread, to copy beside the computation: what has been issued until now comes first."""
    if not torch.cuda.is_available():
        return contextlib.nullcontext
    device: int = torch.cuda.current_device()
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    issued = torch.cuda.current_stream().record_event()

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        torch.cuda.set_device(device)
        with torch.cuda.stream(stream):
            stream.wait_event(issued)
            yield

    return entered
