"""Batches that Megatron slices: its layouts are accepted, and every other combination is refused by name."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.core_attention import OF_LAYOUT, ContextParallelCoreAttention
from megatron_longctx.mcore.experts import SummedLossRouter
from megatron_longctx.mcore.rope import ShardedRotaryEmbedding
from megatron_longctx.mcore.sequence import ShardedSequence
from megatron_longctx.mcore.spec import with_context_parallel
from megatron_longctx.mcore.version import mlp_spec
from megatron_longctx.testing.distributed import run_distributed
from tests.mcore.test_settings import OTHER
from tests.mcore.tiny_gpt import Layout, megatrons_share, model_config

LENGTH, VOCABULARY = 24, 64


def _sequence(rank: int = 0, world: int = 2, length: int | None = None, **options: Any) -> ShardedSequence:
    attention = ContextParallelAttention(kernel="reference", **options)
    attention.rank, attention.world = rank, world
    return ShardedSequence(attention, length)


def _thd(*padded: int, stops: tuple[int, ...] | None = None) -> PackedSeqParams:
    wide = torch.tensor(padded, dtype=torch.int32)
    sums = torch.tensor(stops or padded, dtype=torch.int32)
    return PackedSeqParams("thd", sums, sums, wide, wide)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shares_of_padded_packs_are_transformer_engines(world: int) -> None:
    padded, stops = (0, 12, 36, 48), (0, 7, 30, 30)  # the last document has padding alone
    for rank in range(world):
        pack = _sequence(rank, world, layout="per_document").pack_of(_thd(*padded, stops=stops))
        assert pack.tokens(torch.device("cpu")).tolist() == megatrons_share((12, 24, 12), rank, world)
        for causal in (True, False):
            assert pack.layout == _sequence(rank, world, layout="per_document").attention.layout(pack.mask(causal))


@pytest.mark.parametrize("schedule", ["zigzag", "all_gather", "ring", "double_ring"])
def test_queries_tell_the_length(schedule: str) -> None:
    sequence = _sequence(world=2, schedule=schedule, layout="per_document")
    assert sequence.megatron_slices and sequence.length is None
    for tokens in (6, 10):
        pack = sequence.pack_of(None, tokens)
        sequence.check_slices(pack, None)
        sequence.check_megatrons_rope(None)
        assert pack.length == 2 * tokens and pack is sequence.pack_of(None, tokens)
    with pytest.raises(ValueError, match="length=None: expected the number of tokens of a plain sequence"):
        _ = sequence.whole


@pytest.mark.parametrize("length", [None, 8])
@pytest.mark.parametrize(
    ("options", "params", "layout"),
    [
        ({"schedule": "ring"}, None, "contiguous"),
        ({"schedule": "striped"}, None, "striped"),
        ({"schedule": "ulysses"}, None, "contiguous"),
        ({"layout": "contiguous"}, None, "contiguous"),
        ({}, _thd(0, 4, 8), "balanced"),
        ({"layout": "balanced"}, _thd(0, 4, 8), "balanced"),
        ({"layout": "zigzag"}, _thd(0, 4, 8), "zigzag"),
    ],
)
def test_other_layouts_are_refused_where_megatron_slices(
    options: dict[str, Any], params: PackedSeqParams | None, layout: str, length: int | None
) -> None:
    """With learned positions or multi-latent attention; the numbers of tokens are those that Megatron would give."""
    sequence = _sequence(length=length, **options)
    expected = "zigzag or per_document, in which Megatron slices batches"
    if params is not None:
        expected = "per_document, in which Megatron slices packs"
    with pytest.raises(ValueError, match=f"layout={layout}: expected {expected}"):
        sequence.check_slices(sequence.pack_of(params, 4), params)
    pack = sequence.pack([4, 4])
    sequence.check_slices(pack, pack)
    sequence.shard_batch({"tokens": torch.zeros(1, 8)}, params)
    sequence.check_slices(sequence.pack_of(params, 4), params)


@pytest.mark.parametrize(("layout", "other"), [("zigzag", "per_document"), ("per_document", "zigzag")])
def test_packs_have_the_layout_of_megatrons_slices(layout: str, other: str) -> None:
    for name in (layout, other):
        sequence = ShardedSequence(_sequence(layout=name).attention, whole_packs=layout == "zigzag")
        for params in (None, _thd(0, 8)):  # one document has the same slices in both
            sequence.check_slices(sequence.pack_of(params, 4), params)
        params = _thd(0, 4, 8)
        if name == layout:
            sequence.check_slices(sequence.pack_of(params), params)
            continue
        with pytest.raises(ValueError, match=f"layout={other}: expected {layout}, in which Megatron slices packs"):
            sequence.check_slices(sequence.pack_of(params), params)


@pytest.mark.parametrize("length", [None, 8])
@pytest.mark.parametrize(
    ("options", "documents", "own", "words"),
    [
        ({"schedule": "ring"}, None, False, "layout=contiguous: expected zigzag or per_document with Megatron's own"),
        ({"layout": "striped"}, None, False, "layout=striped: expected zigzag or per_document with Megatron's own"),
        ({}, (4, 8), False, "layout=balanced: expected per_document with Megatron's own RoPE of packs"),
        ({"layout": "zigzag"}, (4, 8), False, "layout=zigzag: expected per_document with Megatron's own RoPE of packs"),
        ({"layout": "per_document"}, (4, 8), True, "rotary_pos_emb=Megatron's: expected ShardedRotaryEmbedding"),
    ],
)
def test_megatrons_rope_is_refused_in_other_layouts(
    options: dict[str, Any], documents: tuple[int, ...] | None, own: bool, words: str, length: int | None
) -> None:
    sequence = _sequence(length=length, **options)
    params = None if documents is None else sequence.pack([4, 4]) if own else _thd(0, *documents)
    sequence.shard_batch({"tokens": torch.zeros(1, 8)}, params)  # even then: the layout is another one than RoPE's
    with pytest.raises(ValueError, match=words):
        sequence.check_megatrons_rope(params)


def _config(world: int, **settings: Any) -> TransformerConfig:
    return model_config(Layout(context=world), **settings)


def _core(config: TransformerConfig, sequence: ShardedSequence) -> ContextParallelCoreAttention:
    return ContextParallelCoreAttention(
        sequence=sequence, config=config, layer_number=1, attn_mask_type=AttnMaskType.causal
    )


@pytest.mark.parametrize("name", OF_LAYOUT)
def test_settings_of_megatrons_layout_are_accepted_where_megatron_slices(name: str) -> None:
    config = _config(1)
    if name not in {field.name for field in dataclasses.fields(config)}:
        pytest.skip("another release of Megatron-Core has it")
    setattr(config, name, OTHER.get(name, True))
    _core(config, _sequence(world=1))
    with pytest.raises(ValueError, match=f"{name}="):
        _core(config, _sequence(world=1, length=8))


def test_megatrons_router_stays_where_ranks_have_its_shares() -> None:
    experts = get_gpt_layer_local_spec(num_experts=4)
    assert mlp_spec(with_context_parallel(experts, _sequence())).submodules.router is not SummedLossRouter
    assert mlp_spec(with_context_parallel(experts, _sequence(length=8))).submodules.router is SummedLossRouter


def _gpt(sequence: ShardedSequence, world: int, collection: Any, **settings: Any) -> GPTModel:
    config = _config(world, **settings)
    layer = with_context_parallel(get_gpt_layer_local_spec(normalization="RMSNorm"), sequence)
    mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False) if settings else None
    rope = {"position_embedding_type": "rope", "mtp_block_spec": mtp, "pg_collection": collection}
    return GPTModel(config, layer, VOCABULARY, LENGTH, **rope)


def _slice(x: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Megatron's `get_batch_on_this_cp_rank`."""
    pieces = x.chunk(2 * world, 1)
    return torch.cat((pieces[rank], pieces[2 * world - 1 - rank]), 1)


def _losses(rank: int) -> tuple[float, float]:
    """Return the loss of a plain model, and that of one that predicts two tokens, of batches that Megatron slices."""
    world, found = dist.get_world_size(), []
    text = torch.arange(LENGTH + 2)[None] ** 2 % VOCABULARY
    tokens, labels, positions = text[:, :-2], text[:, 1:-1], torch.arange(LENGTH)[None]
    for settings in ({}, {"mtp_num_layers": 1}):
        collection = groups.initialize(context=world, seed=7)
        sequence = ShardedSequence(ContextParallelAttention(collection.cp))
        gpt = _gpt(sequence, world, collection, **settings)
        mine, places, expected = (_slice(x, rank, world) for x in (tokens, positions, labels))
        losses = gpt(mine, places, None, labels=expected, loss_mask=torch.ones_like(expected))
        losses.sum().backward()
        total = torch.stack((losses.sum(), sum(p.grad.abs().sum() for p in gpt.embedding.parameters())))  # type: ignore[arg-type]
        dist.all_reduce(total)
        found.append(float(total[0]))
        if world > 1 and not settings:
            _check_refusals(gpt, rank, world, collection, (mine, places, expected))
            _check_other_batches(rank, world, collection)
        groups.destroy()
    return found[0], found[1]


def _check_refusals(gpt: GPTModel, rank: int, world: int, collection: Any, batch: tuple[torch.Tensor, ...]) -> None:
    """Megatron's own RoPE and slices, in another layout: refused at the first call, and right with our own RoPE."""
    tokens, places, labels = batch
    sequence = ShardedSequence(ContextParallelAttention(collection.cp, schedule="ring"), LENGTH)
    other = _gpt(sequence, world, collection)
    for _ in range(2):
        with pytest.raises(ValueError, match="layout=contiguous: expected zigzag or per_document with Megatron's own"):
            other(tokens, places, None, labels=labels)
        sequence.shard_batch({"tokens": torch.zeros(1, LENGTH)})
    other.rotary_pos_emb = ShardedRotaryEmbedding(other.rotary_pos_emb, sequence)
    other(tokens, places, None, labels=labels)


def _check_other_batches(rank: int, world: int, collection: Any) -> None:
    """Whether the caller shards batches here, or Megatron's parameters tell the documents."""
    for what in ("tokens", "documents"):
        sequence = ShardedSequence(ContextParallelAttention(collection.cp, layout="per_document"))
        core, params = _core(_config(world), sequence), None
        if what == "tokens":
            sequence.shard_batch({"tokens": torch.arange(LENGTH)[None].roll(rank)})
        else:
            params = _thd(0, 12 if rank else 6, LENGTH)
        q, k, v = torch.zeros(3, LENGTH // world, 1, core.config.num_attention_heads, core.config.kv_channels)
        with pytest.raises(ValueError, match=f"batch=other {what} on some ranks: expected one whole batch, equal on"):
            core(q, k, v, None, packed_seq_params=params)


def test_models_whose_batches_megatron_slices_equal_one_rank() -> None:
    plain, two = run_distributed(_losses, 1)[0]
    for world in (2, 3):
        assert run_distributed(_losses, world)[0] == pytest.approx((plain, two), rel=1e-5)
