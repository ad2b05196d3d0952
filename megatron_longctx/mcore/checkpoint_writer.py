"""Asynchronous saves: a thread writes a rank's files of a checkpoint while training continues.

Megatron plans a save and writes the metadata of its files. Megatron's own writer forks processes, which hold a CUDA
context, cost seconds at any size and require a ``__main__`` guard in every script.
"""

import contextlib
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms, _write_item

from ..core.comm import gather_objects, on_rank_0
from . import checkpoint_folder
from .checkpoint_folder import Digests, Retention
from .checkpoint_reader import first_line
from .version import pop_common_state

_PINNED_BYTES = 2**26
_SMALL_BYTES = 2**16  # a tensor up to this size is copied immediately; a forward pass changes no larger ones


class SaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's ``torch_dist`` strategy for saving, whose requests `PendingSave` executes."""

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, *args: Any) -> AsyncRequest:
        if (common := pop_common_state(sharded_state_dict)) is not None:
            on_rank_0(lambda: torch.save(common, Path(checkpoint_dir) / COMMON_STATE_FNAME))
        # Megatron's writer uses the module's queue; by default that belongs to a manager process that it would start.
        with patch.object(filesystem_async, "_results_queue", queue.Queue()):
            return super().async_save(sharded_state_dict, checkpoint_dir, *args)


class HostCopies:
    """Copies of tensors in host memory that is reused: the first copy into new memory takes several times as long.

    Only one thread may use it at a time.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self._taken: list[torch.Tensor] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy that is valid until `release`."""
        size = tensor.numel() * tensor.element_size()
        if not (free := self._free.setdefault(size, [])):
            free.append(torch.empty(size, dtype=torch.uint8))
        self._taken.append(free.pop())
        copy = self._taken[-1].view(tensor.dtype).view(tensor.shape)
        if not tensor.is_cuda:
            return copy.copy_(tensor)
        # During a copy to pageable memory the driver prevents other threads from launching kernels.
        pinned = torch.empty(_PINNED_BYTES // tensor.element_size(), dtype=tensor.dtype, pin_memory=True)
        copy_through(tensor.detach(), copy, pinned, torch.cuda.current_stream().synchronize)
        return copy

    def release(self) -> None:
        """Free the memory of all copies for new ones."""
        for memory in self._taken:
            self._free[memory.numel()].append(memory)
        self._taken = []


class PendingSave:
    """A checkpoint that a thread writes. Construction starts the thread.

    Args:
        request: Megatron's request, made by `SaveStrategy`.
        partial, final: the folder that the files are written to, and its name when the checkpoint is complete.
        copies: where tensors are copied first, so that they may change while the copies are written. None: they are
            not copied.
    """

    def __init__(
        self, request: AsyncRequest, partial: Path, final: Path, retention: Retention, copies: HostCopies | None
    ) -> None:
        self._request, self._copies = request, copies
        self._partial, self._final, self._retention = partial, final, retention
        self._staged = threading.Event()
        self._digests: Digests = {}
        self._buckets: list[Any] = request.async_fn_args[1] if request.async_fn is not None else []
        self._stream = _side_stream()
        if copies is not None:
            self._buckets = [_map_tensors(bucket, _copy_if_small) for bucket in self._buckets]
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait_staged(self) -> None:
        """Wait until this rank's tensors may change."""
        self._staged.wait()

    @property
    def written(self) -> bool:
        """Whether this rank has written its files, or failed to. If all ranks have, `finish` takes no time."""
        return not self._thread.is_alive()

    def finish(self) -> Path:
        """Wait for the files, make the checkpoint the latest, and delete expired ones; return its folder. Collective
        over the world.

        Raises:
            OSError: a rank cannot write; what all ranks have written is deleted.
        """
        try:
            self._thread.join()
            try:
                for finalize in self._request.finalize_fns:  # Megatron writes the metadata
                    finalize()
            except CheckpointException as error:  # on all ranks, but only rank 0 has the reason
                why = first_line(error)
                raise OSError(on_rank_0(lambda: f"{self._partial} cannot be written ({why})")) from error
            digests: Digests = {}
            for of_rank in gather_objects(dist.group.WORLD, self._digests):
                digests |= of_rank
            on_rank_0(lambda: checkpoint_folder.publish(self._partial, self._final, digests, self._retention))
        except BaseException:
            delete(self._partial)
            raise
        return self._final

    def _run(self) -> None:
        outcome: Any
        try:
            with self._stream():
                if self._copies is not None:
                    self._buckets = [_map_tensors(bucket, self._copies.copy) for bucket in self._buckets]
                    self._staged.set()
                with ThreadPoolExecutor() as pool:  # starts a thread per file
                    outcome = dict(enumerate(pool.map(_write_file, self._buckets)))
            if names := [bucket[1] for bucket in self._buckets]:
                self._digests = checkpoint_folder.digests_of(self._partial, names)
        except Exception as error:
            outcome = _os_error(error)
        self._buckets = []
        if self._copies is not None:
            self._copies.release()
        if self._request.async_fn is not None:
            self._request.async_fn_args[2].put(outcome)
        self._staged.set()


def delete(partial: Path) -> None:
    """Delete what a failed save has written, which takes space that a full disk does not have."""
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)


def _map_tensors(bucket: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    path, name, (objects, tensors) = bucket
    return path, name, (objects, [(item, change(tensor)) for item, tensor in tensors])


def _copy_if_small(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.numel() * tensor.element_size() <= _SMALL_BYTES else tensor


def copy_through(
    source: torch.Tensor, target: torch.Tensor, buffer: torch.Tensor, synchronize: Callable[[], None]
) -> None:
    """Copy to a contiguous tensor through a buffer, as many elements at a time as the buffer has."""
    values, places, size = source.reshape(-1), target.view(-1), buffer.numel()
    for begin in range(0, values.numel(), size):
        piece = values[begin : begin + size]
        buffer[: piece.numel()].copy_(piece, non_blocking=True)
        synchronize()
        places[begin : begin + size].copy_(buffer[: piece.numel()])


def _write_file(bucket: Any) -> list[Any]:
    """Write a file of a checkpoint to the disk, and return what the metadata needs of it."""
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


def _os_error(error: Exception) -> Exception:
    """Return the operating system's error that caused `error`, if any: torch's own does not mention a full disk."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _side_stream() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context in which another thread copies on a separate stream, after all that has been launched so far."""
    if not torch.cuda.is_available():
        return contextlib.nullcontext
    device: int = torch.cuda.current_device()
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    launched = torch.cuda.current_stream().record_event()

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        torch.cuda.set_device(device)
        with torch.cuda.stream(stream):
            stream.wait_event(launched)
            yield

    return entered
