"""Batches: their text, labels, masks and documents, and the order of samples."""

import itertools
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron_longctx.config import Config
from megatron_longctx.mcore.corpus import check_corpus, write_corpus
from megatron_longctx.mcore.data import (
    TrainingBatch,
    TrainingData,
    check_packs,
    check_samples,
    first_pack,
    micro_batches,
)
from megatron_longctx.mcore.tokenizer import BYTE_LEVEL_EOD, build_tokenizer
from tests.shared.training import changed, tiny_config, tiny_corpus, write_documents

TOKENIZER = build_tokenizer("byte-level")
LENGTH = 32
PACKED = ("documents", "best_fit")


def _config(root: Path, settings: dict[str, Any] | None = None, **train: int) -> Config:
    fixed = {"data.seq_length": LENGTH, "optim.warmup_steps": 0, "train.steps": 4, "train.global_batch_size": 4}
    return tiny_config(root, "data", {**fixed, **{f"train.{key}": value for key, value in train.items()},
                                      **(settings or {})})  # fmt: skip


def _data(config: Config, vocab_size: int = 384) -> TrainingData:
    return TrainingData(config, TOKENIZER, vocab_size)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tiny_corpus(tmp_path / "corpus", documents=10)
    return tmp_path


def _rows(batches: Iterable[TrainingBatch]) -> list[list[int]]:
    return [row for batch in batches for row in batch.tokens.tolist()]


def _size(data: TrainingData) -> int:
    return data._sources[0].order.size


def test_samples_are_the_text(root: Path) -> None:
    dataset = IndexedDataset(str(root / "corpus"))
    documents = [dataset[i].tolist() for i in range(len(dataset))]
    windows = set()
    for first, second in itertools.product(documents, repeat=2):
        joined = first + second
        windows |= {tuple(joined[i : i + LENGTH + 1]) for i in range(len(joined) - LENGTH)}
    config = changed(_config(root), {"data.mask_eod_loss": True})
    batch = _data(config)[range(10)]
    assert batch.documents is None
    assert {x.dtype for x in (batch.tokens, batch.labels)} == {torch.int64}
    assert batch.loss_mask.dtype == torch.float32
    for tokens, labels, mask in zip(*(x.tolist() for x in batch.tensors.values()), strict=True):
        assert labels[:-1] == tokens[1:], "the label is the next token"
        assert (*tokens, labels[-1]) in windows, "the last label is the text's next token too"
        assert mask == [float(token != BYTE_LEVEL_EOD) for token in tokens]
    assert 0 < float(batch.loss_mask.mean()) < 1
    unmasked = _data(_config(root))[range(10)]
    assert torch.equal(unmasked.tokens, batch.tokens) and bool((unmasked.loss_mask == 1).all())


@pytest.mark.parametrize("packing", ["none", *PACKED])
def test_order_depends_on_the_seed_alone(root: Path, packing: str) -> None:
    def rows(ranks: int = 1, step: int = 0, **train: int) -> list[list[int]]:
        config = _config(root, {"data.packing": packing, "data.max_wait_steps": None}, **train)
        data = _data(config)
        taken = [iter(micro_batches(config, step, rank, ranks)) for rank in range(ranks)]
        per_rank = config.train.global_batch_size // ranks // config.train.micro_batch_size
        return [
            row
            for _ in range(step, config.train.steps)
            for share in taken
            for row in _rows(data[samples] for samples in itertools.islice(share, per_rank))
        ]

    reference = rows(steps=4)
    assert len(reference) == 16
    for steps, batch, micro, ranks in ((8, 2, 1, 1), (4, 4, 2, 2), (2, 8, 1, 4), (4, 4, 1, 4), (16, 1, 1, 1)):
        if micro == 1 or packing == "none":
            other = rows(ranks, steps=steps, global_batch_size=batch, micro_batch_size=micro)
            assert other == reference, (steps, batch, micro, ranks)
    assert rows(2, step=3) == reference[12:], "resumed, at another number of ranks"
    assert rows(seed=77) != reference


def test_tokens_above_the_vocabulary_are_refused(root: Path) -> None:
    assert _data(_config(root), 257)[range(20)]
    with pytest.raises(ValueError, match=r"corpus: expected token ids from 0 to 255, the vocabulary's last; token"):
        _data(_config(root), 256)[range(20)]


@pytest.mark.parametrize("packing", ["none", *PACKED])
def test_an_id_without_an_embedding_is_refused_with_its_place(tmp_path: Path, packing: str) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=numpy.int32)
    documents = [numpy.full(length, 7, dtype=numpy.int32) for length in (40, 50, 60)]
    documents[1][45] = -100
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "corpus.idx"))
    data = _data(_config(tmp_path, {"data.packing": packing}))
    words = r"to 383, .*; token 45 of document 1 in .*corpus\.bin, both counted from 0, is -100\. "
    with pytest.raises(ValueError, match=words):
        [data[[sample]] for sample in range(_size(data))]


def test_a_label_above_the_vocabulary_is_refused(tmp_path: Path) -> None:
    # The last label of the only sample is the only end of document.
    write_corpus([["x" * LENGTH]], tmp_path / "corpus", TOKENIZER)
    with pytest.raises(ValueError, match=r"; token 32 of document 0 in .*corpus\.bin, both counted from 0, is 256\."):
        _data(_config(tmp_path), 256)[range(1)]


def test_a_rewritten_corpus_is_read_again(root: Path) -> None:
    before = _data(_config(root))[range(4)].tokens
    write_corpus([["x" * 200]], root / "corpus", TOKENIZER)
    data = _data(_config(root))
    after = data[range(4)].tokens
    assert not torch.equal(before, after) and _size(data) == 200 // LENGTH
    assert numpy.isin(after.numpy(), [ord("x"), BYTE_LEVEL_EOD]).all()


def _check_pack(batch: TrainingBatch, documents: list[list[int]], learned: list[list[bool]] | None = None) -> list[int]:
    """Check that a pack consists of documents, or parts of them, and return the learned tokens. All ids differ."""
    assert batch.documents is not None and sum(batch.documents) == batch.tokens.shape[1]
    at, counted = 0, []
    where = {token: (number, i) for number, document in enumerate(documents) for i, token in enumerate(document)}
    tokens, labels, mask = (x[0].tolist() for x in batch.tensors.values())
    for length in batch.documents:
        number, begin = where[tokens[at]]
        for i in range(length):
            assert tokens[at] == documents[number][begin + i]
            following = documents[number][begin + i + 1 : begin + i + 2]
            if following and (i + 1 < length or labels[at]):
                assert labels[at] == following[0], "the label is of the same document"
                assert mask[at] == (1 if learned is None else learned[number][begin + i + 1])
            else:
                assert (labels[at], mask[at]) == (0, 0), "nothing follows the last token of a document"
            counted += [labels[at]] * int(mask[at])
            at += 1
    return counted


@pytest.mark.parametrize("packing", PACKED)
@settings(derandomize=True, database=None, max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 90), min_size=2, max_size=30), seed=st.integers(1, 99), masked=st.booleans())
def test_labels_never_cross_a_document(
    tmp_path_factory: pytest.TempPathFactory, packing: str, lengths: list[int], seed: int, masked: bool
) -> None:
    root = tmp_path_factory.mktemp("packs")
    ids = itertools.count(1)
    documents = [[next(ids) for _ in range(length)] for length in [*lengths, LENGTH + 1]]
    learned = [[random.Random(token).random() < 0.5 for token in document] for document in documents]
    masks = learned if masked else [None] * len(documents)
    write_documents(zip(documents, masks, strict=True), root / "corpus", masked)
    data = _data(_config(root, {"data.packing": packing}, seed=seed), next(ids))
    counted = []
    for sample in range(_size(data)):
        batch = data[range(sample, sample + 1)]
        assert batch.tokens.shape[1] <= LENGTH
        counted += _check_pack(batch, documents, learned if masked else None)
    assert len(counted) == len(set(counted)), "no label occurs twice in a pass"
    if packing == "best_fit":
        every = [token for number, document in enumerate(documents) for i, token in enumerate(document)
                 if i and (learned[number][i] or not masked)]  # fmt: skip
        assert sorted(counted) == sorted(every), "no label is missing"


def test_packing_documents_is_the_stream_with_document_ends(root: Path) -> None:
    stream, ended = _data(_config(root)), _data(_config(root, {"data.packing": "documents"}))
    for sample in range(_size(stream)):
        one, other = stream[[sample]], ended[[sample]]
        assert torch.equal(one.tokens, other.tokens) and other.documents is not None
        ends = numpy.flatnonzero(one.tokens[0].numpy() == BYTE_LEVEL_EOD) + 1
        assert numpy.cumsum(other.documents).tolist() == sorted({*ends.tolist(), LENGTH})
        counts = other.loss_mask[0].bool()
        assert torch.equal(one.labels[0][counts], other.labels[0][counts])
        assert numpy.flatnonzero(~counts.numpy()).tolist() == (ends - 1).tolist()


@pytest.mark.parametrize("packing", PACKED)
def test_first_pack_returns_the_documents_of_the_first_micro_batch(root: Path, packing: str) -> None:
    tiny_corpus(root / "other", documents=9, seed=3)
    both = {"data.prefix": f"0.2 {root}/corpus 0.8 {root}/other"}
    for more in ({}, both, {"parallelism.tensor_parallel_size": 2} if packing == "best_fit" else {}):
        config = _config(root, {"data.packing": packing, **more})
        assert first_pack(config)[0] == _data(config)[next(micro_batches(config, 0, 0, 1))[:1]].documents


def test_packs_too_short_for_the_ranks_are_refused(tmp_path: Path) -> None:
    for name, lengths in (("short", (LENGTH, LENGTH, 5)), ("long", (LENGTH, LENGTH - 1, 8)), ("ones", [1] * LENGTH)):
        write_documents((([7] * length, None) for length in lengths), tmp_path / name)
    zigzag = {"data.packing": "best_fit", "parallelism.context_parallel_size": 4, "parallelism.schedule": "zigzag"}

    def check(prefix: str, **more: Any) -> None:
        settings = {f"parallelism.{key}": value for key, value in more.items()}
        check_packs(_config(tmp_path, {**zigzag, "data.prefix": prefix, **settings}))

    for prefix, more in (
        ("long", {}),
        ("ones", {}),
        ("short", {"schedule": "all_gather", "layout": "contiguous"}),
        ("short", {"context_parallel_size": 2}),
        ("short", {"context_parallel_size": 1, "tensor_parallel_size": 2}),
    ):
        check(str(tmp_path / prefix), **more)
    words = r"best_fit: expected packs of 8 tokens, .* the 4 context-parallel ranks .*; .*/short has one of 5\. Leave"
    for prefix in (f"{tmp_path}/short", f"0.5 {tmp_path}/long 0.5 {tmp_path}/short"):
        with pytest.raises(ValueError, match=words):
            check(prefix)
    with pytest.raises(ValueError, match="packs of 16 tokens"):  # sequence parallelism: 6 tokens, in twos
        check(str(tmp_path / "short"), tensor_parallel_size=2)
    with pytest.raises(ValueError, match="ones has one of 32"):
        check(str(tmp_path / "ones"), layout="per_document")


@pytest.mark.parametrize("packing", PACKED)
def test_documents_without_a_next_token_are_refused(tmp_path: Path, packing: str) -> None:
    """Otherwise a run would train on nothing, with a loss of 0."""
    one = [([number], None) for number in range(100)]
    write_documents(one, tmp_path / "corpus")
    config = _config(tmp_path, {"data.packing": packing})
    with pytest.raises(ValueError, match=r"all 100 in part 1 of .*corpus have one, so that none has a next token"):
        check_corpus(config.data)
    assert check_corpus(changed(config, {"data.packing": "none"}).data) == 100
    write_documents([([1] * 50, None), ([2] * 50, None), *one], tmp_path / "corpus")
    config = changed(config, {"data.split": "50,50,0"})
    assert check_corpus(config.data) == 200
    with pytest.raises(ValueError, match=r"all 51 in part 2 of .*corpus have one, so that none has a next token"):
        check_samples(config, 1, 1, "train.eval_samples")


def test_packs_are_padded_for_sequence_parallelism(root: Path) -> None:
    """Padding is a separate document without loss, and `describe` counts it."""
    padded = {"data.packing": "best_fit", "parallelism.tensor_parallel_size": 4, "model.num_kv_heads": 4}
    plain, data = _data(_config(root, {"data.packing": "best_fit"})), _data(_config(root, padded))
    added = 0
    for sample in range(_size(data)):
        one, other = plain[[sample]], data[[sample]]
        length = one.tokens.shape[1]
        assert one.documents is not None and other.documents is not None
        padding = -length % 4
        assert other.documents == (*one.documents, *([padding] if padding else []))
        assert torch.equal(other.tokens[:, :length], one.tokens) and other.tokens.shape[1] == length + padding
        assert not other.loss_mask[:, length:].any()
        added += padding
    (line,) = data.describe()
    assert added and f"; {added} tokens of padding, " in line and "% full" in line
    assert "; 0 tokens of padding, " in next(plain.describe()) and not list(_data(_config(root)).describe())


@pytest.mark.parametrize("packing", ["none", *PACKED])
def test_blends_follow_their_weights(tmp_path: Path, packing: str) -> None:
    for letter in "abc":
        write_corpus([[letter * length] for length in range(20, 60)], tmp_path / letter, TOKENIZER)
    prefix = " ".join(f"{weight} {tmp_path}/{letter}" for letter, weight in zip("abc", (6, 1, 3), strict=True))
    config = _config(tmp_path, {"data.prefix": prefix, "data.packing": packing})
    data = _data(config)
    rows = _rows(data[[sample]] for sample in range(1000))
    letters = [max(set(row), key=row.count) for row in rows]
    assert {letter: letters.count(ord(letter)) for letter in "abc"} == {"a": 600, "b": 100, "c": 300}
    alone = _data(changed(config, {"data.prefix": f"{tmp_path}/c"}))
    own = [row for row, letter in zip(rows, letters, strict=True) if letter == ord("c")]
    assert own == _rows(alone[[i]] for i in range(300)), "every dataset keeps its own order"
