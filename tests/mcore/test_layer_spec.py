"""Megatron's layer specs with our attention put in."""

from __future__ import annotations

import importlib.util

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_longctx.mcore.core_attention import ContextParallelCoreAttention
from megatron_longctx.mcore.norms import RMSNorm
from megatron_longctx.mcore.spec import block_spec, require_transformer_engine, with_context_parallel
from tests.shared.sequences import sequence_of


@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_the_local_spec_changes_in_one_place(qk_layernorm: bool) -> None:
    original = get_gpt_layer_local_spec(qk_layernorm=qk_layernorm)
    sequence = sequence_of()
    ours = with_context_parallel(original, sequence)
    replaced = ours.submodules.self_attention.submodules.core_attention
    assert replaced.module is ContextParallelCoreAttention
    assert replaced.params["sequence"] is sequence, "layers share one sequence, not copies of it"
    assert original.submodules.self_attention.submodules.core_attention is DotProductAttention, "a copy"
    ours.submodules.self_attention.submodules.core_attention = DotProductAttention
    assert ours == original


@pytest.mark.parametrize(
    "layer",
    [
        ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules()),
        ModuleSpec(module=IdentityOp),
        ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(self_attention=ModuleSpec(module=IdentityOp)),
        ),
    ],
)
def test_a_spec_without_self_attention(layer: ModuleSpec) -> None:
    with pytest.raises(ValueError, match=r"expected a self_attention with a core_attention to replace"):
        with_context_parallel(layer, sequence_of())


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="TransformerEngine is there")
def test_transformer_engine_must_be_there() -> None:
    with pytest.raises(ValueError, match=r"model.implementation: .*set model.implementation=local"):
        require_transformer_engine()
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    with pytest.raises(ValueError, match="TransformerEngine"):
        block_spec(config, sequence_of(), transformer_engine=True)


def test_norms_take_sequence_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_longctx.mcore.spec.get_num_layers_to_build", lambda config: 3)
    config = TransformerConfig(num_layers=3, hidden_size=32, num_attention_heads=4, normalization="RMSNorm")
    block = block_spec(config, sequence_of(), transformer_engine=False)
    assert len(block.layer_specs) == 3 and block.layer_norm is RMSNorm
    for layer in block.layer_specs:
        assert (layer.submodules.input_layernorm, layer.submodules.pre_mlp_layernorm) == (RMSNorm, RMSNorm)
