"""`python -m analysis.benchmarks trees` on CPU: trees and their rollouts apart give the same."""

from typing import Any

import pytest

from analysis.benchmarks.rollouts import agents, trees
from analysis.benchmarks.trees import Options, describe, measure
from megatron_longctx.core.plans.mask import documents
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.ranks import Ranks


def test_trees_have_the_ratios_of_their_docstrings() -> None:
    drawn, sorted_ = agents(), agents().depth_first()
    assert sorted(sorted_.apart) == sorted(drawn.apart) and len(drawn.apart) == 23
    assert all(parent < node for node, parent in enumerate(sorted_.parents))
    masks = [documents(each.lengths, parents=each.parents) for each in (drawn, sorted_)]
    assert masks[0].pairs == masks[1].pairs == pytest.approx(documents(drawn.apart).pairs / 2.55, rel=0.01)
    assert [sum(each.apart) / sum(each.lengths) for each in trees()] == pytest.approx([8.5, 21.67, 3.95], rel=0.01)


def _measure(rank: int) -> list[dict[str, Any]]:
    model = ("num_layers=1", "hidden_size=32", "num_attention_heads=4", "num_kv_heads=2", "ffn_hidden_size=64")
    settings = tuple(f"model.{each}" for each in (*model, "vocab_size=320"))
    parts, heads = ("attention", "steps"), (4, 2, 16)
    options = Options(parts, (0,), ("zigzag",), "all_gather", heads, 512, 1, 60, 140, "h200_x8", settings)
    return measure(rank, Ranks(2, "cpu"), options, lambda cells: None)


def test_trees_are_measured_beside_their_rollouts_apart() -> None:
    cells = run_distributed(_measure, 2)[0]
    assert not [each for each in cells if each["what"].startswith("failed")]
    assert [each["what"] for each in cells if each["part"] == "steps"] == ["tree", "separate"] * 2
    of_trees = [each for each in cells if each["what"] == "tree"]
    assert len(of_trees) >= 1 + 2
    for each in of_trees:
        assert each["faster"] == pytest.approx(each["reached"] * each["ideal"]) and each.get("loss_error", 0) < 1e-5
        assert describe(each).startswith(f"part {each['part']}, tree ")


def _measure_deep(rank: int) -> list[dict[str, Any]]:
    options = Options(("attention",), (2,), ("all_gather",), "all_gather", (4, 2, 16), 128, 1, 60, 140, "h200_x8", ())
    return measure(rank, Ranks(2, "cpu"), options, lambda cells: None)


def test_deep_trees_are_measured_with_and_without_copies_of_keys() -> None:
    cells = run_distributed(_measure_deep, 2)[0]
    measured = [each["what"] for each in cells if each["part"] == "attention"]
    assert {"tree", "tree, keys not copied", "separate"} <= {*measured} and "failed" not in str(measured)
    (difference,) = [each for each in cells if each["what"] == "difference"]
    assert all(0 < difference[name] < 1e-4 for name in ("out", "dq", "dk", "dv"))
    calls = {each["what"]: each["backward, rank 0"] for each in cells if each["what"].startswith("kernel calls")}
    assert len(set(calls.values())) == len(calls) == 2
