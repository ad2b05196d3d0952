"""Steps of packs with similar work, dealt out to data-parallel replicas."""

from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.config import Config
from megatron_longctx.core.plans.mask import documents
from megatron_longctx.mcore.data import TrainingData, deal_rule, micro_batches
from megatron_longctx.mcore.packing import Blend, Dealer, DealRule, Packs, TreePacks, arrange, deal
from megatron_longctx.mcore.tokenizer import build_tokenizer
from megatron_longctx.planner.flops import Work, training_flops
from tests.shared.training import changed, tiny_config, tiny_corpus

FULL: dict[tuple[int | None, int | None], int] = {(None, None): 1}
WEIGHTS = ([1.0], [0.6, 0.4])
quick = settings(derandomize=True, database=None, max_examples=40, deadline=None)


def _dealer(batch: int, wait: int, seed: int = 3, weights: list[float] = WEIGHTS[0], packs: int = 200) -> Dealer:
    random = numpy.random.RandomState(packs)
    each = [random.randint(1, 60, packs * number).astype(numpy.int32) for number in range(1, len(weights) + 1)]
    orders = [Packs(lengths, 64, seed) for lengths in each]
    for order in orders:
        order.weigh(10, 1, FULL)
    return Dealer(orders, Blend(weights), batch, seed, wait)


@quick
@given(st.integers(1, 9), st.integers(0, 7), st.integers(1, 99), st.integers(1, 60), st.sampled_from(WEIGHTS))
def test_every_pack_is_computed_once_and_waits_a_bounded_time(
    batch: int, wait: int, seed: int, packs: int, weights: list[float]
) -> None:
    dealer, steps = _dealer(batch, wait, seed, weights, packs), 3 * (wait + 1)
    place = {sample: step for step in range(steps) for sample in dealer.step(step)[0].tolist()}
    assert sorted(place) == list(range(steps * batch)), "no sample is missing or comes twice"
    assert all(abs(step - sample // batch) <= wait for sample, step in place.items())
    if len(weights) == 1:  # a step may have samples of two passes, but a pass ends before the next begins
        size = dealer._orders[0].size
        last: Counter[int] = Counter()
        for sample, step in place.items():
            last[sample // size] = max(last[sample // size], step)
        assert all(step >= last[sample // size - 1] for sample, step in place.items())


@quick
@given(st.sampled_from([2, 4, 8, 24]), st.integers(0, 5), st.integers(0, 40), st.sampled_from(WEIGHTS))
def test_a_step_is_the_same_at_any_size_and_without_earlier_steps(
    batch: int, wait: int, step: int, weights: list[float]
) -> None:
    through = _dealer(batch, wait, weights=weights)
    for earlier in range(step):
        through.step(earlier)
    expected = sorted(through.step(step)[0].tolist())
    for count in (each for each in (1, 2, 4, 8, 24) if batch % each == 0):
        shares = _dealer(batch, wait, weights=weights).replicas(step, count)
        assert {len(share) for share in shares} == {batch // count}
        assert sorted(sample for share in shares for sample in share) == expected
    other = [_dealer(batch, wait, seed=4, weights=weights).step(each)[0].tolist() for each in range(wait + 1)]
    assert wait < 3 or other != [through.step(each)[0].tolist() for each in range(wait + 1)]


@quick
@given(st.lists(st.floats(1, 100), min_size=1, max_size=12), st.integers(1, 6))
def test_packs_are_dealt_evenly_and_the_least_are_first_and_last(works: list[float], count: int) -> None:
    work = numpy.repeat(works, count)
    shares = deal(work, count)
    assert sorted(pack for share in shares for pack in share) == list(range(len(work)))
    totals = [work[share].sum() for share in shares]
    assert max(totals) - min(totals) <= max(works)
    for share in shares:
        peak = int(work[share].argmax())
        assert (numpy.diff(work[share[: peak + 1]]) >= 0).all() and (numpy.diff(work[share[peak:]]) <= 0).all()


def _busiest(dealer: Dealer, steps: int, count: int, dealt: bool) -> float:
    """Return by how much the busiest replica exceeds the average, on average over steps."""
    excess = []
    for step in range(steps):
        _, work = dealer.step(step)
        totals = [work[share].sum() for share in deal(work, count)] if dealt else work.reshape(count, -1).sum(1)
        excess.append(max(totals) / fmean(totals) - 1)
    return fmean(excess)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_replicas_finish_together_on_long_tailed_documents(count: int, micro_batches: int) -> None:
    random = numpy.random.RandomState(0)
    short = numpy.clip(random.lognormal(6.5, 1.0, 100_000), 16, 4096)
    lengths = numpy.concatenate([short, numpy.full(200, 65_536)]).astype(numpy.int32)
    packs = Packs(lengths, 65_536, 1)
    packs.weigh(25_000, 1, FULL)  # as in Llama-3-8B: a document of 64K tokens is 2.2 packs of short ones
    steps, batch = packs.size // (count * micro_batches), count * micro_batches
    for wait, least, most in ((None, 0.05, 1.0), (32, 0.0, 0.05)):
        dealer = Dealer([packs], Blend([1.0]), batch, 1, wait or 0)
        assert least <= _busiest(dealer, steps, count, dealt=wait is not None) <= most


def test_the_predicted_work_is_that_of_the_flops() -> None:
    """Windows and trees count: the work of a pack is that of its mask in every layer."""
    model = changed(Config(), {"model.num_layers": 5, "model.window": 9, "model.window_pattern": 2}).model
    assert model.layer_windows == {(None, None): 2, (9, 0): 3}
    rule = DealRule(0, *(training_flops(model, 512, one).causal for one in (Work(1, 0, 0), Work(0, 1, 0))))
    trees = [([9, 4, 5, 6], [-1, 0, 0, 2]), ([20, 1, 1], [-1, 0, 0]), ([3], [-1]), ([30, 2], [-1, 0])]
    for order in (Packs(numpy.array([30, 7, 7, 100, 2], numpy.int32), 32, 1), TreePacks(trees, 32, 1)):
        samples = numpy.arange(2 * order.size)
        order.weigh(rule.token_flops, rule.pair_flops, model.layer_windows)
        found = order.work(samples)
        for sample in samples.tolist():
            spans = order.spans(sample)
            lengths = numpy.minimum(spans.lengths, 32).tolist()  # a cut document has one token more
            pairs = sum(count * documents(lengths, parents=spans.parents, window=each).pairs
                        for each, count in model.layer_windows.items())  # fmt: skip
            assert found[sample] == training_flops(model, 512, Work(sum(lengths), pairs, 0)).causal


@pytest.fixture
def packed(tmp_path: Path) -> Config:
    tiny_corpus(tmp_path / "corpus")
    return tiny_config(tmp_path, "packed", {"data.packing": "best_fit", "train.global_batch_size": 8,
                                            "data.max_wait_steps": 2, "train.steps": 6})  # fmt: skip


def _documents(config: Config, count: int, first: int = 0, earlier: dict[str, Any] | None = None) -> list[list[Any]]:
    """Return the documents of every step from `first` on, over all replicas."""
    data = TrainingData(config, build_tokenizer("byte-level"), 384)
    dealer = data.dealer(config, deal_rule(config, 384, earlier))
    shares = [micro_batches(config, first, rank, count, dealer) for rank in range(count)]
    return [sorted(data[next(share)].tokens.tolist() for share in shares for _ in range(8 // count))
            for _ in range(first, config.train.steps)]  # fmt: skip


def test_steps_have_the_same_documents_at_any_data_parallel_size(packed: Config) -> None:
    steps = _documents(packed, 1)
    assert steps == _documents(packed, 8) and steps[2:] == _documents(packed, 2, first=2)
    null, still = (changed(packed, {"data.max_wait_steps": wait}) for wait in (None, 0))
    assert _documents(null, 2) == _documents(still, 4) != steps


def test_a_resumed_run_goes_on_as_it_began(packed: Config) -> None:
    null, alone = changed(packed, {"data.max_wait_steps": None}), changed(packed, {"train.global_batch_size": 1})
    new = deal_rule(packed, 384)
    assert new is not None and new.max_wait_steps == 2
    assert deal_rule(packed, 384, {"order": [2, 5, 7]}) == DealRule(2, 5, 7), "another version's prediction"
    assert deal_rule(packed, 384, {}) is None, "an earlier version did not wait"
    for earlier in ({"order": [9, 5, 7]}, {"order": None}):  # refused unless train.check_data=false
        assert deal_rule(packed, 384, earlier) == new
    assert [deal_rule(each, 384) for each in (null, alone)] == [None, None]


def test_steps_have_similar_work_in_an_order_of_their_own() -> None:
    work, batch, seed = numpy.random.RandomState(0).permutation(24).astype(float), 4, 7
    order = arrange(work, 2, batch, seed)  # the pass begins and ends within a step
    assert sorted(order) == list(range(24))
    assert work[order[:2]].tolist() == [0, 1] and work[order[22:]].tolist() == [2, 3]
    steps = work[order[2:22]].reshape(-1, batch)
    assert (steps == steps[:, :1] + numpy.arange(batch)).all() and steps[:, 0].tolist() != sorted(steps[:, 0])
    assert arrange(work, 26, batch, seed).tolist() != order.tolist(), "other steps, another order"
    assert arrange(work, 2, batch, seed + 1).tolist() != order.tolist()
