"""Folders in the format of Hugging Face: `config.json`, safetensors files with the tensors they list, a tokenizer."""

import importlib.util
import json
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import files
from ..config.extras import install

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.json", "vocab.txt", "merges.txt"),
    *("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json", "chat_template.jinja"),
)
# Copied with a tokenizer: `transformers` finds the class of some tokenizers only in the model's config.json.
CONFIG_FILES = ("config.json", "generation_config.json")
_MAX_JSON_BYTES = 2**26  # the index of a model with 100,000 tensors has 10 MB
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OF_TEXT = re.compile(r"^model\.language_model\.")  # the text model in one that reads images, too
_NAMES = {dtype: name for name, dtype in FLOATS.items()}
# gpt-oss is published in MXFP4: blocks of 32 numbers of 4 bits with a common power of two (OCP Microscaling Formats
# (MX) v1.0, section 5.3.3). NAME_blocks has two numbers per byte, the first in the low bits; NAME_scales has the
# exponents plus 127. The tensor NAME is their transpose, `[experts, in, out]`.
_BLOCKS, _SCALES = "_blocks", "_scales"
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4 = torch.tensor([*_HALF, *(-value for value in _HALF)], dtype=torch.bfloat16)


class TensorInfo(NamedTuple):
    """The shape and dtype of a tensor on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class HuggingFaceFolder:
    """A published model. Weights in MXFP4 are read as bf16.

    Refuse a file that is missing or damaged, and a tensor that does not hold floating-point numbers.

    Attributes:
        config: the content of its `config.json`.
        tensors: keyed by the published names that families use, which are those of a text model.
    """

    def __init__(self, folder: Path) -> None:
        require_package("safetensors", str(folder))
        self._folder = folder
        config = read_json(folder / "config.json")
        quantization = config.get("quantization_config")
        if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
            del config["quantization_config"]
        self.config: Mapping[str, Any] = config
        self._shard_of: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        indexed = self._read_index()
        for shard in sorted(set(indexed.values())) if indexed else [SINGLE]:
            self._list(shard)
        for name in self._shard_of:
            if name.endswith(_BLOCKS) and name.removesuffix(_BLOCKS) + _SCALES not in self._shard_of:
                raise ValueError(f"{folder}: expected the exponents of {name} beside it. Fetch all files of the model.")
        for name, shard in indexed.items():
            if self._shard_of.get(name) != shard:
                expected = f"the tensor {name}, as in {INDEX}"
                raise ValueError(f"{folder / shard}: expected {expected}. Fetch the file again.")
        self._names = {_OF_TEXT.sub("model.", name): name for name in self.tensors}
        if len(self._names) < len(self.tensors):
            raise ValueError(f"{folder}: expected tensors model.language_model.* or model.*, not one under both names.")
        self.tensors = {key: self.tensors[name] for key, name in self._names.items()}

    def read(self, name: str) -> Tensor:
        """Read a tensor from disk."""
        name = self._names[name]
        if name + _BLOCKS in self._shard_of:
            return _dequantize_mxfp4(self._read(name + _BLOCKS), self._read(name + _SCALES))
        return self._read(name)

    def _read(self, name: str) -> Tensor:
        from safetensors import safe_open

        # Opened for every tensor: pages of a mapped file that have been read count as memory until it is closed.
        with safe_open(self._folder / self._shard_of[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer, its chat template and `config.json` as `transformers` reads them, if there is one."""
        if found := matching_files(self._folder, TOKENIZER_FILES):
            folder.mkdir()
            for file in [*found, *matching_files(self._folder, CONFIG_FILES)]:
                shutil.copyfile(file, folder / file.name)

    def _read_index(self) -> dict[str, str]:
        """Return the file of every tensor according to the index; nothing if a single file has all."""
        path = self._folder / INDEX
        if path.is_file():
            shards = read_json(path).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise ValueError(f"{path}: expected a weight_map. Fetch the file again.")
            for name, shard in shards.items():
                if not isinstance(shard, str) or Path(shard).name != shard:
                    raise ValueError(f"{path}: expected a file of this folder for {name}: {shard!r}.")
            return shards
        if not (self._folder / SINGLE).is_file():
            remedy = "Other formats (*.bin) are pickles, which may run code: convert them, or fetch safetensors."
            raise ValueError(f"{self._folder}: expected {SINGLE}, or {INDEX} and its files. {remedy}")
        return {}

    def _list(self, shard: str) -> None:
        """Add the tensors of a file to `tensors`."""
        from safetensors import SafetensorError, safe_open

        path = self._folder / shard
        if not path.is_file():
            raise ValueError(f"{path}: expected this file of the model; it is missing. Fetch it.")
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    view = file.get_slice(name)
                    shape, dtype = view.get_shape(), FLOATS.get(view.get_dtype())
                    if name in self._shard_of:
                        raise ValueError(f"{path}: expected {name} in one file, not in {self._shard_of[name]} as well.")
                    if view.get_dtype() == "U8" and name.endswith((_BLOCKS, _SCALES)):
                        if name.endswith(_BLOCKS):
                            if len(shape) != 4:
                                raise ValueError(f"{path}: {name} is of {len(shape)} dimensions, expected 4.")
                            experts, rows, groups, half = shape
                            info = TensorInfo((experts, groups * half * 2, rows), torch.bfloat16)
                            self.tensors[name.removesuffix(_BLOCKS)] = info
                    elif dtype is None:
                        expected = ", ".join(FLOATS)
                        raise ValueError(f"{path}: {name} is of {view.get_dtype()}, expected one of {expected}.")
                    else:
                        self.tensors[name] = TensorInfo(tuple(shape), dtype)
                    self._shard_of[name] = shard
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: damaged, or not a safetensors file ({error}). Fetch it again.") from None


def _dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return `[experts, in, out]` in bf16, which holds every such number exactly.

    Args:
        blocks: bytes, `[experts, out, in / 32, 16]`.
        scales: bytes, `[experts, out, in / 32]`.
    """
    numbers = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.ldexp(_MXFP4[numbers.int()], scales.int()[..., None] - 127)
    return values.flatten(-2).transpose(1, 2).contiguous()


class ShardWriter:
    """Writes `model.safetensors`, or several files and their index, one tensor at a time.

    `safetensors` itself writes only files whose tensors are all in memory. A file is a length, a JSON header, and the
    values.

    Args:
        groups: the tensors to write, in order; a group's are computed together.
        max_bytes: the most bytes of values in a file, unless a single group is larger.
    """

    def __init__(self, folder: Path, groups: Sequence[Mapping[str, TensorInfo]], max_bytes: int) -> None:
        self._folder = folder
        self._files: list[list[Mapping[str, TensorInfo]]] = [[]]
        size = 0
        for group in groups:
            group_size = sum(info.num_bytes for info in group.values())
            if self._files[-1] and size + group_size > max_bytes:
                self._files.append([])
                size = 0
            self._files[-1].append(group)
            size += group_size

    def write(self, values: Iterable[Callable[[], Mapping[str, Tensor]]]) -> None:
        """Write all files, or raise OSError. `values` compute the tensors of every group, in order."""
        computed, count = iter(values), len(self._files)
        shard_of: dict[str, str] = {}
        for number, groups in enumerate(self._files, 1):
            name = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            with (self._folder / name).open("wb") as stream:
                stream.write(_header({key: info for group in groups for key, info in group.items()}))
                for group in groups:
                    tensors = next(computed)()
                    for key, info in group.items():
                        tensor = tensors[key].contiguous()
                        assert TensorInfo(tuple(tensor.shape), tensor.dtype) == info, key
                        stream.write(tensor.flatten().view(torch.uint8).numpy().data)
                    shard_of |= dict.fromkeys(group, name)
        if count > 1:
            total = sum(info.num_bytes for groups in self._files for group in groups for info in group.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _header(tensors: Mapping[str, TensorInfo]) -> bytes:
    """Return the bytes before the values, which begin at a multiple of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, info in tensors.items():
        end = begin + info.num_bytes
        header[name] = {"dtype": _NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def require_package(name: str, what: str) -> None:
    """Refuse `what` if a package of the extra `models` is missing. Raises ValueError: names the package."""
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"{what}: expected the package {name}. Run {install('models')}.")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ValueError: the file is missing, or does not hold an object."""
    try:
        content = json.loads(files.read_bytes(path, _MAX_JSON_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path}: expected a JSON file ({reason}). Fetch it again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, not a {type(content).__name__}. Fetch it again.")
    return content


def matching_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files of a folder whose names match one of `patterns`, sorted."""
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
