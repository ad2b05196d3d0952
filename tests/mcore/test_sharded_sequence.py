"""The tokens of a batch that each rank gets."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_longctx.core.plans import ModeOptions, build_plan
from megatron_longctx.mcore.sequence import build_sequence
from tests.shared.sequences import sequence_of
from tests.shared.training import tiny_config


@pytest.mark.parametrize("schedule", ["zigzag", "all_gather", "ring"])
@pytest.mark.parametrize(("n", "length", "unit"), [(2, 8, 1), (2, 7, 1), (3, 9, 1), (2, 12, 2)])
def test_shares_are_those_of_the_layout(schedule: str, n: int, length: int, unit: int) -> None:
    text = torch.arange(100, 101 + length)
    # Labels are shifted over the whole sequence: the last token's label is the sample's extra token.
    batch = {
        "tokens": torch.stack((text[:-1], text[:-1] + 100)),
        "labels": torch.stack((text[1:], text[1:] + 100)),
        "loss_mask": torch.arange(2 * length, dtype=torch.float32).view(2, length),
    }
    for rank in range(n):
        sequence = sequence_of(rank, n, length, schedule, unit)
        positions = list(build_plan(schedule, n, length, unit=unit).queries.tokens(rank))
        share = sequence.shard_batch(batch)
        assert share.keys() == batch.keys()
        assert sequence.whole.num_local_tokens == len(positions)
        assert sequence.whole.tokens(torch.device("cpu")).tolist() == positions
        assert share["tokens"].tolist() == [[100 + p for p in positions], [200 + p for p in positions]]
        assert share["labels"].tolist() == [[101 + p for p in positions], [201 + p for p in positions]]
        assert share["loss_mask"].tolist() == [positions, [length + p for p in positions]]
        assert share["loss_mask"].dtype == torch.float32


def test_a_pack_of_another_length_has_another_share() -> None:
    sequence = sequence_of(rank=0, world=2, length=8)
    sequence.shard_batch({"tokens": torch.arange(8)[None]})
    pack = sequence.pack([4])
    assert sequence.shard_batch({"tokens": torch.arange(4)[None]}, pack)["tokens"].tolist() == [[0, 3]]
    with pytest.raises(AttributeError):  # layers in backward must not see another length
        sequence.length = 4  # type: ignore[misc]


@pytest.mark.parametrize("shape", [(2, 4), (8,), (1, 2, 8), (8, 2)])
def test_other_shapes_than_whole_batches_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"batch\['labels'\] has shape .*: expected \[batch, 8\], the whole sequence"):
        sequence_of(rank=0, world=2, length=8).shard_batch({"labels": torch.zeros(shape)})


@pytest.mark.parametrize(
    ("settings", "plan"),
    [
        ({}, ("zigzag", 4, 100, ModeOptions())),
        ({"parallelism.schedule": "ring"}, ("ring", 4, 100, ModeOptions())),
        ({"parallelism.tensor_parallel_size": 2}, ("zigzag", 4, 100, ModeOptions(), 2)),
        (
            {"parallelism.tensor_parallel_size": 2, "parallelism.sequence_parallel": False},
            ("zigzag", 4, 100, ModeOptions()),
        ),
        (
            {"parallelism.schedule": "all_gather", "parallelism.max_buffer_tokens": 20},
            ("all_gather", 4, 100, ModeOptions(20)),
        ),
        (
            {"parallelism.schedule": "usp", "parallelism.inner_size": 1, "parallelism.outer_schedule": "helper"},
            ("usp", 4, 100, ModeOptions(inner_size=1, outer_schedule="helper")),
        ),
    ],
)
def test_the_plan_is_the_configured_one(tmp_path: Path, settings: dict[str, Any], plan: tuple[Any, ...]) -> None:
    group: Any = None  # a rank alone
    sequence = build_sequence(tiny_config(tmp_path, "run", {"data.seq_length": 100, **settings}), group)
    sequence.attention.world = 4
    assert sequence.length == 100
    assert sequence.attention.plan(100) == build_plan(*plan)


def test_packs_are_sharded_by_their_own_layout() -> None:
    """It does not depend on windows, so all layers share it."""
    sequence = sequence_of(rank=1, world=2, length=8)
    pack = sequence.pack([5, 1, 6])
    text = torch.arange(12)[None]
    mine = sequence.shard_batch({"tokens": text}, pack)["tokens"][0]
    assert mine.tolist() == pack.tokens(torch.device("cpu")).tolist() == list(pack.layout.tokens(1))
    assert pack.layout == sequence.attention.layout(pack.mask(window=(2, 0)))
    assert sequence.pack([8]) is sequence.whole and sequence.pack([5, 1, 6]) != pack
    with pytest.raises(ValueError, match=r"expected \[batch, 12\], the whole sequence"):
        sequence.shard_batch({"tokens": text[:, :8]}, pack)
    with pytest.raises(ValueError, match=r"documents\[1\]=0: expected 1 token or more"):
        sequence.pack([5, 0])
    with pytest.raises(ValueError, match=r"length=2: expected tokens for all 3 .* Pass longer sequences or packs"):
        sequence_of(rank=0, world=3, length=8).shard_batch({"tokens": text[:, :2]}, sequence_of(0, 3, 8).pack([1, 1]))


@pytest.mark.parametrize("rank", [0, 2])
def test_all_ranks_refuse_a_rank_without_tokens(rank: int) -> None:
    """Otherwise that rank would fail inside a layer while the others wait for it."""
    with pytest.raises(ValueError, match=r"length=2: expected tokens for all 3 .* ranks \[1\] have none"):
        sequence_of(rank=rank, world=3, length=2).shard_batch({"tokens": torch.zeros(1, 2)})
