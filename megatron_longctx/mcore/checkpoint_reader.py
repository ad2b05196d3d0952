"""Read checkpoints that come from anywhere: nothing in them is run.

Unpickling runs whatever a pickle says, and torch's and Megatron's readers unpickle `.metadata` and every object that is
no tensor; TransformerEngine unpickles the state that its layers are given. Here metadata is read by an unpickler that
knows the classes of metadata and no others, objects by torch's loader of plain values, and layers are given plain
values only.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from .version import common_state_loader

# What torch 2.11 to 2.13 and Megatron-Core 0.16 and 0.19 write into `.metadata`, besides dtypes.
_METADATA = (
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
    """Knows the classes it is given, and no others."""

    def __init__(self, stream: Any, classes: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(stream)
        self._classes = frozenset(classes)

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if (module, name) in self._classes or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint and was not loaded")


def read_metadata(path: Path) -> Metadata:
    """What a checkpoint's `.metadata` says: which tensors there are, and which file holds which part.

    Raises:
        OSError: it cannot be read.
        Exception: it is damaged, or holds anything else. Damage may raise almost any class.
    """
    with (path / ".metadata").open("rb") as stream:
        metadata = _Unpickler(stream, _METADATA).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"{type(metadata).__name__} is no metadata")
    for part in metadata.storage_data.values():
        if Path(part.relative_path).name != part.relative_path:
            raise pickle.UnpicklingError(f"{part.relative_path!r} is no file of this checkpoint")
    return metadata


def read_common(path: Path) -> dict[str, Any]:
    """What a checkpoint holds besides sharded tensors and objects. Raises as `read_metadata`."""
    common: dict[str, Any] = _plain(path / COMMON_STATE_FNAME, COMMON_STATE_FNAME)
    return common


def tensor_of(content: bytes, name: str) -> torch.Tensor:
    """A tensor as a checkpoint's files hold it. Raises as `read_metadata`."""
    found: torch.Tensor = _plain(io.BytesIO(content), name)
    return found


def _plain(source: Any, name: str) -> Any:
    """Plain values and tensors that ``torch.save`` has written."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's words advise to load it freely
        raise pickle.UnpicklingError(f"{name} is damaged, or holds other things than values") from None


def load(sharded: dict[str, Any], path: Path) -> dict[str, Any]:
    """`dist_checkpointing.load`, of which nothing unpickles freely. Collective over the world.

    Raises:
        CheckpointException, CheckpointingException: the checkpoint is damaged, or holds anything else than values.
    """
    # Megatron takes readers and planners from no caller.
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (torch_dist, "_get_filesystem_reader", lambda path, **_: _Reader(path)),
        (torch_dist, "MCoreLoadPlanner", _Planner),
        (*common_state_loader(), lambda *args: read_common(Path(args[-1]))),
    )
    with contextlib.ExitStack() as afterwards:
        for owner, name, ours in replaced:
            afterwards.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, ours)
        strategy = torch_dist.TorchDistLoadShardedStrategy()
        loaded: dict[str, Any] = dist_checkpointing.load(sharded, str(path), strategy)
    return loaded


class _Reader(FileSystemReader):
    """Keeps what it has read, since Megatron's strategy asks twice."""

    _found: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._found is None:
            self._found = read_metadata(Path(self.path))
            self._found.storage_meta = StorageMeta(load_id=self.load_id)
        return self._found


class _Planner(torch_dist.MCoreLoadPlanner):  # type: ignore[misc]
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As the base class, which would unpickle freely."""
        name = read_item.dest_index.fqn
        loaded = _plain(value, name)
        if _LAYER_STATE in name:
            for part in loaded:
                _check_layer_state(name, part)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def _check_layer_state(name: str, state: Any) -> None:
    """Refuse what a layer of TransformerEngine, which unpickles its state, could be made to run."""
    if isinstance(state, torch.Tensor):
        content = state.cpu().numpy().tobytes()
        if content:
            _Unpickler(io.BytesIO(content)).load()
    elif state is not None:
        raise pickle.UnpicklingError(f"{name} holds a {type(state).__name__}, expected a tensor or nothing")
