"""RoPE of a rank: the rows of Megatron's own table at the positions that the rank holds."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_longctx.mcore.rope import ShardedRotaryEmbedding
from megatron_longctx.testing.sequences import sequence_of


@pytest.fixture(autouse=True)
def cpu_is_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def _megatron(
    interleaved: bool = False, interpolation: float | None = None, percent: float = 1.0, scaling: bool = False
) -> RotaryEmbedding:
    return RotaryEmbedding(
        kv_channels=16,
        rotary_percent=percent,
        rotary_interleaved=interleaved,
        seq_len_interpolation_factor=interpolation,
        rotary_base=1000,
        rope_scaling=scaling,
        use_cpu_initialization=True,
    )


VARIANTS = [
    {},
    {"interleaved": True},
    {"interpolation": 4.0},
    {"percent": 0.5},
    {"scaling": True},
    {"interleaved": True, "interpolation": 0.5, "percent": 0.5},
]


@pytest.mark.parametrize("schedule", ["ring", "zigzag", "all_gather"])
@pytest.mark.parametrize(("world", "length", "unit"), [(1, 12, 1), (2, 16, 1), (3, 101, 1), (8, 101, 1), (2, 100, 2)])
def test_rows_of_megatrons_table(schedule: str, world: int, length: int, unit: int) -> None:
    for variant in VARIANTS:
        original = _megatron(**variant)  # type: ignore[arg-type]
        for offset in (0, 7):
            table = original.get_emb(length, offset)
            rows = []
            for rank in range(world):
                sequence = sequence_of(rank, world, length, schedule, unit)
                ours = ShardedRotaryEmbedding(original, sequence)(length, offset)
                positions = list(sequence.layout.tokens(rank))
                assert torch.equal(ours, table[positions]), (variant, offset, rank)
                rows += positions
            assert sorted(rows) == list(range(length))


def test_literal_positions() -> None:
    rope = ShardedRotaryEmbedding(_megatron(), sequence_of(rank=1, world=2, length=10))
    # Pieces of 10 tokens: 0 1 | 2 3 4 | 5 6 | 7 8 9. The fastest angle is the position itself.
    assert rope(10)[:, 0, 0, 0].tolist() == [2, 3, 4, 5, 6]
    assert rope(10).shape == (5, 1, 1, 16) and rope(10).dtype == torch.float32


def test_the_table_follows_the_length() -> None:
    sequence = sequence_of(rank=0, world=2, length=8)
    rope = ShardedRotaryEmbedding(_megatron(), sequence)
    first = rope(8)
    assert rope(8) is first, "made once"
    assert rope(8, 3)[:, 0, 0, 0].tolist() == [3, 4, 9, 10] and rope(8) is first
    sequence.length = 4
    assert rope(4)[:, 0, 0, 0].tolist() == [0, 3]
    sequence.length = 8
    assert torch.equal(rope(8), first)
