"""Corpora written, checked and served: what is refused, and the order of samples."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch import Tensor

from megatron_longctx.config import Config, DataConfig
from megatron_longctx.mcore.data import (
    Corpus,
    TrainingData,
    check_corpus,
    check_tokenizer,
    micro_batches,
    write_corpus,
)
from megatron_longctx.mcore.identity import tokenizer_digest
from megatron_longctx.mcore.tokenizer import BYTE_LEVEL_EOD, build_tokenizer
from tests.shared.training import changed, tiny_config, tiny_corpus

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
    assert len(caplog.messages) == 1 and "only their number of tokens was compared" in caplog.messages[0]
    _written_by_another(tmp_path / "corpus", vocab_size=511)
    with pytest.raises(ValueError, match=r"was written with \(511 tokens, .* this one has 512 tokens"):
        check_tokenizer(data, TOKENIZER)


LENGTH = 32


def _config(root: Path, **train: int) -> Config:
    settings = {"data.seq_length": LENGTH, "optim.warmup_steps": 0, "train.steps": 4, "train.global_batch_size": 4}
    return tiny_config(root, "data", {**settings, **{f"train.{name}": value for name, value in train.items()}})


def _data(config: Config, samples: int = 1) -> TrainingData:
    data = TrainingData(config, TOKENIZER, 384)
    data.reach(0, samples)
    return data


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tiny_corpus(tmp_path / "corpus", documents=10)
    return tmp_path


def _tokens(batches: list[dict[str, Tensor]]) -> list[list[int]]:
    return [row for batch in batches for row in batch["tokens"].tolist()]


def test_samples_are_the_text(root: Path) -> None:
    dataset = IndexedDataset(str(root / "corpus"))
    documents = [dataset[i].tolist() for i in range(len(dataset))]
    windows = set()
    for first, second in itertools.product(documents, repeat=2):
        joined = first + second
        windows |= {tuple(joined[i : i + LENGTH + 1]) for i in range(len(joined) - LENGTH)}
    config = changed(_config(root), {"data.mask_eod_loss": True})
    batch = _data(config).batch(0, 10)
    assert batch.keys() == {"tokens", "labels", "loss_mask", "position_ids"}
    for tokens, labels, mask, positions in zip(*(batch[name].tolist() for name in batch), strict=True):
        assert labels[:-1] == tokens[1:], "the label is the next token"
        assert (*tokens, labels[-1]) in windows, "and the last one is the text's next token, too"
        assert mask == [float(token != BYTE_LEVEL_EOD) for token in tokens]
        assert positions == list(range(LENGTH))
    assert 0 < float(batch["loss_mask"].mean()) < 1
    unmasked = _data(_config(root)).batch(0, 10)
    assert torch.equal(unmasked["tokens"], batch["tokens"]) and bool((unmasked["loss_mask"] == 1).all())


def test_order_depends_on_the_seed_alone(root: Path) -> None:
    reference = _tokens([_data(_config(root, steps=4)).batch(0, 16)])
    for steps, batch, micro, ranks in ((8, 4, 1, 1), (4, 4, 2, 2), (2, 8, 1, 4), (4, 4, 1, 4), (16, 1, 1, 1)):
        config = _config(root, steps=steps, global_batch_size=batch, micro_batch_size=micro)
        data = _data(config)
        rows = [
            row
            for step in range(16 // batch)
            for rank in range(ranks)
            for row in _tokens(list(micro_batches(data, step, config, rank, ranks)))
        ]
        assert rows == reference, (steps, batch, micro, ranks)
    assert _tokens([_data(_config(root, seed=77)).batch(0, 16)]) != reference


def test_micro_batches_have_their_size(root: Path) -> None:
    config = _config(root, global_batch_size=12, micro_batch_size=3)
    batches = list(micro_batches(_data(config), 0, config, 1, 2))
    assert [batch["tokens"].shape for batch in batches] == [(3, LENGTH), (3, LENGTH)]


def test_every_pass_has_an_order_of_its_own(root: Path) -> None:
    one = _data(_config(root))
    size = len(one._epochs[0])
    assert len(one._epochs) == 1 and size > 20
    many = _data(_config(root), 3 * size)
    passes = [_tokens([many.batch(number * size, size)]) for number in range(3)]
    assert passes[0] == _tokens([one.batch(0, size)])
    assert all(a != b for a, b in itertools.combinations(passes, 2))
    # A batch may lie across the end of a pass.
    assert _tokens([many.batch(size - 2, 4)]) == passes[0][-2:] + passes[1][:2]
    one.reach(2 * size, size)
    assert _tokens([one.batch(2 * size, size)]) == passes[2], "also without the passes before"


def test_passes_are_made_when_they_are_reached_and_then_forgotten(root: Path) -> None:
    """However many steps a run has: a billion of them would be millions of passes, each with files of its own."""
    size = len(_data(_config(root))._epochs[0])
    config = _config(root, steps=10**9, global_batch_size=size - 1)
    data = _data(config)
    for step, passes in ((0, [0]), (1, [0, 1]), (10 * size, [10 * size - 10]), (2, [1, 2])):
        list(micro_batches(data, step, config, 0, 1))
        assert sorted(data._epochs) == passes
    files = {path.name.partition("-")[0] for path in (root / "corpus/cache").glob("*/*.npy")}
    assert len(files) == 4, "of passes 0, 1, 2 and the one far away"


def test_tokens_above_the_vocabulary(root: Path) -> None:
    assert TrainingData(_config(root), TOKENIZER, 257).batch(0, 20)
    with pytest.raises(ValueError, match=r"token ids below the vocabulary's 256; 256 is there"):
        TrainingData(_config(root), TOKENIZER, 256).batch(0, 20)


def test_a_label_above_the_vocabulary(tmp_path: Path) -> None:
    # One sample; its last label is the only end of document.
    _write(tmp_path / "corpus", ["x" * LENGTH])
    with pytest.raises(ValueError, match=r"token ids below the vocabulary's 256; 256 is there"):
        TrainingData(_config(tmp_path), TOKENIZER, 256).batch(0, 1)


def test_nothing_to_train_on(root: Path) -> None:
    data = DataConfig(prefix=str(root / "corpus"), seq_length=LENGTH)
    with pytest.raises(
        ValueError, match=r"data.split=1,99,0: expected a training part of at least 33 tokens; it has 0"
    ):
        check_corpus(replace(data, split="1,99,0"))
    for split in ("99,1,0", "50,50", "1", ".5, .25,.25"):
        check_corpus(replace(data, split=split))
        assert len(_data(changed(_config(root), {"data.split": split}))._epochs[0]) >= 1


class _Planted:
    def __init__(self, mark: Path) -> None:
        self.code = f"open({str(mark)!r}, 'w').close()"

    def __reduce__(self) -> tuple[object, ...]:
        return exec, (self.code,)


@pytest.mark.parametrize("form", ["pickle", "object array", "archive", "cut", "empty"])
def test_indices_that_are_no_arrays_are_refused_and_not_run(tmp_path: Path, form: str) -> None:
    tiny_corpus(tmp_path / "corpus")
    config = _config(tmp_path)
    before = _data(config).batch(0, 4)["tokens"]
    check_corpus(config.data)
    (index,) = (tmp_path / "corpus/cache").rglob("*shuffle_index.npy")
    whole = index.read_bytes()
    evil = _Planted(tmp_path / "ran")
    with index.open("wb") as stream:
        if form == "pickle":
            pickle.dump(evil, stream)
        elif form == "object array":
            numpy.save(stream, numpy.array([evil], dtype=object), allow_pickle=True)
        elif form == "archive":
            numpy.savez(stream, numpy.array([evil], dtype=object))
        elif form == "cut":
            stream.write(whole[:-5])
    with pytest.raises(ValueError, match=r"data.prefix=.*: expected an array of numbers in .*shuffle_index\.npy"):
        check_corpus(config.data)
    assert not (tmp_path / "ran").exists()
    shutil.rmtree(index.parent)  # as the message says
    check_corpus(config.data)
    assert torch.equal(_data(config).batch(0, 4)["tokens"], before)


def test_a_corpus_written_anew_is_served_anew(root: Path) -> None:
    before = _data(_config(root)).batch(0, 4)["tokens"]
    # Shorter than before: what was kept of the old one would point behind its end.
    _write(root / "corpus", ["x" * 200])
    after = _data(_config(root)).batch(0, 4)["tokens"]
    assert not torch.equal(before, after)
    assert numpy.isin(after.numpy(), [ord("x"), BYTE_LEVEL_EOD]).all()
    assert len(_data(_config(root))._epochs[0]) == 200 // LENGTH
