"""Datasets and tokenizers are told apart by what is in them, wherever they lie."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_longctx.config import Config, DataConfig, TrainConfig
from megatron_longctx.mcore.corpus import dataset_digest, identity, refusal, write_corpus
from megatron_longctx.mcore.tokenizer import build_tokenizer, tokenizer_digest

TOKENIZER = build_tokenizer("byte-level")


def _tokenizer(path: Path | str | None, library: str = "huggingface", vocab_size: int = 10) -> Any:
    return SimpleNamespace(library=library, path=None if path is None else str(path), vocab_size=vocab_size)


def test_a_tokenizer_is_its_files(tmp_path: Path) -> None:
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
    assert tokenizer_digest(_tokenizer(None, library="byte-level", vocab_size=512)) == tokenizer_digest(TOKENIZER)


def _corpus(prefix: Path, *texts: str) -> str:
    write_corpus([[text] for text in texts], prefix, TOKENIZER)
    return str(prefix)


def test_a_dataset_is_its_files(tmp_path: Path) -> None:
    text = "".join(map(chr, range(32, 127))) * 400
    first = dataset_digest(_corpus(tmp_path / "first", text, "second"))
    assert dataset_digest(_corpus(tmp_path / "elsewhere", text, "second")) == first
    others = [
        _corpus(tmp_path / "of_equal_lengths", text, "SECOND"),
        _corpus(tmp_path / "divided_elsewhere", text + " ", "econd"),
        _corpus(tmp_path / "in_another_order", "second", text),
        _corpus(tmp_path / "larger", text, "second", "third"),
    ]
    assert len({first, *map(dataset_digest, others)}) == 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"prefix": "moved"}, None),
        ({"prefix": "other"}, r"^data\.prefix=other: expected corpus \(SHA-256 .*…\), with which runs/first has been"),
        ({"seq_length": 5}, r"^data\.seq_length=5: expected 4, with which .*; this is 5\. Set it back, .*check_data"),
        ({"split": "9,1,0"}, r"^data\.split=9,1,0: expected 100,0,0, with which "),
        ({"packing": "best_fit"}, r"^data\.packing=best_fit: expected none, with which "),
        ({"prefix": "1 corpus 1 other"}, r"^data\.prefix=1 corpus 1 other: expected corpus \(SHA-256 "),
        ({"seed": 2}, r"^train\.seed=2: expected 1234, with which "),
        ({"tokenizer": 1}, r"^data\.tokenizer=byte-level: expected byte-level \(SHA-256 .* this is byte-level \(SHA"),
    ],
)
def test_what_a_run_was_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"corpus": "hello world", "moved": "hello world", "other": "hello there"}.items():
        _corpus(Path(name), text)

    def found(prefix: str = "corpus", seed: int = 1234, tokenizer: int = 0, **data: Any) -> Any:
        config = Config(data=DataConfig(prefix=prefix, **({"seq_length": 4} | data)), train=TrainConfig(seed=seed))
        return identity(config, _tokenizer(None, library="byte-level", vocab_size=512 + tokenizer))

    error = refusal(found(), found(**changes), Path("runs/first"))
    assert (error is None) == (said is None), error
    if said is not None:
        with pytest.raises(ValueError, match=said):
            raise error  # type: ignore[misc]
    # A run of a version that wrote less.
    assert refusal({}, found(**changes), Path("runs/first")) is None


def test_a_blend_is_its_datasets_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        _corpus(Path(name), f"of {name}")

    def digest(prefix: str) -> str:
        config = Config(data=DataConfig(prefix=prefix, seq_length=4))
        return str(identity(config, TOKENIZER)["data.prefix"]["sha256"])

    assert digest("1 a 1 b") == digest("1.0  a 1 b")
    assert len({digest(prefix) for prefix in ("a", "1 a 1 b", "1 b 1 a", "2 a 1 b", "1 a 1 c")}) == 5
