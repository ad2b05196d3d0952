"""Checkpoints of weights alone, written and read by one process, a parameter at a time.

A model need not be built for it, nor fit into memory. The files are those that Megatron's ``torch_dist`` format has,
which ``checkpoint.load`` reads at any parallel sizes: every layer's parameter is a slice of one tensor of all layers.
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
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from . import checkpoint_folder, checkpoint_reader
from .checkpoint_check import Damaged

logger = logging.getLogger(__name__)

JOURNAL = "progress.jsonl"
_LAYER = ".{layer}"
_MOST_FILE_BYTES = 4 * 2**30  # after which another begins: ranks and threads share the files when they check them


@dataclass(frozen=True)
class Parameter:
    """One of the whole model, or with `{layer}` in its name that of one layer.

    Args:
        layer: counted from 0; None for a parameter outside of layers.
        shape: over all tensor-parallel ranks.
        value: makes it; of this shape and of the checkpoint's dtype.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    value: Callable[[], Tensor]

    @property
    def key(self) -> str:
        return self.name.replace(_LAYER, "")

    @property
    def offsets(self) -> torch.Size:
        """Where it begins in the tensor of its key."""
        return torch.Size(((self.layer,) if self.layer is not None else ()) + (0,) * len(self.shape))

    @property
    def sizes(self) -> torch.Size:
        return torch.Size(((1,) if self.layer is not None else ()) + self.shape)


class Journal:
    """What a process that was killed has written of a checkpoint's weights, so that the next one goes on behind it.

    Lines of JSON: what the weights are made of, then one for each parameter that is written, with its digest.

    It is locked as long as its process lives, so that nobody takes over what is still being written.

    Args:
        folder: to write into. It gets the journal, and what is taken over.
        others: folders that killed processes may have left; one with such weights is taken, and is then gone.
        weights: name of the folder of the weights in each of them.
        identity: what the weights are made of, without line breaks.

    Raises:
        OSError: it cannot be written.
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
                logger.warning("%s is of another source or other settings, or under way: beginning afresh", left)
                self._stream.close()
        self._stream = self._path.open("w", encoding="utf-8")
        self._lock()

    def kept(self, path: Path, names: Sequence[str]) -> list[tuple[int, int]]:
        """Where in their files the first of the parameters `names` begin and end, which are in `path` as they were
        written; all else in it goes."""
        found: list[tuple[int, int]] = []
        ends: dict[str, int] = {}
        for name, line in zip(names, self._lines, strict=False):
            try:
                written, file, begin, length, digest = json.loads(line)
                with (path / file).open("rb") as stream:
                    stream.seek(begin)
                    whole = hashlib.sha256(stream.read(length)).hexdigest() == digest
            except (OSError, ValueError):  # of the last line only a part may be there
                break
            if written != name or not whole:
                break
            found.append((begin, begin + length))
            ends[file] = begin + length
        for each in path.iterdir() if found else ():
            os.truncate(each, ends[each.name]) if each.name in ends else each.unlink()
        self._stream.seek(0)
        self._stream.truncate()
        self._stream.write("\n".join([self._identity, *self._lines[: len(found)], ""]))
        self._stream.flush()
        if self._lines:
            logger.info(
                "going on where another import was killed: %d of %d parameters are there", len(found), len(names)
            )
        return found

    def add(self, name: str, file: str, begin: int, content: bytes) -> None:
        """Note a parameter that lies in its file."""
        digest = hashlib.sha256(content).hexdigest()
        self._stream.write(json.dumps([name, file, begin, len(content), digest]) + "\n")
        self._stream.flush()

    def remove(self) -> None:
        """All is written."""
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
    """Write iteration 0 of a checkpoint directory, or go on with it where `journal` ends.

    Args:
        parameters: taken one by one; each is forgotten before the next is made.
        fingerprint, extra: as ``checkpoint.save`` has them.

    Raises:
        OSError: it cannot be written.
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
    checkpoint_folder.publish(partial, final, {}, checkpoint_folder.Kept())


def _write_tensors(
    partial: Path, parameters: Sequence[Parameter], num_layers: int, dtype: torch.dtype, journal: Journal
) -> Metadata:
    tensors: dict[str, Any] = {}  # of TensorStorageMetadata
    places: dict[MetadataIndex, _StorageInfo] = {}
    kept = journal.kept(partial, [_unique(parameter) for parameter in parameters])
    if not kept:
        checkpoint_folder.start(partial)
    number = end = 0
    name = "__0_0.distcp"  # one object, so that the pickle is the same whichever process wrote what
    for at, parameter in enumerate(parameters):
        if end >= _MOST_FILE_BYTES:
            number += 1
            name = f"__0_{number}.distcp"
        begin, end = kept[at] if at < len(kept) else _append(partial / name, parameter, dtype, journal)
        places[MetadataIndex(parameter.key, parameter.offsets)] = _StorageInfo(name, begin, end - begin)
        whole = torch.Size((num_layers, *parameter.shape) if parameter.layer is not None else parameter.shape)
        found = TensorStorageMetadata(TensorProperties(dtype), whole, [])
        chunk = ChunkStorageMetadata(parameter.offsets, parameter.sizes)
        tensors.setdefault(parameter.key, found).chunks.append(chunk)
    return Metadata(tensors, storage_data=places)


def _append(path: Path, parameter: Parameter, dtype: torch.dtype, journal: Journal) -> tuple[int, int]:
    """Where it begins and ends in the file."""
    with path.open("ab+") as stream:
        begin = stream.tell()
        value = parameter.value()
        assert value.dtype == dtype and tuple(value.shape) == parameter.shape, parameter.name
        torch.save(value.reshape(parameter.sizes).clone(), stream)  # a view would bring all that it is of
        del value
        end = stream.tell()
        stream.seek(begin)
        journal.add(_unique(parameter), path.name, begin, stream.read())
    return begin, end


def _unique(parameter: Parameter) -> str:
    return f"{parameter.key} {parameter.layer}"


class Reader:
    """The weights of a checkpoint, which has been examined. path: of the iteration."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata = checkpoint_reader.read_metadata(path)

    def dtype(self, name: str) -> torch.dtype:
        """Of a parameter, or of all layers' of this name.

        Raises:
            ValueError: there is none.
        """
        return self._entry(name).properties.dtype

    def read(self, name: str, layer: int | None, shape: tuple[int, ...]) -> Tensor:
        """A parameter.

        Raises:
            ValueError: it is not there, or of another shape.
        """
        entry, key = self._entry(name), name.replace(_LAYER, "")
        before = () if layer is None else (layer,)
        found = tuple(entry.size[len(before) :])
        if found != shape:
            raise Damaged(f"{self._path}: {key} has the shape {found}, expected {shape}")
        out, filled = torch.empty(shape, dtype=entry.properties.dtype), 0
        for chunk in entry.chunks:
            if before and not chunk.offsets[0] <= before[0] < chunk.offsets[0] + chunk.sizes[0]:
                continue
            part = self._part(MetadataIndex(key, chunk.offsets))
            if before:
                part = part[before[0] - chunk.offsets[0]]
            spans = zip(chunk.offsets[len(before) :], part.shape, strict=True)
            out[tuple(slice(begin, begin + size) for begin, size in spans)] = part
            filled += part.numel()
        if filled != out.numel():
            raise Damaged(f"{self._path}: {key} has {filled} values, expected {out.numel()}")
        return out

    def unread(self, names: Iterable[str]) -> Iterator[str]:
        """Keys of the model's tensors that are none of `names`."""
        keys = {name.replace(_LAYER, "") for name in names}
        for key, entry in self._metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata) and not key.startswith("optimizer.") and key not in keys:
                yield key

    def _entry(self, name: str) -> TensorStorageMetadata:
        key = name.replace(_LAYER, "")
        entry = self._metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise Damaged(f"{self._path} has no {key}, expected the weights of the run's model")
        return entry

    def _part(self, index: MetadataIndex) -> Tensor:
        place = self._metadata.storage_data[index]
        with (self._path / place.relative_path).open("rb") as stream:
            stream.seek(place.offset)
            return checkpoint_reader.tensor_of(stream.read(place.length), index.fqn)
