"""Megatron-Core's tokenizers, built by library name, and what identifies one."""

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

from ..config.extras import install

BYTE_LEVEL_EOD = 256
_BYTE_LEVEL_PAD = 257
_TIKTOKEN_SPECIAL = 1000  # tokens that Megatron-Core puts before the file's
_PACKAGES = {
    "huggingface": "transformers",
    "megatron": "transformers",
    "sentencepiece": "sentencepiece",
    "tiktoken": "tiktoken",
}
# Files of a tokenizer's folder; others, such as weights and chat templates, do not change a text's tokens.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "*.model", "*.tiktoken", "vocab*", "merges*"),
    *("added_tokens*", "special_tokens*"),
)


def build_tokenizer(library: str, path: str | None = None) -> MegatronTokenizerText:
    """Return Megatron-Core's tokenizer of a library, read from `path` if it has files.

    The byte-level tokenizer has ids 0..255 for bytes. Its end-of-document id is set to 256, because Megatron's default
    0 is a byte that occurs in text.

    Raises:
        ValueError: the path is missing, or the library cannot read it.
    """
    if library == "byte-level":
        return MegatronTokenizer.from_pretrained(
            metadata_path={"library": library}, _eos_id=BYTE_LEVEL_EOD, _pad_id=_BYTE_LEVEL_PAD
        )
    remedy = "Set data.tokenizer_path to what the tokenizer library reads, or use data.tokenizer=byte-level."
    if path is not None and not Path(path).is_absolute():
        remedy += f" A relative path counts from the folder that a command is started in, here {Path.cwd()}."
    if path is None or not (Path(path).exists() or library == "huggingface"):
        raise ValueError(f"data.tokenizer_path={path}: expected the files of a {library} tokenizer. {remedy}")
    try:
        options: dict[str, Any] = _tiktoken_options(path) if library == "tiktoken" else {}
        if library == "huggingface":
            # Megatron-Core 0.19 would begin every text of a dataset with BOS.
            options["include_special_tokens"] = False
        # transformers reads more from a folder than from a file in it.
        read = str(Path(path).parent) if library == "huggingface" and Path(path).is_file() else path
        tokenizer = MegatronTokenizer.from_pretrained(
            tokenizer_path=read, metadata_path={"library": library}, **options
        )
    except Exception as error:  # every library raises its own classes
        if (package := _PACKAGES.get(library)) and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"data.tokenizer={library}: expected the package {package}, which is not installed. "
                f"Run {install('models')}, or use data.tokenizer=byte-level."
            ) from None
        reason = str(error).strip().split("\n", 1)[0]
        raise ValueError(f"data.tokenizer_path={path}: cannot be read by {library} ({reason}). {remedy}") from error
    if tokenizer.eod is None:
        remedy = "Name it: eos_token in the tokenizer_config.json beside its other files."
        raise ValueError(f"data.tokenizer_path={path}: expected a tokenizer with a token that ends a text. {remedy}")
    return tokenizer


def _tiktoken_options(path: str) -> dict[str, int]:
    """Return the options for a vocabulary below 2^17 tokens, the size that Megatron-Core's reader assumes."""
    try:
        count = len(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        expected = "expected a JSON list of rank, token_bytes and token_str"
        raise ValueError(f"{expected}; others (*.tiktoken) do not say how text is cut ({error})") from None
    return {"vocab_size": min(2**17, count + _TIKTOKEN_SPECIAL)}


def encoder(tokenizer: MegatronTokenizerText) -> Callable[[str], Sequence[int]]:
    """Return a function with the results of `tokenizer.tokenize`.

    For a Hugging Face tokenizer it is a third faster: Megatron-Core makes a text of every token, and looks up each.
    """
    if tokenizer.library != "huggingface":
        return tokenizer.tokenize  # type: ignore[no-any-return]
    library = tokenizer._tokenizer.tokenizer
    return lambda text: library(text, add_special_tokens=False, verbose=False)["input_ids"]


def bos_tokens(tokenizer: MegatronTokenizerText) -> list[int]:
    """Return the special tokens (BOS) with which a Hugging Face tokenizer begins every text, if any.

    Megatron-Core's `tokenize` omits them, because in datasets one document follows another.
    """
    if tokenizer.library != "huggingface":
        return []
    encode = tokenizer._tokenizer.tokenizer
    plain, whole = (list(encode("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    starts = [start for start in range(len(whole)) if whole[start : start + len(plain)] == plain]
    return whole[: starts[0]] if starts else []


def detokenize(tokenizer: MegatronTokenizerText, ids: Sequence[int]) -> str:
    """Return the text of `ids`, with U+FFFD for bytes that are not valid UTF-8 yet.

    Megatron's byte-level tokenizer would strip trailing spaces and fail on its own special ids. Its tiktoken one
    decodes token by token, which loses characters of several tokens.
    """
    if tokenizer.library == "byte-level":
        return bytes(i for i in ids if i < BYTE_LEVEL_EOD).decode("utf-8", errors="replace")
    if tokenizer.library == "tiktoken":
        return str(tokenizer._tokenizer.tokenizer.decode([i for i in ids if i >= _TIKTOKEN_SPECIAL]))
    return str(tokenizer.detokenize(list(ids)))


def decoder(tokenizer: MegatronTokenizerText) -> Callable[[Sequence[int]], str]:
    """Return a function with the results of `detokenize`.

    For a Hugging Face tokenizer it is several times as fast: Megatron-Core lists all special tokens for every token.
    """
    library: Any = tokenizer._tokenizer.tokenizer if tokenizer.library == "huggingface" else None
    if (backend := getattr(library, "backend_tokenizer", None)) is None:
        return partial(detokenize, tokenizer)
    special = frozenset(library.convert_tokens_to_ids(library.all_special_tokens))
    return lambda ids: str(backend.decode([i for i in ids if i not in special], skip_special_tokens=False))


def max_token_chars(tokenizer: MegatronTokenizerText) -> int | None:
    """Return the largest number of characters in a token; None if the tokenizer does not tell."""
    if tokenizer.library == "byte-level":
        return 1
    try:
        return max(len(piece) for piece in tokenizer.vocab)
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None


def tokenizer_digest(tokenizer: MegatronTokenizerText) -> str:
    """Return the SHA-256 of the library, the number of tokens and the files, or the name if there are no files here."""
    digest = hashlib.sha256(f"{tokenizer.library} {tokenizer.vocab_size}".encode())
    path = Path(tokenizer.path or "")
    if tokenizer.path and path.is_dir():
        names = {file for pattern in _TOKENIZER_FILES for file in path.glob(pattern)}
        add_files(digest, sorted(file for file in names or path.iterdir() if file.is_file()))
    elif path.is_file():
        add_files(digest, [path])
    else:
        digest.update(str(tokenizer.path).encode())
    return digest.hexdigest()


def add_files(digest: Any, paths: Iterable[Path]) -> None:
    """Update a digest with the SHA-256 of each file."""
    for path in paths:
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
