"""Checkpoints of weights alone, written and read by one process, a parameter at a time.

The model need not be built, nor fit into memory. The files have Megatron's ``torch_dist`` format, which
``checkpoint.load`` reads at any parallel sizes: a layer's parameter is a slice of one tensor of all layers.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from . import checkpoint_folder, checkpoint_reader
from .checkpoint_folder import DamagedCheckpoint

_LAYER = ".{layer}"
_MAX_FILE_BYTES = 4 * 2**30  # then the next file begins: ranks and threads share the files when they check digests


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model, or, with `{layer}` in its name, of one layer.

    layer: counted from 0; None for a parameter outside of layers.
    shape: the shape over all tensor-parallel ranks.
    value: returns the parameter, with this shape and the checkpoint's dtype.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    value: Callable[[], Tensor]


def _key(name: str) -> str:
    return name.replace(_LAYER, "")


def _chunk(layer: int | None, shape: tuple[int, ...]) -> ChunkStorageMetadata:
    """Return the place of a parameter in the tensor of its key."""
    offsets, sizes = ((), ()) if layer is None else ((layer,), (1,))
    return ChunkStorageMetadata(torch.Size((*offsets, *(0 for _ in shape))), torch.Size((*sizes, *shape)))


def write(
    directory: Path,
    parameters: Iterable[Parameter],
    num_layers: int,
    dtype: torch.dtype,
    fingerprint: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> None:
    """Write iteration 0 of a checkpoint directory.

    Args:
        parameters: made one at a time; each is freed before the next one is made.
        fingerprint, extra: as in ``checkpoint.begin``.

    Raises:
        OSError: the checkpoint cannot be written.
    """
    final = checkpoint_folder.iteration_directory(directory, 0)
    partial = final.with_name(final.name + ".partial")
    checkpoint_folder.start(partial)
    metadata = _write_tensors(partial, parameters, num_layers, dtype)
    with (partial / ".metadata").open("wb") as stream:
        pickle.dump(metadata, stream)
    # No parallel sizes: there are no random states, and no state of layers.
    content = {"fingerprint": dict(fingerprint), "layout": {}, "optimizer": None}
    common = {"iteration": 0, "extra": dict(extra), "content_metadata": content}
    torch.save(common, partial / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig("torch_dist", 1), str(partial))
    checkpoint_folder.publish(partial, final, {}, checkpoint_folder.Retention())


def _write_tensors(partial: Path, parameters: Iterable[Parameter], num_layers: int, dtype: torch.dtype) -> Metadata:
    tensors: dict[str, Any] = {}  # of TensorStorageMetadata
    places: dict[MetadataIndex, _StorageInfo] = {}
    number = end = 0
    for parameter in parameters:
        if end >= _MAX_FILE_BYTES:
            number += 1
        name = f"__0_{number}.distcp"
        begin, end = _append(partial / name, parameter, dtype)
        key, chunk = _key(parameter.name), _chunk(parameter.layer, parameter.shape)
        places[MetadataIndex(key, chunk.offsets)] = _StorageInfo(name, begin, end - begin)
        whole = torch.Size((num_layers, *parameter.shape) if parameter.layer is not None else parameter.shape)
        tensors.setdefault(key, TensorStorageMetadata(TensorProperties(dtype), whole, [])).chunks.append(chunk)
    return Metadata(tensors, storage_data=places)


def _append(path: Path, parameter: Parameter, dtype: torch.dtype) -> tuple[int, int]:
    """Append a parameter to a file, and return where it begins and ends there."""
    with path.open("ab") as stream:
        begin = stream.tell()
        value = parameter.value()
        assert value.dtype == dtype and tuple(value.shape) == parameter.shape, parameter.name
        sizes = _chunk(parameter.layer, parameter.shape).sizes
        torch.save(value.reshape(sizes).clone(), stream)  # a view would be saved with all of its base
        return begin, stream.tell()


class Reader:
    """The weights in the folder of an iteration that has been examined.

    Its methods raise ValueError for a parameter that is missing or has another shape.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata = checkpoint_reader.read_metadata(path)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter, or of all layers' parameters with this name."""
        return self._entry(name).properties.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole shape of a parameter, which for parameters of layers begins with their number."""
        return tuple(self._entry(name).size)

    def read(self, name: str, layer: int | None, shape: tuple[int, ...]) -> Tensor:
        """Return a parameter."""
        entry, key, chunk = self._entry(name), _key(name), _chunk(layer, shape)
        found = tuple(entry.size[0 if layer is None else 1 :])
        if found != shape:
            raise DamagedCheckpoint(f"{self._path}: {key} has the shape {found}, expected {shape}")
        out, filled = torch.empty(chunk.sizes, dtype=entry.properties.dtype), 0
        for item in create_read_items_for_chunk_list(key, entry, [chunk]):
            place = self._metadata.storage_data[item.storage_index]
            with (self._path / place.relative_path).open("rb") as stream:
                stream.seek(place.offset)
                part = checkpoint_reader.read_tensor(stream.read(place.length), key)
            target = narrow_tensor_by_index(out, item.dest_offsets, item.lengths)
            target.copy_(narrow_tensor_by_index(part, item.storage_offsets, item.lengths))
            filled += target.numel()
        if filled != out.numel():
            raise DamagedCheckpoint(f"{self._path}: {key} has {filled} values, expected {out.numel()}")
        return out.view(shape)

    def unread(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the keys of the model's tensors that are not among `names`."""
        keys = set(map(_key, names))
        for key, entry in self._metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata) and not key.startswith("optimizer.") and key not in keys:
                yield key

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata.get(_key(name))
        if not isinstance(entry, TensorStorageMetadata):
            raise DamagedCheckpoint(f"{self._path} has no {_key(name)}, expected the weights of the run's model")
        return entry
