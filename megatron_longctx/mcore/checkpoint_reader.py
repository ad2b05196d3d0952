"""Safe reading of checkpoints from any source: no code that they contain is run.

A pickle can run arbitrary code. The readers of torch and Megatron unpickle `.metadata` and every object that is not a
tensor, and TransformerEngine unpickles the state of its layers. This module reads metadata with an unpickler that knows
only the classes of metadata, and objects with torch's weights-only loader, and it passes only plain values to layers.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from .version import common_state_loader

# The classes that torch 2.11 to 2.13 and Megatron-Core 0.16 and 0.19 write into `.metadata`, besides dtypes.
_METADATA_CLASSES = (
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    *(("torch.distributed.checkpoint.planner", name) for name in (
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
)  # fmt: skip
_LAYER_STATE = "._extra_state/"


class _Unpickler(pickle.Unpickler):
    """An unpickler that loads the given classes and dtypes, and refuses all others."""

    def __init__(self, stream: Any, classes: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(stream)
        self._classes = frozenset(classes)

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if (module, name) in self._classes or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint and was not loaded")


def read_metadata(path: Path) -> Metadata:
    """Read a checkpoint's `.metadata`: which tensors it has, and which file holds which part of them.

    Raises:
        OSError: the file cannot be read.
        Exception: the file is damaged, or holds anything else. Damage can raise almost any class.
    """
    with (path / ".metadata").open("rb") as stream:
        metadata = _Unpickler(stream, _METADATA_CLASSES).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"{type(metadata).__name__} is not metadata")
    for part in metadata.storage_data.values():
        if Path(part.relative_path).name != part.relative_path:
            raise pickle.UnpicklingError(f"{part.relative_path!r} is not a file of this checkpoint")
    return metadata


def read_common(path: Path) -> dict[str, Any]:
    """Read what a checkpoint holds besides sharded tensors and objects. Raises like `read_metadata`."""
    common: dict[str, Any] = _load_plain(path / COMMON_STATE_FNAME, COMMON_STATE_FNAME)
    return common


def read_tensor(content: bytes, name: str) -> torch.Tensor:
    """Decode a tensor from its bytes in a checkpoint file. Raises like `read_metadata`."""
    tensor: torch.Tensor = _load_plain(io.BytesIO(content), name)
    return tensor


def _load_plain(source: Any, name: str) -> Any:
    """Load plain values and tensors that ``torch.save`` has written."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's message advises to load it with weights_only=False
        raise pickle.UnpicklingError(f"{name} is damaged, or holds objects that are not plain values") from None


def load(sharded: dict[str, Any], path: Path) -> dict[str, Any]:
    """Call `dist_checkpointing.load` with safe readers. Collective over the world.

    Raises:
        CheckpointException, CheckpointingException: the checkpoint is damaged, or holds objects that are not plain
            values.
    """
    with (  # Megatron has no parameters for its readers and planners
        patch.object(torch_dist, "_get_filesystem_reader", lambda path, **_: _Reader(path)),
        patch.object(torch_dist, "MCoreLoadPlanner", _Planner),
        patch.object(*common_state_loader(), lambda *args: read_common(Path(args[-1]))),
    ):
        strategy = torch_dist.TorchDistLoadShardedStrategy()
        loaded: dict[str, Any] = dist_checkpointing.load(sharded, str(path), strategy)
    return loaded


class _Reader(FileSystemReader):
    """A reader that keeps the metadata, which Megatron's strategy reads twice."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = read_metadata(Path(self.path))
            self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


class _Planner(torch_dist.MCoreLoadPlanner):  # type: ignore[misc]
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Do what the base class does, without its unrestricted unpickling."""
        name = read_item.dest_index.fqn
        loaded = _load_plain(value, name)
        if _LAYER_STATE in name:
            for part in loaded:
                _check_layer_state(name, part)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def _check_layer_state(name: str, state: Any) -> None:
    """Refuse state that could run code in a layer of TransformerEngine, which unpickles it."""
    if isinstance(state, torch.Tensor):
        content = state.cpu().numpy().tobytes()
        if content:
            _Unpickler(io.BytesIO(content)).load()
    elif state is not None:
        raise pickle.UnpicklingError(f"{name} holds a {type(state).__name__}, expected a tensor or nothing")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message. Of a collective failure it is the first failing rank's."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):  # see `_load_plain`
        return "a value that should be a tensor is damaged, or is not a tensor"
    return str(error).strip().partition("\n")[0] or type(error).__name__
