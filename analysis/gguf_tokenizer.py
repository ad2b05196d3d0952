"""Converts the tokenizer in a GGUF file to the files of a Hugging Face tokenizer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_longctx.core.errors import refuse

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # gguf.TokenType
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Regular expressions that split text before merges, keyed by GGUF's name. They are applied in turn, and every match
# becomes a piece. SmolLM splits digits one by one.
_SPLITS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace("{1,3}", ""),),
}
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


def write_tokenizer(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template from the metadata of a file.

    Raises:
        ValueError: a tokenizer that is neither a byte-level BPE nor SentencePiece's BPE, or that splits or normalizes
            text in an unknown way.
    """
    kind, split = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "gpt-2")
    remedy = "Take the model's safetensors instead, with its tokenizer."
    if kind not in ("gpt2", "llama"):
        raise refuse("tokenizer.ggml.model", kind, "gpt2 (a byte-level BPE) or llama (SentencePiece's)", remedy)
    if kind == "gpt2" and split not in _SPLITS:
        raise refuse("tokenizer.ggml.pre", split, f"one of {', '.join(_SPLITS)}", remedy)
    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):  # T5's, for example
        if kind == "llama" and metadata.get(f"tokenizer.ggml.{name}"):
            raise refuse(f"tokenizer.ggml.{name}", "set", "text that is not changed", remedy)
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    special = {
        published: tokens[number]
        for name, published in _SPECIAL.items()
        if (number := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None and 0 <= number < len(tokens)
    }
    kinds = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    bpe = _sentencepiece(metadata, tokens, kinds) if kind == "llama" else _byte_level_bpe(metadata, tokens, split)
    adds_bos = kind == "llama" or split == "llama-bpe"
    _add_special(bpe, metadata, tokens, kinds, special, adds_bos=adds_bos)
    bpe.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {f"{name}_token": token for name, token in special.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str], split: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split == "llama-bpe"))
    if split == "qwen2":
        bpe.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in _SPLITS[split]]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    bpe.decoder = decoders.ByteLevel()
    return bpe


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], kinds: Sequence[int]) -> Any:
    """Build SentencePiece's BPE: of all neighbours, those whose token has the highest score merge first.

    It has the form of Llama 2's own `tokenizer.json`. The converter in `transformers` is not used: it chooses the names
    of special tokens itself, and drops spaces before a text and `add_space_prefix`.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    scores = metadata["tokenizer.ggml.scores"]
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == _NORMAL}
    # Files that were not made from SentencePiece's own have equal scores: their tokens are in the order of merges.
    ranked = sorted((token for token in normal if len(token) > 1), key=lambda token: vocabulary[token])
    ranked.sort(key=lambda token: scores[vocabulary[token]], reverse=True)
    merges = [
        (token[:at], token[at:])
        for token in ranked
        for at in range(len(token) - 1, 0, -1)
        if token[:at] in normal and token[at:] in normal
    ]
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    has_bytes = _BYTE in kinds
    bpe = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    bpe.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return bpe


def _add_special(
    bpe: Any,
    metadata: Mapping[str, Any],
    tokens: list[str],
    kinds: Sequence[int],
    special: Mapping[str, str],
    *,
    adds_bos: bool,
) -> None:
    """Add the tokens that are never split, and those around every text. adds_bos: the default for BOS."""
    from tokenizers import AddedToken, processors

    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            bpe.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    before, after = (
        [special[name]] if name in special and metadata.get(f"tokenizer.ggml.add_{name}_token", default) else []
        for name, default in (("bos", adds_bos), ("eos", False))
    )
    if around := [(token, tokens.index(token)) for token in [*before, *after]]:
        bpe.post_processor = processors.TemplateProcessing([*before, "$A", *after], special_tokens=around)
