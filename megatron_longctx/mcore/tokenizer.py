"""Megatron-Core's tokenizers by name."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

BYTE_LEVEL_EOD = 256
BYTE_LEVEL_PAD = 257
_TIKTOKEN_SPECIAL = 1000  # tokens that Megatron-Core puts before those of the file
_PACKAGES = {
    "huggingface": "transformers",
    "megatron": "transformers",
    "sentencepiece": "sentencepiece",
    "tiktoken": "tiktoken",
}


def build_tokenizer(library: str, path: str | None = None) -> MegatronTokenizerText:
    """The tokenizer `library` of Megatron-Core, from `path` where it needs one.

    The byte-level one has ids 0..255 for bytes; its end-of-document id is set to 256, since Megatron's default 0 is a
    byte that occurs in text.

    Raises:
        ValueError: a path that is missing or that the library cannot read.
    """
    if library == "byte-level":
        return MegatronTokenizer.from_pretrained(
            metadata_path={"library": library}, _eos_id=BYTE_LEVEL_EOD, _pad_id=BYTE_LEVEL_PAD
        )
    remedy = "Set data.tokenizer_path to what the tokenizer library reads, or use data.tokenizer=byte-level."
    if path is not None and not Path(path).is_absolute():
        remedy += f" A relative path counts from the folder that a command is started in, here {Path.cwd()}."
    if path is None or not (Path(path).exists() or library == "huggingface"):
        raise ValueError(f"data.tokenizer_path={path}: expected the files of a {library} tokenizer. {remedy}")
    try:
        more: dict[str, Any] = _vocabulary_of_tiktoken(path) if library == "tiktoken" else {}
        if library == "huggingface":
            more["include_special_tokens"] = False  # Megatron-Core 0.19 would begin every text of a dataset with BOS
        # What transformers reads of a folder it does not read of a file.
        read = str(Path(path).parent) if library == "huggingface" and Path(path).is_file() else path
        found = MegatronTokenizer.from_pretrained(tokenizer_path=read, metadata_path={"library": library}, **more)
    except Exception as error:  # every library raises its own kind
        if (package := _PACKAGES.get(library)) and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"data.tokenizer={library}: expected the package {package}, which is not installed. "
                f"Run pip install {package}, or use data.tokenizer=byte-level."
            ) from None
        raise ValueError(f"data.tokenizer_path={path}: cannot be read by {library} ({error}). {remedy}") from error
    if found.eod is None:
        remedy = "Name it: eos_token in the tokenizer_config.json beside its other files."
        raise ValueError(f"data.tokenizer_path={path}: expected a tokenizer with a token that ends a text. {remedy}")
    return found


def _vocabulary_of_tiktoken(path: str) -> dict[str, int]:
    """What Megatron-Core's reader has to be told of a vocabulary that is smaller than the 2^17 it takes for granted.

    Raises:
        ValueError: a file that has no patterns and no special tokens, or is none.
    """
    try:
        count = len(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        expected = "expected a JSON list of rank, token_bytes and token_str"
        raise ValueError(f"{expected}; others (*.tiktoken) do not say how text is cut ({error})") from None
    return {"vocab_size": min(2**17, count + _TIKTOKEN_SPECIAL)}


def beginning(tokenizer: MegatronTokenizerText) -> list[int]:
    """The special tokens (BOS) with which a Hugging Face tokenizer begins every text; none where it says none.

    Megatron-Core's `tokenize` leaves them out, as in datasets documents lie one after the other.
    """
    if tokenizer.library != "huggingface":
        return []
    encode = tokenizer._tokenizer.tokenizer
    plain, whole = (list(encode("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    found = [start for start in range(len(whole)) if whole[start : start + len(plain)] == plain]
    return whole[: found[0]] if found else []


def text_of(tokenizer: MegatronTokenizerText, ids: Sequence[int]) -> str:
    """The text of `ids`; bytes that are no text yet become U+FFFD.

    Megatron's byte-level tokenizer would strip spaces at the end and fail on its own special ids, and its tiktoken one
    takes every token for text of its own, so that letters of several are lost.
    """
    if tokenizer.library == "byte-level":
        return bytes(i for i in ids if i < BYTE_LEVEL_EOD).decode("utf-8", errors="replace")
    if tokenizer.library == "tiktoken":
        return str(tokenizer._tokenizer.tokenizer.decode([i for i in ids if i >= _TIKTOKEN_SPECIAL]))
    return str(tokenizer.detokenize(list(ids)))


def token_chars(tokenizer: MegatronTokenizerText) -> int | None:
    """How many characters a token stands for at most; None where the tokenizer does not say."""
    if tokenizer.library == "byte-level":
        return 1
    try:
        return max(len(piece) for piece in tokenizer.vocab)
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None
