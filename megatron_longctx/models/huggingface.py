"""Folders as Hugging Face's libraries write them: `config.json`, safetensors files, a tokenizer."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import mxfp4
from .source import BESIDE, FLOATS, TOKENIZER_FILES, Stored, matching, need_package, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMES = {dtype: name for name, dtype in FLOATS.items()}


class HuggingFaceFolder:
    """A `models.source.Source`.

    Raises:
        ValueError: a file that is missing or damaged, or a tensor that is no floating-point number.
    """

    def __init__(self, folder: Path) -> None:
        need_package("safetensors", str(folder))
        self._folder = folder
        self.config: Mapping[str, Any] = _without_mxfp4(read_json(folder / "config.json"))
        self._shard_of: dict[str, str] = {}
        self.tensors: dict[str, Stored] = {}
        placed = self._placed()
        for shard in sorted(set(placed.values())) if placed else [SINGLE]:
            self._list(shard)
        for name in self._shard_of:
            if name.endswith(mxfp4.BLOCKS) and name.removesuffix(mxfp4.BLOCKS) + mxfp4.SCALES not in self._shard_of:
                raise ValueError(f"{folder}: expected the exponents of {name} beside it. Fetch all files of the model.")
        for name, shard in placed.items():
            if self._shard_of.get(name) != shard:
                raise ValueError(
                    f"{folder / shard}: expected the tensor {name}, as {INDEX} says. Fetch the file again."
                )

    def read(self, name: str) -> Tensor:
        if name + mxfp4.BLOCKS in self._shard_of:
            return mxfp4.dequantized(self._read(name + mxfp4.BLOCKS), self._read(name + mxfp4.SCALES))
        return self._read(name)

    def _read(self, name: str) -> Tensor:
        from safetensors import safe_open

        # Opened for every tensor: pages of a mapped file that have been read count as memory until it is closed.
        with safe_open(self._folder / self._shard_of[name], "pt") as file:
            found: Tensor = file.get_tensor(name)
        return found

    def write_tokenizer(self, folder: Path) -> None:
        if files := matching(self._folder, TOKENIZER_FILES):
            folder.mkdir()
            for file in [*files, *matching(self._folder, BESIDE)]:
                shutil.copyfile(file, folder / file.name)

    def _placed(self) -> dict[str, str]:
        """By tensor the file that it is in, as the index says; nothing where one file has all."""
        if (self._folder / INDEX).is_file():
            places = read_json(self._folder / INDEX).get("weight_map")
            if not isinstance(places, dict) or not places:
                raise ValueError(f"{self._folder / INDEX}: expected a weight_map. Fetch the file again.")
            for name, shard in places.items():
                if not isinstance(shard, str) or Path(shard).name != shard:
                    raise ValueError(f"{self._folder / INDEX}: expected a file of this folder for {name}: {shard!r}.")
            return places
        if not (self._folder / SINGLE).is_file():
            remedy = "Other formats (*.bin) are pickles, which may run code: convert them, or fetch safetensors."
            raise ValueError(f"{self._folder}: expected {SINGLE}, or {INDEX} and its files. {remedy}")
        return {}

    def _list(self, shard: str) -> None:
        from safetensors import SafetensorError, safe_open

        path = self._folder / shard
        if not path.is_file():
            raise ValueError(f"{path}: expected this file of the model; it is missing. Fetch it.")
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    view = file.get_slice(name)
                    if view.get_dtype() == "U8" and name.endswith((mxfp4.BLOCKS, mxfp4.SCALES)):
                        self._shard_of[name] = shard
                        if name.endswith(mxfp4.BLOCKS):
                            shape = mxfp4.shape_of(view.get_shape())
                            self.tensors[name.removesuffix(mxfp4.BLOCKS)] = Stored(shape, torch.bfloat16)
                        continue
                    if (dtype := FLOATS.get(view.get_dtype())) is None:
                        expected = ", ".join(FLOATS)
                        raise ValueError(f"{path}: {name} is of {view.get_dtype()}, expected one of {expected}.")
                    if name in self.tensors:
                        raise ValueError(f"{path}: expected {name} in one file, not in {self._shard_of[name]} as well.")
                    self._shard_of[name] = shard
                    self.tensors[name] = Stored(tuple(view.get_shape()), dtype)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: damaged, or no safetensors file ({error}). Fetch it again.") from None


def _without_mxfp4(config: dict[str, Any]) -> dict[str, Any]:
    """Its weights are read as if they were bf16."""
    of = config.get("quantization_config")
    if isinstance(of, dict) and of.get("quant_method") == "mxfp4":
        return {key: value for key, value in config.items() if key != "quantization_config"}
    return config


class ShardWriter:
    """Writes `model.safetensors`, or several files and their index, a tensor at a time.

    `safetensors` writes what is in memory as a whole; a file is a length, a JSON header, and the values.

    Args:
        groups: what is to be written, in order: tensors that are made together, by name.
        most_bytes: of a file's values, but for a group that is larger.
    """

    def __init__(self, folder: Path, groups: Sequence[Mapping[str, Stored]], most_bytes: int = 5 * 10**9) -> None:
        self._folder = folder
        self._files: list[list[Mapping[str, Stored]]] = [[]]
        size = 0
        for group in groups:
            bytes_of_group = sum(_size(stored) for stored in group.values())
            if self._files[-1] and size + bytes_of_group > most_bytes:
                self._files.append([])
                size = 0
            self._files[-1].append(group)
            size += bytes_of_group

    def write(self, values: Iterable[Callable[[], Mapping[str, Tensor]]]) -> None:
        """values: make each group's tensors, in order.

        Raises:
            OSError: it cannot be written.
        """
        made, count = iter(values), len(self._files)
        places: dict[str, str] = {}
        for number, groups in enumerate(self._files, 1):
            name = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            with (self._folder / name).open("wb") as stream:
                stream.write(_header({key: stored for group in groups for key, stored in group.items()}))
                for group in groups:
                    tensors = next(made)()
                    for key, stored in group.items():
                        tensor = tensors[key].contiguous()
                        assert Stored(tuple(tensor.shape), tensor.dtype) == stored, key
                        stream.write(tensor.flatten().view(torch.uint8).numpy().data)
                    places |= dict.fromkeys(group, name)
        if count > 1:
            total = sum(_size(stored) for groups in self._files for group in groups for stored in group.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _size(stored: Stored) -> int:
    return torch.Size(stored.shape).numel() * stored.dtype.itemsize


def _header(tensors: Mapping[str, Stored]) -> bytes:
    """What stands before the values, which begin at a multiple of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, stored in tensors.items():
        end = begin + _size(stored)
        header[name] = {"dtype": _NAMES[stored.dtype], "shape": list(stored.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
