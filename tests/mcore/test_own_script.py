"""Models of users' own Megatron scripts: sharded, they compute what Megatron's own attention does on one rank.

One has layers without RoPE, the others multi-latent attention (MLA).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.inference.batch import Batch
from megatron_longctx.inference.cache_manager import CacheManager
from megatron_longctx.inference.cached_attention import CachedAttention, CacheShape
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.inference import CachedGPT
from megatron_longctx.mcore.rope import ShardedRotaryEmbedding
from megatron_longctx.mcore.sequence import ShardedSequence
from megatron_longctx.mcore.spec import with_context_parallel
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.tolerances import relative_error
from tests.mcore.tiny_gpt import DenseAttention, Layout, model_config

VOCABULARY, DOCUMENTS = 64, (9, 14)
LENGTH, CPU = sum(DOCUMENTS), torch.device("cpu")
MLA: dict[str, dict[str, Any]] = {
    "rope": {"rope_type": "rope", "q_lora_rank": 20},
    "yarn": {"rope_type": "yarn", "q_lora_rank": None, "mscale": 0.7, "mscale_all_dim": 0.5},
}
KINDS = ("no_rope_freq", *MLA)


def _config(kind: str, context: int, **settings: Any) -> TransformerConfig:
    if kind == "no_rope_freq":
        return model_config(Layout(context=context), num_layers=3, no_rope_freq=[0, 1, 0], init_method_std=0.1)
    return MLATransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, kv_lora_rank=24, qk_head_dim=12,
        qk_pos_emb_head_dim=8, v_head_dim=16, add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0,
        context_parallel_size=context, use_cpu_initialization=True, init_method_std=0.1, bias_dropout_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, **MLA[kind], **settings,
    )  # fmt: skip


def _gpt(config: TransformerConfig, sequence: ShardedSequence | None, collection: Any) -> GPTModel:
    spec = get_gpt_layer_local_spec(multi_latent_attention=config.multi_latent_attention, normalization="RMSNorm")
    if sequence is None:
        spec.submodules.self_attention.submodules.core_attention = DenseAttention
    else:
        spec = with_context_parallel(spec, sequence)
    gpt = GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="rope", pg_collection=collection)
    if sequence is not None and not config.multi_latent_attention:
        gpt.rotary_pos_emb = ShardedRotaryEmbedding(gpt.rotary_pos_emb, sequence)
    return gpt


def _backward(gpt: GPTModel, parts: list[tuple[dict[str, Tensor], Any]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses of these batches with their packs, and the gradients of their sum."""
    gpt.zero_grad()
    losses = torch.cat(
        [gpt(x["tokens"], None, None, labels=x["labels"], packed_seq_params=pack) for x, pack in parts], 1
    )
    losses.sum().backward()
    return losses.detach(), {name: p.grad.clone() for name, p in gpt.named_parameters()}


def _batch() -> dict[str, Tensor]:
    text = torch.arange(LENGTH + 1)[None] ** 2 % VOCABULARY
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


@torch.no_grad()
def _logits(gpt: GPTModel) -> Tensor:
    return gpt(_batch()["tokens"], None, None)[0]


def _megatrons_own(rank: int, path: Path) -> None:
    found = {}
    for kind in KINDS:
        gpt = _gpt(_config(kind, 1), None, groups.initialize(seed=7))
        documents = zip(*(x.split(DOCUMENTS, 1) for x in _batch().values()), strict=True)
        apart = [({"tokens": tokens, "labels": labels}, None) for tokens, labels in documents]
        logits = _logits(gpt)
        found[kind] = gpt.state_dict(), logits, _backward(gpt, [(_batch(), None)]), _backward(gpt, apart)
        if kind == "no_rope_freq":
            gpt.decoder.layers[1].self_attention.config = model_config(Layout())
            assert (_logits(gpt) - logits).norm() > 0.02 * logits.norm(), "RoPE in that layer changes the logits"
        groups.destroy()
    torch.save(found, path)


def _ours(rank: int, path: Path) -> None:
    world = dist.get_world_size()
    for kind, (state, logits, *expected) in torch.load(path, weights_only=False).items():
        collection = groups.initialize(context=world, seed=7)
        sequence = ShardedSequence(ContextParallelAttention(collection.cp), LENGTH)
        gpt = _gpt(_config(kind, world), sequence, collection)
        gpt.load_state_dict(state)
        stops = torch.tensor([0, DOCUMENTS[0], LENGTH], dtype=torch.int32)
        theirs = PackedSeqParams("thd", stops, stops, max_seqlen_q=14, max_seqlen_kv=14)
        for packed, (losses, gradients) in (
            (None, expected[0]),
            (sequence.pack(DOCUMENTS), expected[1]),
            (theirs, expected[1]),
        ):
            found, grads = _backward(gpt, [(sequence.shard_batch(_batch(), packed), packed)])
            mine = sequence.pack_of(packed).tokens(CPU)
            torch.testing.assert_close(found, losses[:, mine], rtol=1e-5, atol=1e-5)
            for name, grad in grads.items():
                dist.all_reduce(grad)
                assert relative_error(grad, gradients[name]) < 1e-5, (kind, name)
        if kind == "no_rope_freq":
            _check_cache(gpt, rank, world, collection, logits)
        groups.destroy()


def _check_cache(gpt: GPTModel, rank: int, world: int, collection: Any, expected: Tensor) -> None:
    manager, shape = CacheManager(world, 8, 4), CacheShape(3, 4, 2, 8, torch.float32)
    attention = CachedAttention(collection.cp, shape, manager.slots[0], CPU)
    cached = CachedGPT(gpt, attention, VOCABULARY, None)
    turns = manager.append({manager.open(): LENGTH})
    attention.begin(Batch(world, manager.slots[0], turns), "pass_kv")
    mine = torch.tensor([position for span in turns[0].new_spans[rank] for position in span])
    logits = cached.logits(_batch()["tokens"][0, mine], mine, torch.arange(len(mine)))
    torch.testing.assert_close(logits, expected[mine], rtol=2e-5, atol=2e-5)


def test_losses_gradients_and_cached_logits_are_megatrons(tmp_path: Path) -> None:
    run_distributed(_megatrons_own, 1, tmp_path / "own")
    for world in (1, 2):
        run_distributed(_ours, world, tmp_path / "own")


def _refused(rank: int) -> None:
    collection = groups.initialize(seed=7)
    with pytest.raises(ValueError, match="cache_mla_latents=True: expected False"):
        _gpt(_config("rope", 1, cache_mla_latents=True), _sequence(), collection)
    sequence = _sequence()
    layer = _gpt(_config("rope", 1), sequence, collection).decoder.layers[0]
    with pytest.raises(ValueError, match="inference_context=given: expected None with MLA"):
        layer(torch.zeros(LENGTH, 1, 32), attention_mask=None, inference_context=object())
    with pytest.raises(ValueError, match="sequence=of a model with other RoPE angles"):
        _gpt(_config("rope", 1, rotary_base=77.0), sequence, collection)
    groups.destroy()


def _sequence() -> ShardedSequence:
    return ShardedSequence(ContextParallelAttention(), LENGTH)


def test_unsupported_uses_of_mla_are_refused() -> None:
    run_distributed(_refused, 1)
