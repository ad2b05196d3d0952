"""Corpora written and checked: what is refused before it is trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron_longctx.config import DataConfig
from megatron_longctx.mcore.corpus import (
    Corpus,
    check_corpus,
    check_tokenizer,
    dataset_digest,
    write_corpus,
    write_documents,
)
from megatron_longctx.mcore.tokenizer import BYTE_LEVEL_EOD, build_tokenizer, tokenizer_digest
from tests.shared.training import tiny_corpus

TOKENIZER = build_tokenizer("byte-level")


def test_a_tokenizer_whose_package_is_missing_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"data\.tokenizer=huggingface: expected the package transformers"):
        build_tokenizer("huggingface", "no/such/files")


def _write(prefix: Path, *documents: list[str]) -> Corpus:
    return write_corpus(documents, prefix, TOKENIZER)


def test_byte_level_tokens() -> None:
    assert TOKENIZER.eod == BYTE_LEVEL_EOD == 256
    assert TOKENIZER.vocab_size > 256
    assert list(TOKENIZER.tokenize("aé\0")) == [97, 0xC3, 0xA9, 0]
    assert TOKENIZER.detokenize([104, 105]) == "hi"


def test_a_corpus_is_what_was_written(tmp_path: Path) -> None:
    corpus = _write(tmp_path / "sub" / "text", ["ab", "c"], [], ["é"])
    assert (corpus.documents, corpus.tokens) == (2, 8)
    dataset = IndexedDataset(str(tmp_path / "sub" / "text"))
    # Every text ends with the end of document; texts of one document stay together; no text, no document.
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[97, 98, 256, 99, 256], [0xC3, 0xA9, 256]]
    note = json.loads((tmp_path / "sub" / "text.json").read_text())
    assert note == {
        "tokenizer": "byte-level",
        "vocab_size": TOKENIZER.vocab_size,
        "tokenizer_sha256": tokenizer_digest(TOKENIZER),
        "documents": 2,
        "tokens": 8,
    }
    assert sorted(path.name for path in (tmp_path / "sub").iterdir()) == ["text.bin", "text.idx", "text.json"]


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_no_text_is_refused(tmp_path: Path, documents: list[list[str]]) -> None:
    with pytest.raises(ValueError, match=r"no text for .*corpus: expected at least one document"):
        _write(tmp_path / "corpus", *documents)
    assert not list(tmp_path.iterdir())


def _cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("no index", lambda p: p.with_suffix(".idx").unlink(), r"corpus\.idx is missing"),
    ("no tokens", lambda p: p.with_suffix(".bin").unlink(), r"corpus\.bin is missing"),
    ("empty index", lambda p: p.with_suffix(".idx").write_bytes(b""), "files that are not empty"),
    ("empty tokens", lambda p: p.with_suffix(".bin").write_bytes(b""), "files that are not empty"),
    ("tokens cut", lambda p: _cut(p.with_suffix(".bin"), 3), r"bytes in .*corpus\.bin, as its index says; it has"),
    ("one token cut", lambda p: _cut(p.with_suffix(".bin"), 2), r"bytes in .*corpus\.bin, as its index says; it has"),
    ("garbage index", lambda p: p.with_suffix(".idx").write_bytes(b"no index" * 20), "a Megatron index file"),
    ("index cut", lambda p: _cut(p.with_suffix(".idx"), 40), "a Megatron index file|as its index says"),
    ("other tokenizer", lambda p: p.with_suffix(".json").write_text('{"tokenizer": "tiktoken"}'),
     "data.tokenizer=byte-level: expected tiktoken"),
    ("garbage note", lambda p: p.with_suffix(".json").write_text("{"), r"corpus\.json"),
    ("note of another kind", lambda p: p.with_suffix(".json").write_text("[]"), r"corpus\.json"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), [pytest.param(*case[1:], id=case[0]) for case in DAMAGE])
def test_damaged_corpora_are_refused(tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    prefix = tmp_path / "corpus"
    _write(prefix, ["hello world"], ["again"])
    data = DataConfig(prefix=str(prefix), seq_length=4)
    assert check_corpus(data) == 18
    damage(prefix)
    with pytest.raises(ValueError, match=words) as caught:
        check_corpus(data)
    # The value, and a way out.
    assert str(caught.value).startswith(("data.prefix=", "data.tokenizer="))
    assert "megatron-longctx data" in str(caught.value)


def test_too_short_for_a_sequence(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    _write(prefix, ["0123456789"])
    assert check_corpus(DataConfig(prefix=str(prefix), seq_length=10)) == 11
    with pytest.raises(ValueError, match=r"data.seq_length=11: expected at most 10: .* has 11 tokens"):
        check_corpus(DataConfig(prefix=str(prefix), seq_length=11))


def test_a_corpus_without_a_note_is_fine(tmp_path: Path) -> None:
    _write(tmp_path / "corpus", ["hello world"])
    (tmp_path / "corpus.json").unlink()
    assert check_corpus(DataConfig(prefix=str(tmp_path / "corpus"), seq_length=4)) == 12


def _written_by_another(prefix: Path, **changes: object) -> None:
    note = json.loads(prefix.with_suffix(".json").read_text()) | changes
    prefix.with_suffix(".json").write_text(json.dumps({key: value for key, value in note.items() if value is not None}))


def test_another_tokenizer_of_the_same_library_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path / "corpus", ["hello world"])
    data = DataConfig(prefix=str(tmp_path / "corpus"), seq_length=4)
    check_tokenizer(data, TOKENIZER)
    assert caplog.messages == []
    _written_by_another(tmp_path / "corpus", tokenizer_sha256="0" * 64)
    with pytest.raises(ValueError, match=r"expected the tokenizer that .* was written with \(512 tokens, SHA-256 0000"):
        check_tokenizer(data, TOKENIZER)
    # Of an earlier version: nothing is known of its files.
    _written_by_another(tmp_path / "corpus", tokenizer_sha256=None)
    check_tokenizer(data, TOKENIZER)
    assert len(caplog.messages) == 1 and "only the number of tokens was compared" in caplog.messages[0]
    _written_by_another(tmp_path / "corpus", vocab_size=511)
    with pytest.raises(ValueError, match=r"was written with \(511 tokens, .* this one has 512 tokens"):
        check_tokenizer(data, TOKENIZER)


def test_only_what_the_split_leaves_to_training_counts(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus", documents=10)
    data = DataConfig(prefix=str(tmp_path / "corpus"), seq_length=32)
    with pytest.raises(
        ValueError, match=r"data.split=1,99,0: expected a training part of at least 33 tokens; it has 0"
    ):
        check_corpus(replace(data, split="1,99,0"))
    for split in ("99,1,0", "50,50", "1", ".5, .25,.25"):
        check_corpus(replace(data, split=split))


def _masked(prefix: Path, *documents: tuple[list[int], list[bool]]) -> Corpus:
    return write_documents(documents, prefix, TOKENIZER, masked=True)


def test_a_mask_is_a_dataset_beside_its_tokens(tmp_path: Path) -> None:
    corpus = _masked(tmp_path / "chats", ([7, 8, 9], [False, True, True]), ([5], [False]))
    assert (corpus.documents, corpus.tokens, corpus.learned) == (2, 4, 2)
    mask = IndexedDataset(str(tmp_path / "chats.mask"))
    assert [mask[i].tolist() for i in range(2)] == [[0, 1, 1], [0]] and mask[0].dtype == numpy.uint8
    assert json.loads((tmp_path / "chats.json").read_text())["learned"] == 2
    names = ["chats.bin", "chats.idx", "chats.json", "chats.mask.bin", "chats.mask.idx"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    before = dataset_digest(str(tmp_path / "chats"))
    _masked(tmp_path / "chats", ([7, 8, 9], [True, True, True]), ([5], [False]))
    assert dataset_digest(str(tmp_path / "chats")) != before, "another mask is other data"
    # Written anew without one, all is learned again.
    _write(tmp_path / "chats", ["hello"])
    assert not list(tmp_path.glob("*.mask.*"))


def test_a_mask_of_other_lengths_is_refused(tmp_path: Path) -> None:
    data = DataConfig(prefix=str(tmp_path / "a"), seq_length=2, packing="best_fit")
    _masked(tmp_path / "a", ([7, 8, 9], [False, True, True]), ([5], [False]))
    _masked(tmp_path / "b", ([7, 8], [False, True]), ([5, 6], [False, False]))
    assert check_corpus(data) == 4
    for suffix in (".bin", ".idx"):
        shutil.copy(tmp_path / f"b.mask{suffix}", tmp_path / f"a.mask{suffix}")
    with pytest.raises(ValueError, match=r"expected in .*a\.mask\.idx the lengths of .*a\.idx: a mask for every token"):
        check_corpus(data)
    (tmp_path / "a.mask.bin").unlink()
    with pytest.raises(ValueError, match=r"a\.mask\.bin is missing"):
        check_corpus(data)


def test_documents_that_are_empty_are_refused_where_they_count(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "empty.bin"), dtype=numpy.uint16)
    for length in (3, 0, 4):
        builder.add_document(numpy.ones(length, dtype=numpy.uint16), [length])
    builder.finalize(str(tmp_path / "empty.idx"))
    data = DataConfig(prefix=str(tmp_path / "empty"), seq_length=4)
    assert check_corpus(data) == 7
    with pytest.raises(ValueError, match=r"documents that are not empty with .*; number 1 of .*empty\.idx is"):
        check_corpus(replace(data, packing="best_fit"))


def test_every_dataset_of_a_blend_is_checked(tmp_path: Path) -> None:
    for name in "ab":
        _write(tmp_path / name, ["hello world"])
    data = DataConfig(prefix=f"0.7 {tmp_path}/a .3  {tmp_path}/b", seq_length=4)
    assert data.datasets == ((0.7, f"{tmp_path}/a"), (0.3, f"{tmp_path}/b")) and check_corpus(data) == 24
    (tmp_path / "b.bin").unlink()
    with pytest.raises(
        ValueError, match=r"data\.prefix=0\.7 .*: expected the files .*b\.idx and \.bin; .*b\.bin is mis"
    ):
        check_corpus(data)
