"""What `--spec` names, as far as it needs no Megatron-LM."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_longctx.integrations import megatron_lm
from megatron_longctx.mcore.core_attention import ContextParallelCoreAttention
from megatron_longctx.mcore.norms import RMSNorm
from tests.mcore.tiny_gpt import Layout, model_config


def _arguments(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    training = SimpleNamespace(get_args=lambda: SimpleNamespace(**arguments))
    monkeypatch.setitem(sys.modules, "megatron.training", training)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: None)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)


def _sequence(spec: Any) -> Any:
    layer = spec.layer_specs[0] if isinstance(spec, TransformerBlockSubmodules) else spec
    core = layer.submodules.self_attention.submodules.core_attention
    assert core.module is ContextParallelCoreAttention
    return core.params["sequence"]


def test_before_groups_exist_it_is_a_function_of_the_models_configuration() -> None:
    config = model_config(Layout(), transformer_impl="local", num_layers=3)
    for build in (megatron_lm.layer, megatron_lm.block):
        sequence = _sequence(build(SimpleNamespace(transformer=config), vp_stage=None))
        assert sequence.megatron_slices and sequence.attention is _sequence(build(config)).attention
        assert sequence.attention.layout(64).name == "per_document"
    other = _sequence(megatron_lm.layer_spec(schedule="all_gather", layout="zigzag")(config)).attention
    assert other.mode.name == "all_gather" and other.layout(64).name == "zigzag"
    with pytest.raises(ValueError, match="nonsense"):
        megatron_lm.layer_spec(schedule="nonsense")(config)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, []),
        ({"qk_layernorm": True}, ["q_layernorm", "k_layernorm"]),
        ({"qk_layernorm": True, "multi_latent_attention": True, "q_lora_rank": 8}, ["q_layernorm", "kv_layernorm"]),
        ({"qk_layernorm": True, "virtual_pipeline_model_parallel_size": 2}, ["q_layernorm", "k_layernorm"]),
    ],
)
def test_local_norms_support_sequence_parallelism(fields: dict[str, Any], names: list[str]) -> None:
    config = model_config(Layout(), transformer_impl="local")
    for name, value in {"tensor_model_parallel_size": 2, "sequence_parallel": True, **fields}.items():
        setattr(config, name, value)
    spec = megatron_lm.layer_spec()(config)
    layer = spec.layer_specs[0] if isinstance(spec, TransformerBlockSubmodules) else spec
    assert layer.submodules.input_layernorm is layer.submodules.pre_mlp_layernorm is RMSNorm
    inner = layer.submodules.self_attention.submodules
    assert all(getattr(inner, name) is RMSNorm for name in names)
    if not names:
        assert inner.q_layernorm is inner.k_layernorm is IdentityOp
        assert spec.layer_norm is RMSNorm
    assert get_gpt_layer_local_spec(normalization="RMSNorm").submodules.input_layernorm is not RMSNorm


def test_layers_of_other_kinds_are_refused() -> None:
    config = model_config(Layout(), transformer_impl="local")
    config.virtual_pipeline_model_parallel_size, config.num_moe_experts, config.moe_layer_freq = 2, 4, [0, 1]
    with pytest.raises(ValueError, match=r"moe_layer_freq=\[0, 1\]: expected equal layers with virtual stages"):
        megatron_lm.layer_spec()(config)  # as 0.16 calls it, without the number of a stage
    config.transformer_impl = "inference_optimized"
    with pytest.raises(ValueError, match="layers=inference_optimized: expected those of transformer_engine or local"):
        megatron_lm.layer_spec()(config)


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [
        ({}, "per_document"),
        ({"dataloader_inter_document_masking": True, "sft": False}, "zigzag"),
        ({"dataloader_inter_document_masking": True, "sft": True}, "per_document"),
    ],
)
def test_the_layout_is_that_of_megatrons_slices(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], layout: str
) -> None:
    _arguments(monkeypatch, **arguments)
    config = model_config(Layout(), transformer_impl="local")
    assert _sequence(megatron_lm.layer_spec()(config)).attention.layout(64).name == layout
    for chosen in ("zigzag", "per_document"):
        sequence = _sequence(megatron_lm.layer_spec(layout=chosen)(config))
        monkeypatch.setattr(sequence.attention, "world", 2)
        params = PackedSeqParams("thd", *[torch.tensor([0, 4, 8], dtype=torch.int32)] * 4)
        refusal = pytest.raises(ValueError, match=f"layout={chosen}: expected {layout}, in which Megatron slices packs")
        with nullcontext() if chosen == layout else refusal:
            sequence.check_slices(sequence.pack_of(params), params)


def test_masks_that_would_be_ignored_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _arguments(monkeypatch, reset_attention_mask=True)
    with pytest.raises(ValueError, match="--reset-attention-mask=True: expected False"):
        megatron_lm.layer_spec()(model_config(Layout(), transformer_impl="local"))
