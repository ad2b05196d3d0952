"""Checkpoints of weights alone, written and read by one process, a parameter at a time.

The model need not be built, nor fit into memory. The files have Megatron's ``torch_dist`` format, which
``checkpoint.load`` reads at any parallel sizes: a layer's parameter is a slice of one tensor of all layers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

logger = logging.getLogger(__name__)

JOURNAL = "progress.jsonl"
_LAYER = ".{layer}"
_MAX_FILE_BYTES = 4 * 2**30  # then the next file begins: ranks and threads share the files when they check digests


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model, or, with `{layer}` in its name, of one layer.

    Args:
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


class Journal:
    """A record of the weights that are already written, so that another process can continue after a kill.

    The file has lines of JSON: first the identity, then one line per written parameter with its digest. The process
    locks it while it lives, so that no other process takes over what is still being written.

    Args:
        folder: the folder to write into. It gets the journal, and the weights that are taken over.
        others: folders that killed processes may have left; the first with matching weights is taken over and deleted.
        weights: the name of the folder of weights in each of them.
        identity: what the weights are made from, without line breaks.

    Raises:
        OSError: the journal cannot be written.
    """

    def __init__(self, folder: Path, others: Iterable[Path], weights: str, identity: str) -> None:
        self._identity, self._path = identity, folder / JOURNAL
        self._lines: list[str] = []
        for left in others:
            if (left / JOURNAL).is_file():
                self._stream = (left / JOURNAL).open("r+", encoding="utf-8")
                if self._lock() and self._stream.readline().rstrip("\n") == identity:
                    self._lines = self._stream.read().split("\n")
                    if (left / weights).is_dir():
                        (left / weights).rename(folder / weights)
                    (left / JOURNAL).rename(self._path)
                    shutil.rmtree(left)
                    return
                logger.warning("%s has another source or other settings, or is still being written: not used", left)
                self._stream.close()
        self._stream = self._path.open("w", encoding="utf-8")
        self._lock()

    def kept(self, path: Path, names: Sequence[str]) -> list[tuple[int, int]]:
        """Return where, in their files, the parameters begin and end that are in `path` as they were written.

        These are the first of `names`. Everything else in `path` is deleted.
        """
        places: list[tuple[int, int]] = []
        ends: dict[str, int] = {}
        for name, line in zip(names, self._lines, strict=False):
            try:
                written, file, begin, length, digest = json.loads(line)
                with (path / file).open("rb") as stream:
                    stream.seek(begin)
                    intact = hashlib.sha256(stream.read(length)).hexdigest() == digest
            except (OSError, ValueError):  # the last line may be incomplete
                break
            if written != name or not intact:
                break
            places.append((begin, begin + length))
            ends[file] = begin + length
        for file in path.iterdir() if places else ():
            os.truncate(file, ends[file.name]) if file.name in ends else file.unlink()
        self._stream.seek(0)
        self._stream.truncate()
        self._stream.write("\n".join([self._identity, *self._lines[: len(places)], ""]))
        self._stream.flush()
        if self._lines:
            logger.info("continuing a killed import: %d of %d parameters are written", len(places), len(names))
        return places

    def add(self, name: str, file: str, begin: int, content: bytes) -> None:
        """Record a parameter that is written."""
        digest = hashlib.sha256(content).hexdigest()
        self._stream.write(json.dumps([name, file, begin, len(content), digest]) + "\n")
        self._stream.flush()

    def remove(self) -> None:
        """Delete the journal after the last parameter."""
        self._path.unlink()
        self._stream.close()

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def write(
    directory: Path,
    parameters: Iterable[Parameter],
    num_layers: int,
    dtype: torch.dtype,
    fingerprint: Mapping[str, Any],
    extra: Mapping[str, Any],
    journal: Journal,
) -> None:
    """Write iteration 0 of a checkpoint directory, or continue with it where `journal` ends.

    Args:
        parameters: made one at a time; each is freed before the next one is made.
        fingerprint, extra: as in ``checkpoint.begin``.

    Raises:
        OSError: the checkpoint cannot be written.
    """
    final = checkpoint_folder.iteration_directory(directory, 0)
    partial = final.with_name(final.name + ".partial")
    metadata = _write_tensors(partial, list(parameters), num_layers, dtype, journal)
    with (partial / ".metadata").open("wb") as stream:
        pickle.dump(metadata, stream)
    # No parallel sizes: there are no random states, and no state of layers.
    content = {"fingerprint": dict(fingerprint), "layout": {}, "optimizer": None}
    common = {"iteration": 0, "extra": dict(extra), "content_metadata": content}
    torch.save(common, partial / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig("torch_dist", 1), str(partial))
    checkpoint_folder.publish(partial, final, {}, checkpoint_folder.Retention())


def _write_tensors(
    partial: Path, parameters: Sequence[Parameter], num_layers: int, dtype: torch.dtype, journal: Journal
) -> Metadata:
    tensors: dict[str, Any] = {}  # of TensorStorageMetadata
    places: dict[MetadataIndex, _StorageInfo] = {}
    kept = journal.kept(partial, [_journal_name(parameter) for parameter in parameters])
    if not kept:
        checkpoint_folder.start(partial)
    number = end = 0
    name = "__0_0.distcp"  # one string object for all, so that the pickle does not depend on which process wrote what
    for index, parameter in enumerate(parameters):
        if end >= _MAX_FILE_BYTES:
            number += 1
            name = f"__0_{number}.distcp"
        begin, end = kept[index] if index < len(kept) else _append(partial / name, parameter, dtype, journal)
        key, chunk = _key(parameter.name), _chunk(parameter.layer, parameter.shape)
        places[MetadataIndex(key, chunk.offsets)] = _StorageInfo(name, begin, end - begin)
        whole = torch.Size((num_layers, *parameter.shape) if parameter.layer is not None else parameter.shape)
        tensors.setdefault(key, TensorStorageMetadata(TensorProperties(dtype), whole, [])).chunks.append(chunk)
    return Metadata(tensors, storage_data=places)


def _append(path: Path, parameter: Parameter, dtype: torch.dtype, journal: Journal) -> tuple[int, int]:
    """Append a parameter to a file, and return where it begins and ends there."""
    with path.open("ab+") as stream:
        begin = stream.tell()
        value = parameter.value()
        assert value.dtype == dtype and tuple(value.shape) == parameter.shape, parameter.name
        sizes = _chunk(parameter.layer, parameter.shape).sizes
        torch.save(value.reshape(sizes).clone(), stream)  # a view would be saved with all of its base
        del value
        end = stream.tell()
        stream.seek(begin)
        journal.add(_journal_name(parameter), path.name, begin, stream.read())
    return begin, end


def _journal_name(parameter: Parameter) -> str:
    return f"{_key(parameter.name)} {parameter.layer}"


class Reader:
    """The weights of a checkpoint that has been examined.

    Args:
        path: the folder of the iteration.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata = checkpoint_reader.read_metadata(path)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter, or of all layers' parameters with this name.

        Raises:
            ValueError: there is no such parameter.
        """
        return self._entry(name).properties.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole shape of a parameter, which for parameters of layers begins with their number.

        Raises:
            ValueError: there is no such parameter.
        """
        return tuple(self._entry(name).size)

    def read(self, name: str, layer: int | None, shape: tuple[int, ...]) -> Tensor:
        """Return a parameter.

        Raises:
            ValueError: the parameter is missing, or has another shape.
        """
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
