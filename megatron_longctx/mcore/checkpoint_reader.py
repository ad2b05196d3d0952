"""Safe reading of checkpoints from any source: no code that they contain is run.

A pickle can run arbitrary code. The readers of torch and Megatron unpickle `.metadata` and every object that is not a
tensor, and TransformerEngine unpickles the state of its layers. This module reads metadata with an unpickler that knows
only the classes of metadata, and objects with torch's weights-only loader, and it passes only plain values to layers.
"""

import io
import pickle
import pickletools
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import _ReaderView

from ..core.comm import gather_objects
from .version import common_state_loader

REMEDY = "restore the checkpoint, or choose another iteration or run (in training by run.name)"

# The classes that torch 2.11 to 2.15 and Megatron-Core 0.16 and 0.19 write into `.metadata`, besides dtypes.
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
_MAX_NESTED = 20  # tuples inside tuples; checkpoints have 3


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
    content = (path / ".metadata").read_bytes()
    check_pickle(content)
    return _read_metadata(content)


def names(path: Path) -> Collection[str]:
    """Return the names of all tensors and objects in a checkpoint that `checkpoint_folder.examine` has checked."""
    return _read_metadata((path / ".metadata").read_bytes()).state_dict_metadata.keys()


def _read_metadata(content: bytes) -> Metadata:
    metadata = _Unpickler(io.BytesIO(content), _METADATA_CLASSES).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"{type(metadata).__name__} is not metadata")
    for part in metadata.storage_data.values():
        if Path(part.relative_path).name != part.relative_path:
            raise pickle.UnpicklingError(f"{part.relative_path!r} is not a file of this checkpoint")
        if part.transform_descriptors:
            raise pickle.UnpicklingError(f"{part.transform_descriptors} have no place in a checkpoint")
    return metadata


def read_common(path: Path) -> dict[str, Any]:
    """Read what a checkpoint holds besides sharded tensors and objects. Raises like `read_metadata`."""
    common: dict[str, Any] = _load_plain(io.BytesIO((path / COMMON_STATE_FNAME).read_bytes()), COMMON_STATE_FNAME)
    return common


def read_tensor(content: bytes, name: str) -> torch.Tensor:
    """Decode a tensor from its bytes in a checkpoint file. Raises like `read_metadata`."""
    tensor: torch.Tensor = _load_plain(io.BytesIO(content), name)
    return tensor


def check_pickle(content: bytes) -> None:
    """Refuse a pickle that would end the process while it is read, although it runs no code.

    The hash of deeply nested tuples overflows the stack, and a large index of a value takes memory for all before it.

    Raises:
        UnpicklingError: names what the pickle has.
        Exception: the pickle is damaged. Damage can raise almost any class.
    """
    nested: list[int | None] = []  # for every value on the unpickler's stack, its tuples inside tuples; None: a mark
    values: dict[Any, int | None] = {}
    for code, argument, _ in pickletools.genops(content):
        name, before, depth = code.name, code.stack_before, 0
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            index: int = len(values) if name == "MEMOIZE" else argument  # type: ignore[assignment]
            values[index] = nested[-1]
            if index > len(content):
                raise pickle.UnpicklingError(f"value {index} of {len(content)} bytes has no place in a checkpoint")
        elif name in ("GET", "BINGET", "LONG_BINGET", "DUP"):
            nested.append(nested[-1] if name == "DUP" else values[argument])
        else:
            if pickletools.markobject in before:
                before = before[: before.index(pickletools.markobject)]
                while (each := nested.pop()) is not None:
                    depth = max(depth, each)
            for _ in before:
                depth = max(depth, nested.pop() or 0)
            if depth > _MAX_NESTED:
                raise pickle.UnpicklingError(f"more than {_MAX_NESTED} nested tuples have no place in a checkpoint")
            depth = depth + 1 if name.startswith("TUPLE") else 0
            nested += [None if each is pickletools.markobject else depth for each in code.stack_after]


def check_archive(stream: Any) -> None:
    """Refuse archives that ``torch.save`` does not write: compressed ones, which may unpack to any size.

    Pickles in them are checked by `check_pickle`. Raises like it.
    """
    with zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
        if sum(each.file_size for each in entries) > stream.seek(0, io.SEEK_END):
            raise pickle.UnpicklingError("an archive that is larger than its file has no place in a checkpoint")
        for each in entries:
            if each.filename.endswith(".pkl"):
                check_pickle(archive.read(each))
    stream.seek(0)


def _load_plain(source: io.BytesIO, name: str) -> Any:
    """Load plain values and tensors that ``torch.save`` has written."""
    try:
        check_archive(source)
        return torch.load(source, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, zipfile.BadZipFile):  # torch's message advises to load it with weights_only=False
        raise pickle.UnpicklingError(f"{name} is damaged, or holds objects that are not plain values") from None


def load(sharded: dict[str, Any], path: Path) -> dict[str, Any]:
    """Call `dist_checkpointing.load` with safe readers. Collective over the world.

    Raises:
        ValueError: the checkpoint is damaged, or holds objects that are not plain values; raised on every rank.
    """
    loaded: dict[str, Any] = {}
    failure = None
    with (  # Megatron has no parameters for its readers and planners
        patch.object(torch_dist, "_get_filesystem_reader", lambda path, **_: _Reader(path)),
        patch.object(torch_dist, "MCoreLoadPlanner", _Planner),
        patch.object(*common_state_loader(), lambda *args: read_common(Path(args[-1]))),
    ):
        try:
            loaded = dist_checkpointing.load(sharded, str(path), torch_dist.TorchDistLoadShardedStrategy())
        except (CheckpointingException, CheckpointException) as error:
            failure = first_line(error)
    # In 0.19 every rank reads alone.
    if failures := [each for each in gather_objects(dist.group.WORLD, failure) if each is not None]:
        raise ValueError(f"{path} cannot be loaded ({failures[0]}), expected a complete checkpoint: {REMEDY}")
    return loaded


class _Part(_ReaderView):
    """A part of a file. The base class takes positions from the end with the wrong sign."""

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_END:
            offset, whence = self.len + offset, io.SEEK_SET
        super().seek(offset, whence)
        return self.tell()


class _Reader(FileSystemReader):
    """A reader that keeps the metadata, which Megatron's strategy reads twice, and checks every part that it reads."""

    _metadata: Metadata | None = None

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        part = _Part(file, sinfo.offset, sinfo.length)
        check_archive(part)
        return part

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            # `checkpoint_folder.examine` has checked it, which takes longer than to read it.
            self._metadata = _read_metadata((Path(self.path) / ".metadata").read_bytes())
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
            check_pickle(content)
            _Unpickler(io.BytesIO(content)).load()
    elif state is not None and not (isinstance(state, dict) and set(map(type, state.values())) <= {torch.Tensor}):
        raise pickle.UnpicklingError(f"{name} holds a {type(state).__name__}, expected a tensor or nothing")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message. Of a collective failure it is the first failing rank's."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):  # see `_load_plain`
        return "a value that should be a tensor is damaged, or is not a tensor"
    return str(error).strip().partition("\n")[0] or type(error).__name__
