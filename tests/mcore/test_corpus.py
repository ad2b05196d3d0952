"""Datasets: written, refused if they cannot be trained on, and identified by their content, wherever they are."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron_longctx.config import Config, DataConfig, TrainConfig
from megatron_longctx.mcore.corpus import Corpus, check_corpus, check_tokenizer, write_corpus
from megatron_longctx.mcore.data import dataset_digest, identity, identity_error
from megatron_longctx.mcore.tokenizer import build_tokenizer, tokenizer_digest
from tests.shared.training import tiny_corpus, write_documents

TOKENIZER = build_tokenizer("byte-level")


def _write(prefix: Path, *documents: list[str]) -> Corpus:
    return write_corpus(documents, prefix, TOKENIZER)


def _data(prefix: Path | str, seq_length: int = 4, **settings: Any) -> DataConfig:
    return DataConfig(prefix=str(prefix), seq_length=seq_length, **settings)


def test_a_corpus_holds_what_was_written(tmp_path: Path) -> None:
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


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("damage", "words"), [pytest.param(*case[1:], id=case[0]) for case in DAMAGE])
def test_damaged_corpora_are_refused(tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    prefix = tmp_path / "corpus"
    _write(prefix, ["hello world"], ["again"])
    assert check_corpus(_data(prefix)) == 18
    damage(prefix)
    with pytest.raises(ValueError, match=words) as caught:
        check_corpus(_data(prefix))
    # The value, and a way out.
    assert str(caught.value).startswith(("data.prefix=", "data.tokenizer="))
    assert "megatron-longctx data" in str(caught.value)


def test_a_corpus_that_is_too_short_for_a_sequence_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "corpus", ["0123456789"])
    assert check_corpus(_data(tmp_path / "corpus", 10)) == 11
    with pytest.raises(ValueError, match=r"data.seq_length=11: expected at most 10: .* has 11 tokens"):
        check_corpus(_data(tmp_path / "corpus", 11))


def _change_note(prefix: Path, **changes: object) -> None:
    note = json.loads(prefix.with_suffix(".json").read_text()) | changes
    prefix.with_suffix(".json").write_text(json.dumps({key: value for key, value in note.items() if value is not None}))


def test_another_tokenizer_of_the_same_library_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path / "corpus", ["hello world"])
    data = _data(tmp_path / "corpus")
    check_tokenizer(data, TOKENIZER)
    assert caplog.messages == []
    _change_note(tmp_path / "corpus", tokenizer_sha256="0" * 64)
    with pytest.raises(ValueError, match=r"expected the tokenizer that .* was written with \(512 tokens, SHA-256 0000"):
        check_tokenizer(data, TOKENIZER)
    # An earlier version wrote no digest.
    _change_note(tmp_path / "corpus", tokenizer_sha256=None)
    check_tokenizer(data, TOKENIZER)
    assert len(caplog.messages) == 1 and "only the number of tokens was compared" in caplog.messages[0]
    _change_note(tmp_path / "corpus", vocab_size=511)
    with pytest.raises(ValueError, match=r"was written with \(511 tokens, .* this one has 512 tokens"):
        check_tokenizer(data, TOKENIZER)
    # Megatron's own datasets have no note.
    (tmp_path / "corpus.json").unlink()
    check_tokenizer(data, TOKENIZER)
    assert check_corpus(data) == 12


def test_the_training_part_of_the_split_must_be_long_enough(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus", documents=10)
    words = r"data.split=1,99,0: expected a training part of at least 33 tokens; it has 0"
    with pytest.raises(ValueError, match=words):
        check_corpus(_data(tmp_path / "corpus", 32, split="1,99,0"))
    for split in ("99,1,0", "50,50", "1", ".5, .25,.25"):
        check_corpus(_data(tmp_path / "corpus", 32, split=split))


def _masked(prefix: Path, *documents: tuple[list[int], list[bool]]) -> Corpus:
    return write_documents(documents, prefix, masked=True)


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
    # If the corpus is written again without a mask, all tokens are learned.
    _write(tmp_path / "chats", ["hello"])
    assert not list(tmp_path.glob("*.mask.*"))


def test_a_mask_that_leaves_all_tokens_out_is_refused(tmp_path: Path) -> None:
    _masked(tmp_path / "chats", ([7, 8, 9], [False] * 3), ([5, 6, 7], [False] * 3))
    with pytest.raises(ValueError, match=r"expected a token that counts in the loss; the mask of .*chats leaves all 6"):
        check_corpus(_data(tmp_path / "chats"))


def test_token_ids_that_are_no_whole_numbers_are_refused(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "floats.bin"), dtype=numpy.float32)
    builder.add_document(numpy.ones(9, dtype=numpy.float32), [9])
    builder.finalize(str(tmp_path / "floats.idx"))
    with pytest.raises(ValueError, match=r"expected token ids that are whole numbers; .*floats\.idx says float32"):
        check_corpus(_data(tmp_path / "floats"))


def test_a_mask_with_other_lengths_is_refused(tmp_path: Path) -> None:
    data = _data(tmp_path / "a", 2, packing="best_fit")
    _masked(tmp_path / "a", ([7, 8, 9], [False, True, True]), ([5], [False]))
    _masked(tmp_path / "b", ([7, 8], [False, True]), ([5, 6], [False, False]))
    assert check_corpus(data) == 4
    for suffix in (".bin", ".idx"):
        shutil.copy(tmp_path / f"b.mask{suffix}", tmp_path / f"a.mask{suffix}")
    with pytest.raises(ValueError, match=r"expected in .*a\.mask\.idx the lengths of .*a\.idx: a number for"):
        check_corpus(data)
    (tmp_path / "a.mask.bin").unlink()
    with pytest.raises(ValueError, match=r"a\.mask\.bin is missing"):
        check_corpus(data)


def test_empty_documents_are_refused_where_they_matter(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "empty.bin"), dtype=numpy.uint16)
    for length in (3, 0, 4):
        builder.add_document(numpy.ones(length, dtype=numpy.uint16), [length])
    builder.finalize(str(tmp_path / "empty.idx"))
    data = _data(tmp_path / "empty")
    assert check_corpus(data) == 7
    with pytest.raises(ValueError, match=r"documents that are not empty with .*; number 1 of .*empty\.idx is"):
        check_corpus(replace(data, packing="best_fit"))


def test_every_dataset_of_a_blend_is_checked(tmp_path: Path) -> None:
    for name in "ab":
        _write(tmp_path / name, ["hello world"])
    data = _data(f"0.7 {tmp_path}/a .3  {tmp_path}/b")
    assert data.datasets == ((0.7, f"{tmp_path}/a"), (0.3, f"{tmp_path}/b")) and check_corpus(data) == 24
    (tmp_path / "b.bin").unlink()
    words = r"data\.prefix=0\.7 .*: expected the files .*b\.idx and \.bin; .*b\.bin is missing"
    with pytest.raises(ValueError, match=words):
        check_corpus(data)


def test_a_digest_depends_on_the_content_of_a_dataset(tmp_path: Path) -> None:
    def digest(name: str, *texts: str) -> str:
        _write(tmp_path / name, *([text] for text in texts))
        return dataset_digest(str(tmp_path / name))

    text = "".join(map(chr, range(32, 127))) * 400
    first = digest("first", text, "second")
    assert digest("elsewhere", text, "second") == first
    others = [
        digest("of_equal_lengths", text, "SECOND"),
        digest("divided_elsewhere", text + " ", "econd"),
        digest("in_another_order", "second", text),
        digest("larger", text, "second", "third"),
    ]
    assert len({first, *others}) == 5


@pytest.mark.parametrize(
    ("changes", "words"),
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
def test_a_run_may_not_continue_with_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"corpus": "hello world", "moved": "hello world", "other": "hello there"}.items():
        _write(Path(name), [text])

    def of(prefix: str = "corpus", seed: int = 1234, tokenizer: int = 0, **data: Any) -> Any:
        config = Config(data=_data(prefix, **data), train=TrainConfig(seed=seed))
        fake: Any = SimpleNamespace(library="byte-level", path=None, vocab_size=512 + tokenizer)
        return identity(config, fake)

    error = identity_error(of(), of(**changes), Path("runs/first"))
    assert (error is None) == (words is None), error
    if words is not None:
        with pytest.raises(ValueError, match=words):
            raise error  # type: ignore[misc]
    # An earlier version wrote fewer keys.
    assert identity_error({}, of(**changes), Path("runs/first")) is None


def test_a_blend_is_identified_by_its_datasets_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        _write(Path(name), [f"of {name}"])

    def digest(prefix: str) -> str:
        return str(identity(Config(data=_data(prefix)), TOKENIZER)["data.prefix"]["sha256"])

    assert digest("1 a 1 b") == digest("1.0  a 1 b")
    assert len({digest(prefix) for prefix in ("a", "1 a 1 b", "1 b 1 a", "2 a 1 b", "1 a 1 c")}) == 5
