"""What identifies the samples of a run: its datasets, its tokenizer and the keys that their order depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

from ..config import Config
from ..core.errors import refuse
from .corpus import SIDES, side_prefix
from .tokenizer import add_files, tokenizer_digest

_SAMPLES, _SAMPLE_BYTES = 256, 4096  # of a dataset's tokens that enter its digest

Identity = dict[str, dict[str, Any]]
"""The `value` of each configuration key, and the `sha256` of the content if the value only names it."""


def identity(config: Config, tokenizer: MegatronTokenizerText) -> Identity:
    """Return what a run's samples, and their order, depend on."""
    data = config.data
    digests = [dataset_digest(prefix) for _, prefix in data.datasets]
    blend = repr(([weight for weight, _ in data.datasets], digests))
    digest = digests[0] if len(digests) == 1 else hashlib.sha256(blend.encode()).hexdigest()
    return {
        "data.prefix": {"value": data.prefix, "sha256": digest},
        "data.packing": {"value": data.packing},
        **({"data.max_wait_steps": {"value": data.max_wait_steps}} if data.packing == "best_fit" else {}),
        "data.tokenizer": tokenizer_identity(config, tokenizer),
        "data.seq_length": {"value": data.seq_length},
        "data.split": {"value": data.split},
        "train.seed": {"value": config.train.seed},
    }


def dataset_digest(prefix: str) -> str:
    """Return the SHA-256 of a dataset's index, and of the size and 256 evenly spread samples of its tokens.

    The datasets beside it (`SIDES`) are included in the same way.
    """
    digest = hashlib.sha256()
    for each in filter(None, (prefix, *(side_prefix(prefix, side) for side in SIDES))):
        add_files(digest, [Path(f"{each}.idx")])
        with Path(f"{each}.bin").open("rb") as stream:
            size = stream.seek(0, 2)
            digest.update(str(size).encode())
            for number in range(_SAMPLES):
                stream.seek(number * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def tokenizer_identity(config: Config, tokenizer: MegatronTokenizerText) -> dict[str, Any]:
    """Return the part of `identity` that `generate` and `serve` compare."""
    name = config.data.tokenizer_path or config.data.tokenizer
    return {"value": name, "sha256": tokenizer_digest(tokenizer)}


def identity_error(earlier: Mapping[str, Any], now: Identity, run: Path) -> ValueError | None:
    """Return why `run` may not continue with data that differ from what it was trained with; None if it may.

    Keys that `earlier` lacks are not compared: an earlier version did not write them.
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
