"""A rank's RoPE: Megatron's own rotation at the positions that the rank holds."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_longctx.mcore.rope import Rotation, ShardedRotaryEmbedding, rotate_torch
from megatron_longctx.models.rope_frequencies import Frequencies
from tests.shared.sequences import sequence_of


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
def test_tokens_rotate_as_in_megatron(schedule: str, world: int, length: int, unit: int) -> None:
    whole = torch.randn(length, 2, 3, 16, generator=torch.Generator().manual_seed(length))
    for variant in VARIANTS:
        original = _megatron(**variant)  # type: ignore[arg-type]
        table = original.get_emb(length)
        theirs = whole.clone().requires_grad_()
        expected = _apply_rotary_pos_emb_bshd(theirs, table, rotary_interleaved=variant.get("interleaved", False))
        expected.backward(whole.flip(0))
        rows = []
        for rank in range(world):
            sequence = sequence_of(rank, world, length, schedule, unit)
            rope = ShardedRotaryEmbedding(original, sequence)
            assert rope(length) is None, "Megatron's layers rotate nothing"
            positions = list(sequence.whole.layout.tokens(rank))
            ours = whole[positions].requires_grad_()
            rotated = sequence.rotation(sequence.whole)(ours)
            rotated.backward(whole.flip(0)[positions])
            torch.testing.assert_close(rotated, expected[positions], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours.grad, theirs.grad[positions], rtol=1e-5, atol=1e-5)
            rows += positions
        assert sorted(rows) == list(range(length))


def test_bf16_is_rounded_once() -> None:
    sequence = sequence_of(rank=0, world=1, length=64)
    ShardedRotaryEmbedding(_megatron(), sequence)
    rotation = sequence.rotation(sequence.whole)
    x = torch.randn(64, 1, 2, 16).bfloat16()
    assert torch.equal(rotation(x), rotation(x.float()).bfloat16())


def test_angles_are_exact_at_a_million_tokens() -> None:
    sequence = sequence_of(rank=1, world=2, length=2**20, schedule="ring")
    rope = ShardedRotaryEmbedding(_megatron(), sequence)
    exact = torch.outer(torch.arange(2**19, 2**20).double(), rope.inv_freq.double())
    torch.testing.assert_close(sequence.rotation(sequence.whole).sin.double(), exact.sin(), rtol=0, atol=1e-7)


def test_a_pack_rotates_by_positions_inside_documents() -> None:
    sequence = sequence_of(rank=0, world=2, length=8)
    rope = ShardedRotaryEmbedding(_megatron(), sequence)
    first = sequence.rotation(sequence.whole)
    pack = sequence.pack([3, 1, 2])
    rotation = sequence.rotation(pack)
    assert sequence.rotation(sequence.whole) is first and sequence.rotation(pack) is rotation, "computed once"
    inside = torch.tensor([0, 1, 2, 0, 0, 1])[pack.tokens(torch.device("cpu"))]
    assert torch.equal(rotation.cos, rope.rotations(inside).full.cos) and len(inside) == pack.num_local_tokens == 3
    assert torch.equal(pack.positions(torch.device("cpu")), inside)


def test_packs_used_for_inference_can_be_trained() -> None:
    sequence = sequence_of(length=4)
    ShardedRotaryEmbedding(_megatron(), sequence)
    for pack in (sequence.whole, sequence.pack([1, 2])):
        with torch.inference_mode():
            sequence.rotation(pack)
        x = torch.ones(pack.length, 1, 1, 16, requires_grad=True)
        sequence.rotation(pack)(x).sum().backward()
        assert x.grad is not None


def test_models_with_other_angles_cannot_share_a_sequence() -> None:
    sequence = sequence_of()
    ShardedRotaryEmbedding(_megatron(), sequence)
    ShardedRotaryEmbedding(_megatron(), sequence)
    for other in VARIANTS[1:]:
        with pytest.raises(ValueError, match="sequence=of a model with other RoPE angles: expected one of this"):
            ShardedRotaryEmbedding(_megatron(**other), sequence)  # type: ignore[arg-type]


def test_frequencies_of_layers_with_and_without_windows() -> None:
    sequence = sequence_of(rank=1, world=2, length=10)
    scaled, local = Frequencies(torch.rand(8), attention_factor=1.5), Frequencies(torch.rand(8))
    rope = ShardedRotaryEmbedding(_megatron(), sequence, scaled, local)
    positions = sequence.whole.positions(torch.device("cpu"))
    for window, found in (((None, None), scaled), ((3, 0), local)):
        rotation = sequence.rotation(sequence.whole, window)
        angles = torch.outer(positions.double(), found.inverse.double())
        torch.testing.assert_close(rotation.cos.double(), angles.cos() * found.attention_factor, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(rotation.sin.double(), angles.sin() * found.attention_factor, rtol=1e-7, atol=1e-7)
        assert rope.rotations(positions).of(window).cos.equal(rotation.cos)
    for other in ((scaled, scaled), (Frequencies(scaled.inverse), local)):
        with pytest.raises(ValueError, match="sequence=of a model with other RoPE angles"):
            ShardedRotaryEmbedding(_megatron(), sequence, *other)


def _rotations(variant: dict[str, object]) -> list[Rotation]:
    """Return rotations of more lengths than there are compiled kernels."""
    found = []
    for length in (12, 7, 1, 30, 31, 32, 33, 34):
        sequence = sequence_of(rank=0, world=1, length=length)
        ShardedRotaryEmbedding(_megatron(**variant), sequence)  # type: ignore[arg-type]
        found.append(sequence.rotation(sequence.whole))
    return found


def _check_both(cpu: Rotation, device: str) -> None:
    """Compare `rotate_both` of queries and keys, interleaved by group as in a fused projection, with each alone."""
    rotation = Rotation(cpu.cos.to(device), cpu.sin.to(device), cpu.interleaved)
    q, k, _ = torch.randn(len(cpu.cos), 1, 2, 5, 16, device=device).bfloat16().split((3, 1, 1), 3)
    for both, x in zip(rotation.rotate_both(q, k), (q, k), strict=True):
        assert both.is_contiguous() and both.shape == x.shape
        (alone,) = rotate_torch((x.flatten(2, 3),), rotation.cos, rotation.sin, rotation.interleaved, False)
        torch.testing.assert_close(both.flatten(2, 3), alone, rtol=0.01 * (device != "cpu"), atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_queries_and_keys_rotate_together_as_alone(variant: dict[str, object]) -> None:
    for rotation in _rotations(variant):
        _check_both(rotation, "cpu")


@pytest.mark.gpu
def test_queries_and_keys_rotate_together_as_alone_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    rotations = _rotations({})
    monkeypatch.undo()
    with torch.inference_mode():
        for rotation in rotations:
            _check_both(rotation, "cuda")
