"""Tokenizers of every library are read from files, without network, and identified by them."""

import base64
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_longctx.mcore.tokenizer import (
    BYTE_LEVEL_EOD,
    bos_tokens,
    build_tokenizer,
    decoder,
    detokenize,
    tokenizer_digest,
)
from megatron_longctx.models.chat import special_tokens, template_of
from tests.shared.published import CHAT, TEXTS, write_tokenizer

TEXT = "the quick fox? naïve"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_byte_level() -> None:
    tokenizer = build_tokenizer("byte-level")
    assert tokenizer.eod == BYTE_LEVEL_EOD == 256
    assert tokenizer.vocab_size > 256
    assert list(tokenizer.tokenize("aé\0")) == [97, 0xC3, 0xA9, 0]
    assert tokenizer.detokenize([104, 105]) == "hi"


def test_hugging_faces_folder_or_its_tokenizer_json(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "folder")
    tokenizers = [build_tokenizer("huggingface", str(tmp_path / path)) for path in ("folder", "folder/tokenizer.json")]
    for tokenizer in tokenizers:
        assert detokenize(tokenizer, tokenizer.tokenize(TEXT)) == TEXT
        assert (tokenizer.vocab_size, tokenizer.eod, template_of(tokenizer)) == (290, 1, CHAT)
        assert special_tokens(tokenizer)["bos_token"] == "<|begin|>"
        for ids in ([i, j] for i in range(280) for j in (0, 1, 70, 275)):  # special ones, and parts of characters
            assert decoder(tokenizer)(ids) == detokenize(tokenizer, ids)
    assert tokenizer_digest(tokenizers[0]) == tokenizer_digest(tokenizers[1])


def test_texts_begin_with_the_tokenizers_bos(tmp_path: Path) -> None:
    """Megatron's own `tokenize` omits it, as datasets require."""
    write_tokenizer(tmp_path / "without")
    content = json.loads((tmp_path / "without/tokenizer.json").read_text())
    begin = {"id": "<|begin|>", "type_id": 0}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": begin}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [0], "tokens": ["<|begin|>"]}},
    }
    shutil.copytree(tmp_path / "without", tmp_path / "with")
    (tmp_path / "with/tokenizer.json").write_text(json.dumps(content))
    without, with_begin = (build_tokenizer("huggingface", str(tmp_path / name)) for name in ("without", "with"))
    assert bos_tokens(without) == [] and bos_tokens(with_begin) == [0]
    assert without.tokenize(TEXT) == with_begin.tokenize(TEXT)
    assert bos_tokens(build_tokenizer("byte-level")) == []


def test_a_tokenizer_that_ends_no_text_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "folder")
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "folder/tokenizer.json", tmp_path / "alone")
    with pytest.raises(ValueError, match=r"alone: expected a tokenizer with a token that ends a text\. Name it: eos"):
        build_tokenizer("huggingface", str(tmp_path / "alone"))


def test_sentencepiece(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text").write_text("\n".join(TEXTS * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "sp"), vocab_size=320, model_type="bpe",
        byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    tokenizer = build_tokenizer("sentencepiece", str(tmp_path / "sp.model"))
    assert detokenize(tokenizer, tokenizer.tokenize(TEXT)) == TEXT and tokenizer.eod == 2


def test_tiktoken(tmp_path: Path) -> None:
    pieces = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" q", b"ui"]
    ranks = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": piece.decode(errors="replace")}
        for rank, piece in enumerate(pieces)
    ]
    (tmp_path / "vocab.json").write_text(json.dumps(ranks))
    tokenizer = build_tokenizer("tiktoken", str(tmp_path / "vocab.json"))
    ids = tokenizer.tokenize(TEXT)
    assert detokenize(tokenizer, ids) == TEXT and len(ids) < len(TEXT.encode())
    assert tokenizer.vocab_size == 1000 + len(pieces)
    (tmp_path / "ranks.tiktoken").write_text("dGg= 0\n")
    with pytest.raises(ValueError, match=r"ranks\.tiktoken: cannot be read by tiktoken \(expected a JSON list of "):
        build_tokenizer("tiktoken", str(tmp_path / "ranks.tiktoken"))


def test_the_folder_of_a_relative_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"A relative path counts from the folder .* here {tmp_path}\\."):
        build_tokenizer("sentencepiece", "gone.model")


@pytest.mark.parametrize("library", ["huggingface", "sentencepiece", "tiktoken"])
def test_missing_files_are_refused(library: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.tokenizer_path=.*nowhere"):
        build_tokenizer(library, str(tmp_path / "nowhere"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"data\.tokenizer=huggingface: expected the package transformers"):
        build_tokenizer("huggingface", "no/such/files")


def _tokenizer(path: Path | str | None, library: str = "huggingface", vocab_size: int = 10) -> Any:
    return SimpleNamespace(library=library, path=None if path is None else str(path), vocab_size=vocab_size)


def test_a_digest_depends_on_the_files_and_the_library(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    for name in ("tokenizer.json", "special_tokens_map.json", "model.safetensors"):
        (folder / name).write_text(name)
    first = tokenizer_digest(_tokenizer(folder))
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    (moved / "model.safetensors").write_text("other weights")
    assert tokenizer_digest(_tokenizer(moved)) == first
    (moved / "special_tokens_map.json").write_text("others")
    others = [
        _tokenizer(moved),
        _tokenizer(folder, vocab_size=11),
        _tokenizer(folder, library="megatron"),
        _tokenizer(folder / "tokenizer.json"),
        _tokenizer("a/name/at/a/hub"),
        _tokenizer("another/name/at/a/hub"),
        _tokenizer(None, library="byte-level", vocab_size=512),
    ]
    assert len({first, *map(tokenizer_digest, others)}) == 8
    byte_level = _tokenizer(None, library="byte-level", vocab_size=512)
    assert tokenizer_digest(byte_level) == tokenizer_digest(build_tokenizer("byte-level"))
