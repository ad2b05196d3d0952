"""Greedy, temperature, top-k, top-p and seeds."""

from collections import Counter

import pytest
import torch

from megatron_longctx.inference.sampling import Sampling, sample

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 2.0])
DRAWS = 4000


def drawn(sampling: Sampling) -> Counter[int]:
    return Counter(sample(LOGITS, sampling, 0, step) for step in range(DRAWS))


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    assert sample(LOGITS, Sampling(), 0, 0) == 1
    assert drawn(Sampling(temperature=0.7, top_k=1)) == {1: DRAWS}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_probabilities(temperature: float) -> None:
    counts = drawn(Sampling(temperature=temperature))
    for token, p in enumerate(torch.softmax(LOGITS / temperature, 0).tolist()):
        assert abs(counts[token] - p * DRAWS) <= 5 * (p * (1 - p) * DRAWS) ** 0.5 + 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9])
def test_a_temperature_near_zero_is_almost_greedy(temperature: float) -> None:
    for top_p in (1.0, 0.5, 5e-324):
        draws = {sample(LOGITS, Sampling(temperature=temperature, top_p=top_p), 0, step) for step in range(50)}
        assert draws == ({1, 4} if top_p == 1 else {1, 4} & draws)


def test_top_k_and_top_p_keep_the_likeliest_and_their_ratios() -> None:
    assert set(drawn(Sampling(temperature=1.0, top_k=3))) == {1, 4, 3}
    # 1 and 4 have 0.37 each: the first alone reaches 0.3, both are needed for 0.5, 3 as well for 0.8
    assert set(drawn(Sampling(temperature=1.0, top_p=0.3))) == {1}
    assert set(drawn(Sampling(temperature=1.0, top_p=0.5))) == {1, 4}
    assert set(drawn(Sampling(temperature=1.0, top_p=0.8))) == {1, 4, 3}
    both = drawn(Sampling(temperature=1.0, top_k=2, top_p=0.9))
    assert abs(both[1] - DRAWS / 2) < 5 * DRAWS**0.5


def test_min_p_keeps_a_part_of_the_likeliest() -> None:
    """3 has exp(-1) = 0.37 of the probability of 1 and 4, 0 has 0.22."""
    assert set(drawn(Sampling(temperature=1.0, min_p=0.3))) == {1, 4, 3}
    assert (
        set(drawn(Sampling(temperature=1.0, min_p=0.5))) == set(drawn(Sampling(temperature=1.0, min_p=1.0))) == {1, 4}
    )


def test_penalties_biases_and_least_lengths_change_logits() -> None:
    answers = {
        Sampling(presence_penalty=1.5): (4, [1]),  # 2 - 1.5
        Sampling(frequency_penalty=0.3): (4, [1, 1, 4]),  # 2 - 0.6 and 2 - 0.3
        Sampling(repetition_penalty=3.0): (3, [1, 4]),  # 2 / 3
        Sampling(logit_bias=((0, 1.6),)): (0, []),
        Sampling(min_tokens=2, stop=(1,)): (4, [3]),
    }
    for sampling, (expected, answer) in answers.items():
        assert sample(LOGITS, sampling, 0, 0, (), answer) == expected, sampling
    assert sample(LOGITS, Sampling(min_tokens=2, stop=(1,)), 0, 0, (), [3, 3]) == 1
    allowed = torch.tensor([True, False, True, False, False])
    assert sample(LOGITS, Sampling(grammar="{}", stop=(1,)), 0, 0, allowed=allowed) == 0
    drawn = {sample(LOGITS, Sampling(temperature=9, grammar="{}", stop=(1,)), 0, i, (), (), allowed) for i in range(99)}
    assert drawn == {0, 2}


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 30, "top_p": 0.95}], ids=lambda filters: "+".join(filters)
)
def test_rounding_that_swaps_two_tokens_hardly_changes_draws(filters: dict[str, float]) -> None:
    """Tokens 7 and 31 get a third of all draws each, and rounding decides which is the likelier."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 0.5
    logits[[7, 31]] = 4.0
    rounding = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2e-6
    rounding[7], rounding[31] = 1e-6, -1e-6
    nearby = [logits + rounding, logits - rounding]
    assert nearby[0][7] > nearby[0][31] and nearby[1][7] < nearby[1][31]
    draws = [[sample(x, Sampling(temperature=1.0, **filters), 0, step) for step in range(1000)] for x in nearby]
    assert min(Counter(draws[0])[token] for token in (7, 31)) > 200
    assert draws[0] == draws[1]


def test_of_equally_likely_tokens_the_last_are_left_out() -> None:
    logits = torch.zeros(8)
    for filters in ({"top_k": 3}, {"top_p": 0.3}):
        found = {sample(logits, Sampling(temperature=1.0, **filters), 0, step) for step in range(200)}
        assert found == {0, 1, 2}


def test_draws_repeat_by_seed_stream_and_step_and_differ_otherwise() -> None:
    logits = torch.zeros(1000)
    base = sample(logits, Sampling(temperature=1.0, seed=3), 5, 7)
    assert base == sample(logits, Sampling(temperature=1.0, seed=3), 5, 7)
    others = {sample(logits, Sampling(temperature=1.0, seed=s), t, u) for s, t, u in [(4, 5, 7), (3, 6, 7), (3, 5, 8)]}
    assert base not in others and len(others) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"min_p": 1.5}, r"min_p=1\.5"),
        ({"frequency_penalty": -3.0}, r"frequency_penalty=-3\.0: expected from -2 to 2"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty=nan"),
        ({"max_new_tokens": 2, "min_tokens": 3}, "min_tokens=3: expected at most max_tokens=2"),
        ({"grammar": "{}", "stop": ()}, "grammar=: expected a stop token"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5: expected an integer"),
        ({"max_new_tokens": None}, "max_new_tokens=None: expected an integer"),
        ({"top_k": 2.0}, "top_k=2.0: expected an integer"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
        ({"top_p": 1.5}, r"top_p=1\.5"),
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)
