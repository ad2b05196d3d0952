"""Specs of Megatron's stacks: attention is replaced, and layers that cannot be right are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.spec_utils import build_module

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.experts import SummedLossRouter
from megatron_longctx.mcore.rope import ShardedRotaryEmbedding
from megatron_longctx.mcore.sequence import ShardedSequence
from megatron_longctx.mcore.spec import with_context_parallel
from megatron_longctx.mcore.stack import halves
from megatron_longctx.mcore.version import RELEASE, as_spec
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.tolerances import relative_error
from tests.mcore.tiny_gpt import DenseAttention

only_019 = pytest.mark.skipif(RELEASE < (0, 19), reason="HybridModel is new in Megatron-Core 0.19")
LENGTH, VOCABULARY = 30, 64
UNFUSED = dict.fromkeys(("bias_dropout_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion"), False)


def _sequence(group: Any = None) -> ShardedSequence:
    return ShardedSequence(ContextParallelAttention(group), LENGTH)


def _config(**settings: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=4, hidden_size=32, num_attention_heads=4, attention_dropout=0.0,
                             hidden_dropout=0.0, use_cpu_initialization=True, **settings)  # fmt: skip


@only_019
@pytest.mark.parametrize("layer", ["mamba_layer", "gdn_layer", "dsa_layer"])
def test_layers_without_this_attention_are_refused_when_they_are_built(layer: str) -> None:
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    stack = with_context_parallel(hybrid_stack_spec, _sequence())
    message = f"hybrid_layer_pattern={layer}: expected layers "
    for settings in ({}, {"is_hybrid_model": True}):
        with pytest.raises(ValueError, match=message):
            build_module(getattr(stack.submodules, layer), config=_config(**settings), layer_number=1)
    assert getattr(hybrid_stack_spec.submodules, layer).module is not getattr(stack.submodules, layer).module


@only_019
def test_a_stack_has_a_router_of_summed_losses_and_attention_of_every_kind() -> None:
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    stack = with_context_parallel(hybrid_stack_spec, _sequence()).submodules
    assert as_spec(stack.moe_layer.submodules.mlp).submodules.router is SummedLossRouter
    for layer in (stack.attention_layer, stack.mla_layer):
        assert layer.submodules.self_attention.submodules.core_attention.params["in_stack"]
    assert stack.mlp_layer is hybrid_stack_spec.submodules.mlp_layer


def _refuse_alone(rank: int) -> None:
    collection = groups.initialize(seed=3)
    layer = halves(with_context_parallel(get_gpt_layer_local_spec(), _sequence()))[0]
    with pytest.raises(ValueError, match=r"is_hybrid_model=True: .*the spec of the whole stack"):
        build_module(layer, config=_config(is_hybrid_model=True), layer_number=1, pg_collection=collection)
    groups.destroy()


def test_a_layer_alone_is_refused_in_a_hybrid_model() -> None:
    run_distributed(_refuse_alone, 1)


def _compare(rank: int) -> None:
    """Compare a script's own `HybridModel` on two ranks with Megatron's attention on one."""
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_longctx.mcore.hybrid import HybridOfBlocks

    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = DenseAttention
    parts = HybridStackSubmodules(**dict(zip(("attention_layer", "mlp_layer"), halves(layer), strict=True)))
    dense = ModuleSpec(HybridOfBlocks, params={"norm": layer.submodules.input_layernorm}, submodules=parts)
    text = torch.arange(LENGTH + 1)[None] ** 2 % VOCABULARY
    batch = {"tokens": text[:, :-1], "labels": text[:, 1:]}
    found = []
    for context in (1, 2):
        collection = groups.initialize(context=context, seed=3)
        config = _config(context_parallel_size=context, normalization="RMSNorm", is_hybrid_model=True, **UNFUSED)
        sequence = _sequence(collection.cp)
        model = HybridModel(
            config,
            with_context_parallel(dense, sequence) if context == 2 else dense,
            VOCABULARY,
            LENGTH,
            hybrid_layer_pattern="*-*-",
            position_embedding_type="rope",
            pg_collection=collection,
        )
        if context == 2:
            model.rotary_pos_emb = ShardedRotaryEmbedding(model.rotary_pos_emb, sequence)
        own = sequence.shard_batch(batch)
        losses = model(own["tokens"], None, None, labels=own["labels"])
        losses.sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        if context == 2:
            for gradient in gradients.values():
                torch.distributed.all_reduce(gradient)
        whole = torch.zeros(1, LENGTH).index_copy(1, sequence.whole.tokens(losses.device), losses.detach())
        if context == 2:
            torch.distributed.all_reduce(whole)
        found.append((whole, gradients))
        groups.destroy()
    (alone, expected), (losses, gradients) = found
    torch.testing.assert_close(losses, alone, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) < 1e-5, name


@only_019
def test_a_script_s_own_hybrid_model_computes_what_megatrons_attention_does() -> None:
    run_distributed(_compare, 2)
