"""Batches as trees and back: every row's tokens, the place that predicts each, and GRPO's curve in both forms."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_longctx.core.plans.mask import documents as mask_of
from megatron_longctx.integrations.trees import TreeBatch, to_tree
from tests.docs.test_docs import FENCED, ROOT
from tests.shared.trees import tokens_before

PAGE = ROOT / "docs" / "transformers.md"
ROW = st.lists(st.integers(1, 3), min_size=1, max_size=9)
PROMPT = [5, 6, 7]
RESPONSES = [[1, 2], [1, 3, 3], [2], [4, 4, 4, 4]]


def padded(rows: list[list[int]], prompts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, with padding before prompts and after responses, as of verl and TRL."""
    before, after = max(prompts), max(len(row) - prompt for row, prompt in zip(rows, prompts, strict=True))
    ids, mask = torch.full((len(rows), before + after), 9), torch.zeros(len(rows), before + after)
    for at, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        span = slice(before - prompt, before - prompt + len(row))
        ids[at, span], mask[at, span] = torch.tensor(row), 1
    return ids, mask


def before(tree: TreeBatch, place: int) -> list[int]:
    """Return the tokens that a token of the pack sees: its ancestors' and its own node's, itself among them."""
    nodes = mask_of(tree.documents, parents=tree.parents).documents
    node = next(number for number, each in enumerate(nodes) if each.start <= place < each.stop)
    tokens = tree.tokens[0].tolist()
    return tokens_before(tokens, tree.documents, tree.parents, node) + tokens[nodes[node].start : place + 1]


@given(st.lists(ROW, min_size=1, max_size=8), st.data())
def test_every_token_is_predicted_from_all_tokens_before_it(rows: list[list[int]], data: Any) -> None:
    """Rows may be equal, begin with another, or share no token."""
    prompts = [data.draw(st.integers(1, len(row))) for row in rows]
    ids, mask = padded(rows, prompts)
    tree = to_tree(ids, mask, prompt_lengths=prompts, multiple=data.draw(st.integers(1, 4)))
    assert sum(tree.documents) == tree.tokens.numel() == tree.labels.numel()
    weights = torch.zeros_like(tree.loss_mask)
    for row, (tokens, prompt) in enumerate(zip(rows, prompts, strict=True)):
        first = int(mask[row].argmax())
        assert (tree.places[row] >= 0).nonzero().flatten().tolist() == [*range(first + 1, first + len(tokens))]
        for at in range(1, len(tokens)):
            place = int(tree.places[row, first + at])
            assert before(tree, place) == tokens[:at] and int(tree.labels[0, place]) == tokens[at]
            assert int(tree.position_ids[0, place]) == at - 1
            weights[0, place] += at >= prompt
    torch.testing.assert_close(tree.loss_mask, weights)


def test_a_prompt_is_stored_once_and_every_response_begins_with_a_copy_of_its_last_token() -> None:
    tree = to_tree([PROMPT + each for each in RESPONSES], prompt_lengths=[3] * 4, groups=["a"] * 4)
    assert tree.documents[0] == 2 and tree.tokens.numel() == 2 + (1 + 2 + 3) + 2 + 5
    firsts = tree.places[:, 3]
    assert tree.tokens[0, firsts].tolist() == [7] * 4
    assert firsts[0] == firsts[1] and len({*firsts.tolist()}) == 3  # two responses begin alike
    assert float(tree.loss_mask[0, firsts[0]]) == 2


def test_values_return_to_their_rows_with_gradients_from_one_rank_or_several() -> None:
    rows = [PROMPT + each for each in RESPONSES]
    ids, mask = padded(rows, [3] * 4)
    tree = to_tree(ids, mask, prompt_lengths=torch.tensor([3] * 4))
    values = torch.arange(1.0, tree.tokens.numel() + 1, requires_grad=True)
    whole = tree.to_rows(values[None])
    assert torch.equal(whole, torch.where(tree.places >= 0, tree.places + 1, 0).float())
    assert torch.equal(whole, tree.to_rows(values))
    ranks = (torch.arange(3, len(values)), torch.tensor([2, 0, 1]), torch.arange(0))
    assert torch.equal(whole, torch.stack([tree.to_rows(values[own], own) for own in ranks]).sum(0))
    torch.autograd.backward((whole * (ids != 9)).sum())
    counts = torch.bincount(tree.places[tree.places >= 0], minlength=len(values))
    assert values.grad is not None and torch.equal(values.grad, counts.float())
    with pytest.raises(ValueError, match=r"values=a tensor \[3\]: expected \d+ numbers. Give this rank's tokens"):
        tree.to_rows(values[:3])


def test_weights_of_the_caller_are_summed() -> None:
    weights = torch.tensor([[9, 0, 0, 0.5, 2], [9, 0, 0, 0.25, 3]])
    tree = to_tree(torch.tensor([[5, 6, 7, 1, 2], [5, 6, 7, 1, 3]]), loss_mask=weights)
    assert tree.loss_mask[0, tree.places[0, 3:]].tolist() == [0.75, 2]
    assert float(tree.loss_mask.sum()) == 5.75  # nothing predicts a first token


GAP = torch.tensor([[1, 1, 1], [1, 0, 1]])


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([[1, 2, 3], [1, 4, 3]], {"prompt_lengths": [2, 2], "groups": ["a", "a"]},
         r"groups\[1\]=a: .*row 1 has 4 as token 1 of its prompt, and row 0 2"),
        ([[1, 2, 3], [7, 7], [1, 2, 3]], {"prompt_lengths": [2, 1, 1], "groups": torch.tensor([5, 6, 5])},
         r"groups\[2\]=5: .*row 2 has 1 tokens, and row 0 2"),
        ([[1, 2]], {"groups": ["a"]}, "prompt_lengths=None: expected the tokens of each prompt"),
        ([[1, 2]], {"groups": ["a", "b"], "prompt_lengths": [1]}, "groups=2 values: expected 1"),
        ([[1, 2]], {"prompt_lengths": [3]}, r"prompt_lengths\[0\]=3: expected 1 to 2, the tokens of row 0"),
        ([[1, 2]], {"prompt_lengths": [1, 1]}, "prompt_lengths=2 numbers: expected 1"),
        ([[1, 2], []], {}, r"attention_mask\[1\]=no tokens"),
        (torch.ones(2, 3).long(), {"attention_mask": GAP}, r"attention_mask\[1\]=padding between tokens"),
        (torch.ones(2, 4).long(), {"attention_mask": GAP}, r"attention_mask=a tensor \[2, 3\]: expected \[2, 4\]"),
        ([[1, 2]], {"attention_mask": GAP}, "attention_mask=given: expected none with lists"),
        (torch.ones(2, 3), {}, r"input_ids=torch.float32 \[2, 3\]: expected integers"),
        ([[1, 2], [1.5]], {}, r"input_ids\[1\]=torch.float32: expected integers"),
        ([], {}, r"input_ids=torch.int64 \[0, 0\]"),
        ([[1, 2]], {"loss_mask": GAP}, r"loss_mask=a tensor \[2, 3\]: expected \[1, 2\]"),
        ([[1, 2]], {"multiple": 0}, "multiple=0: expected 1 or more"),
    ],
)  # fmt: skip
def test_batches_that_cannot_be_trees_are_refused_by_name(rows: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_tree(rows, **settings)


def test_the_page_trains_grpo_on_trees_as_on_rows() -> None:
    code = next(code for _, code in FENCED.findall(PAGE.read_text(encoding="utf-8")) if "to_tree" in code)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, PAGE.name, "exec"), names)
    (trees, fewer), (rows, all_of_them) = (names["train"](shared) for shared in (True, False))
    assert len(trees) == len(rows) and fewer < 0.5 * all_of_them
    for of_trees, of_rows in zip(trees, rows, strict=True):
        assert of_trees == pytest.approx(of_rows, abs=1e-5)
    rewards = [reward for reward, *_ in trees]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1
