"""Sequences with equal beginnings as trees: what every sequence learns is learned once, from the same tokens."""

import random
from collections import Counter
from itertools import pairwise

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_longctx.core.plans import build_plan, kernel_calls
from megatron_longctx.core.plans.kernel_calls import fa4_takes
from megatron_longctx.core.plans.mask import documents
from megatron_longctx.models.trees import Example, Tree, divided, following, merged, parts
from tests.shared.trees import tokens_before


def example(tokens: list[int], weights: list[float] | None = None, values: list[float] | None = None) -> Example:
    size = len(tokens)
    given = values and numpy.array(values, numpy.float32)[:, None]
    return Example(
        numpy.array(tokens), numpy.array(weights or [0.0] + [1.0] * (size - 1), numpy.float32),
        numpy.zeros((size, 0), numpy.float32) if given is None else given,
    )  # fmt: skip


def learned(trees: list[Tree]) -> Counter[tuple[tuple[int, ...], float]]:
    """Return the weight of every (tokens up to a label, the label's value) that trees learn."""
    found: Counter[tuple[tuple[int, ...], float]] = Counter()
    for tree in trees:
        starts = numpy.cumsum([0, *tree.lengths])
        labels = following(tree.lengths, tree.parents)
        for node in range(len(tree.lengths)):
            before = tokens_before(tree.tokens.tolist(), tree.lengths, tree.parents, node)
            for at in range(starts[node], starts[node + 1]):
                before.append(int(tree.tokens[at]))
                if (label := labels[at]) >= 0 and tree.weights[label]:
                    value = float(tree.values[label, 0]) if tree.values.shape[1] else 0.0
                    found[(*before, int(tree.tokens[label])), value] += round(float(tree.weights[label]), 4)
    return found


def learned_apart(examples: list[Example]) -> Counter[tuple[tuple[int, ...], float]]:
    found: Counter[tuple[tuple[int, ...], float]] = Counter()
    for each in examples:
        for at in range(1, len(each.tokens)):
            if each.weights[at]:
                value = float(each.values[at, 0]) if each.values.shape[1] else 0.0
                found[tuple(each.tokens[: at + 1].tolist()), value] += round(float(each.weights[at]), 4)
    return found


@st.composite
def groups(draw: st.DrawFn) -> list[Example]:
    valued = draw(st.booleans())
    found = []
    for tokens in draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=12)):
        weights = [0.0, *(draw(st.sampled_from((0.0, 1.0, 0.5))) for _ in tokens[1:])]
        values = [draw(st.sampled_from((1.0, 2.0))) if weight else 0.0 for weight in weights] if valued else None
        found.append(example(tokens, weights, values))
    return found


@given(groups())
def test_trees_learn_what_their_sequences_learn(examples: list[Example]) -> None:
    trees = merged(examples)
    assert learned(trees) == learned_apart(examples)
    for tree in trees:
        assert sum(tree.lengths) == len(tree.tokens) == len(tree.weights) == len(tree.values) and min(tree.lengths) > 0
        assert all(parent < node for node, parent in enumerate(tree.parents))
    assert sum(len(tree.tokens) for tree in trees) <= sum(len(each.tokens) for each in examples)


@given(groups(), st.integers(7, 20))
def test_parts_of_trees_learn_every_token_once(examples: list[Example], capacity: int) -> None:
    found = [part for tree in merged(examples) for part in divided(tree, capacity)]
    assert all(sum(tree.lengths) == len(tree.tokens) <= capacity for tree in found)
    assert learned(found) == learned_apart(examples)


def test_responses_begin_with_the_prompts_last_token() -> None:
    """The prompt 1 2 3 is not learned; two responses begin with the same token but have other values."""
    prompt = [1, 2, 3]
    responses = [([4, 5], 1.0), ([4, 6], 2.0), ([7], 3.0)]
    (tree,) = merged([
        example(prompt + tokens, [0.0] * 3 + [1.0] * len(tokens), [0.0] * 3 + [value] * len(tokens))
        for tokens, value in responses
    ])  # fmt: skip
    assert (tree.lengths[0], tree.parents) == (2, (-1, 0, 0, 0))
    starts = numpy.cumsum([0, *tree.lengths])
    nodes = [tree.tokens[a:b].tolist() for a, b in pairwise(starts)]
    assert nodes[0] == [1, 2] and sorted(nodes[1:]) == [[3, 4, 5], [3, 4, 6], [3, 7]]
    assert learned([tree])[(1, 2, 3, 7), 3.0] == 1


def test_a_branch_longer_than_a_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="expected branches of at most 8 tokens; one has 9"):
        parts([4, 5, 2], [-1, 0, 0], 8)


@pytest.mark.parametrize("mode", ["zigzag", "helper", "all_gather", "ulysses"])
def test_trees_need_fewer_kernel_calls_than_turns_in_the_order_of_time(mode: str) -> None:
    """Turns that continue each other alone are one node, and all descendants of a node attend to it together."""
    draw, lengths, parents, turns = random.Random(5), [300], [-1], [[0] * 300]
    for number in range(1, 49):
        parents.append(draw.randrange(number))
        lengths.append(draw.randint(200, 1500))
        turns.append([*turns[parents[-1]], *[number] * lengths[-1]])
    (tree,) = merged([example(each) for each in turns])
    calls, other = (
        sum(len(kernel_calls(attend.slices, fa4_takes(False))) for _, _, attend in
            build_plan(mode, 2, documents(sizes, parents=above)).calls())
        for sizes, above in ((tree.lengths, tree.parents), (lengths, parents))
    )  # fmt: skip
    assert 1.5 * calls <= other, (calls, other)
