"""The files of a published model: their names, JSON, and the tensors that they list."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

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


class TensorInfo(NamedTuple):
    """The shape and dtype of a tensor on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


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
