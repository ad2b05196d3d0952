"""The tokenizer that a GGUF file holds, as the files of one of Hugging Face's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import refuse
from .source import need_package

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # gguf.TokenType
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
        ValueError: a tokenizer that is neither a byte-level BPE nor a BPE of SentencePiece's, or cuts or normalizes
            text in a way that is not known here.
    """
    need_package("tokenizers", str(path))
    kind, cut = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "gpt-2")
    remedy = "Take the model's safetensors instead, with its tokenizer."
    if kind not in ("gpt2", "llama"):
        raise refuse("tokenizer.ggml.model", kind, "gpt2 (a byte-level BPE) or llama (SentencePiece's)", remedy)
    if kind == "gpt2" and cut not in _CUTS:
        raise refuse("tokenizer.ggml.pre", cut, f"one of {', '.join(_CUTS)}", remedy)
    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):  # T5's, say
        if kind == "llama" and metadata.get(f"tokenizer.ggml.{name}"):
            raise refuse(f"tokenizer.ggml.{name}", "set", "text that is taken as it is", remedy)
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    named = {
        theirs: tokens[number]
        for name, theirs in _NAMED.items()
        if (number := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None and 0 <= number < len(tokens)
    }
    try:
        if len(set(tokens)) != len(tokens):
            raise ValueError("a token is there twice")
        kinds = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
        bpe = _sentencepiece(metadata, tokens, kinds) if kind == "llama" else _byte_level_bpe(metadata, tokens, cut)
        _add_special(bpe, metadata, tokens, kinds, named, begins=kind == "llama" or cut == "llama-bpe")
        bpe.save(str(folder / "tokenizer.json"))
    except Exception as error:  # a merge of tokens that there are not, say
        raise ValueError(f"{path}: its tokenizer is damaged ({error}). Fetch it again.") from None
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {f"{name}_token": token for name, token in named.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str], cut: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut == "llama-bpe"))
    if cut == "qwen2":
        bpe.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in _CUTS[cut]]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    bpe.decoder = decoders.ByteLevel()
    return bpe


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], kinds: Sequence[int]) -> Any:
    """SentencePiece's BPE: of all neighbours, those whose token has the highest score merge first.

    The converter in `transformers` is not taken: it names special tokens itself, and leaves spaces in front of a text
    and `add_space_prefix` out. This has the form of Llama 2's own `tokenizer.json`.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    scores = metadata["tokenizer.ggml.scores"]
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == _NORMAL}
    # Files made without SentencePiece's own have equal scores: tokens then lie in the order of merges.
    ranked = sorted((token for token in normal if len(token) > 1), key=lambda token: vocabulary[token])
    ranked.sort(key=lambda token: scores[vocabulary[token]], reverse=True)
    merges = [
        (token[:at], token[at:])
        for token in ranked
        for at in range(len(token) - 1, 0, -1)
        if token[:at] in normal and token[at:] in normal
    ]
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    bytes_too = _BYTE in kinds
    bpe = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_too)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    bpe.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    return bpe


def _add_special(
    bpe: Any,
    metadata: Mapping[str, Any],
    tokens: list[str],
    kinds: Sequence[int],
    named: Mapping[str, str],
    *,
    begins: bool,
) -> None:
    """Tokens that stay whole, and those around every text. begins: whether BOS is, where the file does not say."""
    from tokenizers import AddedToken, processors

    for token, each in zip(tokens, kinds, strict=True):
        if each in (_CONTROL, _USER_DEFINED):
            bpe.add_tokens([AddedToken(token, special=each == _CONTROL, normalized=False)])
    around = [
        [named[name]] if name in named and metadata.get(f"tokenizer.ggml.add_{name}_token", default) else []
        for name, default in (("bos", begins), ("eos", False))
    ]
    if special := [(token, tokens.index(token)) for token in [*around[0], *around[1]]]:
        bpe.post_processor = processors.TemplateProcessing([*around[0], "$A", *around[1]], special_tokens=special)
