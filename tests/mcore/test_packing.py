"""Orders of samples: Megatron's stream, packs by best fit, and blends."""

from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_longctx.mcore.data import read_tokens
from megatron_longctx.mcore.packing import Blend, Packs, SampleOrder, Stream, best_fit
from megatron_longctx.mcore.tokenizer import build_tokenizer
from tests.shared.training import write_documents

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)
ORDERS = (Stream, Packs)
quick = settings(derandomize=True, database=None, max_examples=60, deadline=None)


def _order(kind: type, lengths: list[int], seq_length: int, seed: int = 3) -> SampleOrder:
    order: SampleOrder = kind(numpy.array(lengths, dtype=numpy.int32), seq_length, seed)
    return order


def _spans(order: SampleOrder, samples: range) -> list[list[tuple[int, int, int]]]:
    return [list(zip(*(x.tolist() for x in order.spans(i)[:3]), strict=True)) for i in samples]


@pytest.mark.parametrize("seed", [1, 1234])
def test_the_stream_is_megatrons(tmp_path: Path, seed: int) -> None:
    random, tokenizer = numpy.random.RandomState(0), build_tokenizer("byte-level")
    documents = [(random.randint(1, 200, length).tolist(), None) for length in (1, 30, 7, 1, 2, 64, 100, 9, 32, 33)]
    write_documents(documents, tmp_path / "corpus")
    dataset = IndexedDataset(str(tmp_path / "corpus"))
    for length in (1, 8, 31):
        order = Stream(numpy.array(dataset.sequence_lengths[:9]), length, seed)
        for number in range(2):
            config = GPTDatasetConfig(
                random_seed=seed + number, sequence_length=length, blend=([str(tmp_path / "corpus")], None),
                split="90,10,0", tokenizer=tokenizer, reset_position_ids=False, reset_attention_mask=False,
                eod_mask_loss=False, create_attention_mask=False,
            )  # fmt: skip
            theirs, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [None] * 3, lambda: True, config).build()
            assert len(theirs) == order.size
            for index in range(order.size):
                ours = read_tokens(dataset, order.spans(number * order.size + index))
                assert ours[:-1].tolist() == theirs[index]["tokens"].tolist()
                assert ours[1:].tolist() == theirs[index]["labels"].tolist()


@quick
@given(LENGTHS, st.integers(1, 70), st.integers(0, 2))
def test_every_token_is_in_one_pack_of_a_pass(lengths: list[int], seq_length: int, number: int) -> None:
    order = Packs(numpy.array(lengths, dtype=numpy.int32), seq_length, 3)
    seen = [numpy.zeros(length, dtype=int) for length in lengths]
    packs = _spans(order, range(number * order.size, (number + 1) * order.size))
    for pack in packs:
        for document, offset, length in pack:
            goes_on = offset + length < lengths[document] or length > seq_length
            assert goes_on <= (len(pack) == 1 and length == seq_length + 1), "only a cut document has one token more"
            seen[document][offset : offset + min(length, seq_length)] += 1
            assert offset % seq_length == 0 and (offset == 0 or lengths[document] > seq_length)
        assert 0 < sum(length for *_, length in pack) <= seq_length + (pack[0][2] > seq_length)
    assert all((count == 1).all() for count in seen)
    assert sorted(order.tokens) == sorted(sum(min(part[2], seq_length) for part in pack) for pack in packs)


def _best_fit_by_hand(lengths: list[int], capacity: int) -> list[int]:
    rooms: list[int] = []
    for length in lengths:
        if fitting := [room for room in rooms if room >= length]:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@quick
@given(LENGTHS)
def test_packs_are_those_of_best_fit_decreasing(lengths: list[int]) -> None:
    longest_first = sorted(lengths, reverse=True)
    packs = best_fit(numpy.array(longest_first), 60)
    filled = numpy.bincount(packs, longest_first).astype(int)
    assert sorted(60 - filled) == _best_fit_by_hand(longest_first, 60)


def test_packs_of_text_are_full() -> None:
    lengths = numpy.clip(numpy.random.RandomState(0).lognormal(6, 1.3, 20_000), 1, 10**5).astype(numpy.int32)
    order = Packs(lengths, 8192, 1)
    assert order.tokens.sum() == lengths.sum() and order.tokens.sum() / order.size > 0.999 * 8192


@pytest.mark.parametrize("kind", ORDERS)
@quick
@given(LENGTHS, st.integers(0, 200), st.integers(0, 2**31 - 1))
def test_any_sample_is_found_without_earlier_ones(kind: type, lengths: list[int], sample: int, seed: int) -> None:
    lengths = [*lengths, 20]
    through = _spans(_order(kind, lengths, 7, seed), range(sample + 3))
    assert through[sample:] == _spans(_order(kind, lengths, 7, seed), range(sample, sample + 3))


@pytest.mark.parametrize("kind", ORDERS)
def test_passes_and_seeds_have_different_orders(kind: type) -> None:
    lengths = numpy.random.RandomState(1).randint(1, 40, 100).tolist()
    order = _order(kind, lengths, 30)
    passes = [_spans(order, range(n * order.size, (n + 1) * order.size)) for n in range(3)]
    passes.append(_spans(_order(kind, lengths, 30, seed=77), range(order.size)))
    assert len({str(each) for each in passes}) == 4
    # Packs also combine different documents.
    assert len({str(sorted(sorted(pack) for pack in each)) for each in passes}) == 4


@quick
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=5), st.integers(0, 200_000))
def test_a_blend_keeps_its_weights_at_any_sample(weights: list[float], first: int) -> None:
    blend = Blend(weights)
    located = [blend.locate(sample) for sample in range(first, first + 300)]
    for dataset, weight in enumerate(weights):
        own = [sample for where, sample in located if where == dataset]
        assert own == list(range(own[0], own[0] + len(own))) if own else True, "in its own order, with none missing"
        assert abs(len(own) - 300 * weight / sum(weights)) < 2 * len(weights)
        if own:  # earlier samples too, except for less than one sample per repetition of the blend
            assert abs(own[0] - first * weight / sum(weights)) < (len(weights) + 1) * (2 + first // 2**16)


def test_a_blend_is_megatrons() -> None:
    assert [Blend([3, 1]).locate(sample) for sample in range(8)] == [
        (0, 0), (1, 0), (0, 1), (0, 2), (0, 3), (1, 1), (0, 4), (0, 5),
    ]  # fmt: skip
