"""What a run is trained with: dataset and tokenizer by their content, and what else the order of samples goes by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

from ..config import Config
from ..errors import refuse

Identity = dict[str, dict[str, Any]]
"""By key of the configuration its `value`, and the `sha256` of the content where the value only names that."""

# Of a tokenizer's folder; what else lies there (weights, chat templates) does not change a text's tokens.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "*.model", "*.tiktoken", "vocab*", "merges*"),
    *("added_tokens*", "special_tokens*"),
)
_PIECES, _PIECE_BYTES = 256, 4096


def tokenizer_digest(tokenizer: MegatronTokenizerText) -> str:
    """SHA-256 of the library, the number of tokens and the files; of the name where that is no file here."""
    found = hashlib.sha256(f"{tokenizer.library} {tokenizer.vocab_size}".encode())
    path = Path(tokenizer.path or "")
    if tokenizer.path and path.is_dir():
        names = {file for pattern in _TOKENIZER_FILES for file in path.glob(pattern)}
        _add_files(found, sorted(file for file in names or path.iterdir() if file.is_file()))
    elif path.is_file():
        _add_files(found, [path])
    else:
        found.update(str(tokenizer.path).encode())
    return found.hexdigest()


def _add_files(found: Any, paths: Iterable[Path]) -> None:
    for path in paths:
        with path.open("rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())


def mask_of(prefix: str) -> str | None:
    """The prefix of the dataset that says which tokens of this one are learned; None: all are."""
    return f"{prefix}.mask" if Path(f"{prefix}.mask.idx").is_file() else None


def dataset_digest(prefix: str) -> str:
    """SHA-256 of a dataset's index, of the size of its tokens and of 256 pieces of them, evenly spread; and the same of
    its mask, where it has one."""
    found = hashlib.sha256()
    for each in filter(None, (prefix, mask_of(prefix))):
        _add_files(found, [Path(f"{each}.idx")])
        with Path(f"{each}.bin").open("rb") as stream:
            size = stream.seek(0, 2)
            found.update(str(size).encode())
            for piece in range(_PIECES):
                stream.seek(piece * max(0, size - _PIECE_BYTES) // (_PIECES - 1))
                found.update(stream.read(_PIECE_BYTES))
    return found.hexdigest()


def _blend_digest(datasets: Sequence[tuple[float, str]]) -> str:
    """Of one dataset its own."""
    digests = [dataset_digest(prefix) for _, prefix in datasets]
    weights = [weight for weight, _ in datasets]
    return digests[0] if len(digests) == 1 else hashlib.sha256(repr((weights, digests)).encode()).hexdigest()


def identity(config: Config, tokenizer: MegatronTokenizerText) -> Identity:
    """What the samples of a run, and their order, depend on."""
    data = config.data
    return {
        "data.prefix": {"value": data.prefix, "sha256": _blend_digest(data.datasets)},
        "data.packing": {"value": data.packing},
        "data.tokenizer": tokenizer_identity(config, tokenizer),
        "data.seq_length": {"value": data.seq_length},
        "data.split": {"value": data.split},
        "train.seed": {"value": config.train.seed},
    }


def tokenizer_identity(config: Config, tokenizer: MegatronTokenizerText) -> dict[str, Any]:
    """The part of `identity` that `generate` and `serve` go by."""
    name = config.data.tokenizer_path or config.data.tokenizer
    return {"value": name, "sha256": tokenizer_digest(tokenizer)}


def refusal(earlier: Mapping[str, Any], now: Identity, run: Path) -> ValueError | None:
    """Why what `run` was trained with, as `identity` gave it, is not what it would go on with; None if it is.

    Keys that `earlier` lacks are not compared: it may be of a version that did not write them.
    """
    for key, here in now.items():
        there = earlier.get(key, here)
        if there.get("sha256", there["value"]) != here.get("sha256", here["value"]):
            expected = f"{_shown(there)}, with which {run} has been trained so far; this is {_shown(here)}"
            remedy = "Set it back, start a run of another run.name, or set train.check_data=false to go on with this."
            return refuse(key, here["value"], expected, remedy)
    return None


def _shown(entry: Mapping[str, Any]) -> str:
    return f"{entry['value']} (SHA-256 {entry['sha256'][:12]}…)" if "sha256" in entry else str(entry["value"])
