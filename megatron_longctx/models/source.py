"""Published models as they lie on disk, whatever their format."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

# What a tokenizer consists of, beside weights. The model's own config.json says of some which class they are for.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.json", "vocab.txt", "merges.txt"),
    *("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json", "chat_template.jinja"),
)
BESIDE = ("config.json", "generation_config.json")
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Stored(NamedTuple):
    """A tensor that has not been read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(Protocol):
    """A published model.

    Attributes:
        config: its `config.json`, or what says the same.
        tensors: by the names that families use.
    """

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, Stored]: ...

    def read(self, name: str) -> Tensor:
        """One tensor, from disk.

        Raises:
            ValueError: it cannot be read.
        """
        ...

    def write_tokenizer(self, folder: Path) -> None:
        """Its tokenizer's files, chat template and `config.json`, as `transformers` reads them; nothing if it has none.

        Raises:
            ValueError: it has one that cannot be written so.
        """
        ...


def need_package(name: str, what: str) -> None:
    """Refuse, where a package of the extra `models` is missing.

    Raises:
        ValueError: names it.
    """
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"{what}: expected the package {name}. Run pip install 'megatron-longctx[models]'.")


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        ValueError: it is missing, or holds anything else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path}: expected a JSON file ({reason}). Fetch it again.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, not a {type(found).__name__}. Fetch it again.")
    return found


def matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The files of a folder that have such names, in order."""
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
