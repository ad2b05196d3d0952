"""The tokenizer that a GGUF file holds, as the files of one of Hugging Face's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import refuse
from .source import need_package

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # gguf.TokenType
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut before merges, by the name that GGUF gives it: regular expressions, one after the other, each of whose
# matches becomes a piece. SmolLM's digits stand alone.
_CUTS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace("{1,3}", ""),),
}
_NAMED = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


def write_tokenizer(folder: Path, metadata: Mapping[str, Any], path: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template of the metadata of `path`.

    Raises:
        ValueError: a tokenizer that is no byte-level BPE, or cuts text in a way that is not known here.
    """
    need_package("tokenizers", str(path))
    kind, cut = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "gpt-2")
    remedy = "Take the model's safetensors instead, with its tokenizer."
    if kind != "gpt2":
        raise refuse("tokenizer.ggml.model", kind, "gpt2, a byte-level BPE", remedy)
    if cut not in _CUTS:
        raise refuse("tokenizer.ggml.pre", cut, f"one of {', '.join(_CUTS)}", remedy)
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    try:
        _byte_level_bpe(metadata, tokens, cut).save(str(folder / "tokenizer.json"))
    except Exception as error:  # a merge of tokens that there are not, say
        raise ValueError(f"{path}: its tokenizer is damaged ({error}). Fetch it again.") from None
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, theirs in _NAMED.items():
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None and 0 <= number < len(tokens):
            config[f"{theirs}_token"] = tokens[number]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str], cut: str) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError("a token is there twice")
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut == "llama-bpe"))
    if cut == "qwen2":
        bpe.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in _CUTS[cut]]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    bpe.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    for token, each in zip(tokens, kinds, strict=True):
        if each in (_CONTROL, _USER_DEFINED):
            bpe.add_tokens([AddedToken(token, special=each == _CONTROL, normalized=False)])
    return bpe
