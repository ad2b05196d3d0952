"""Megatron's TransformerConfig and GPTModel, built from the project's configuration."""

import functools
import importlib.util
import logging
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch import Tensor
from torch.nn import functional

from ..config import LATENT_KEYS, RECURRENT_KEYS, Config, ModelConfig
from ..core.errors import refuse
from ..models.rope_frequencies import frequencies_of
from .experts import expert_settings
from .fp8 import fp8_settings
from .head import with_chunked_head
from .rope import ShardedRotaryEmbedding
from .row_parallel import RowReductions
from .sequence import ShardedSequence
from .spec import block_spec
from .version import require_hybrid_model

logger = logging.getLogger(__name__)

# Prefixes of `fingerprint` keys that may differ between a run and the checkpoint whose weights it starts from: no
# weight in use depends on them.
RETRAINABLE = ("rope_", "window_rope_base", "vocab_size")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": functional.silu,
    "gelu": functional.gelu,
    "geglu": functools.partial(functional.gelu, approximate="tanh"),
    "swiglu_oai": quick_gelu,
}
# gpt-oss's activation: x * sigmoid(1.702 x) * (y + 1), with x clamped to at most 7 and y to between -7 and 7.
_OAI = {"glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}
_SOFTMAX = {"none": "vanilla", "off_by_one": "off-by-one", "learnable": "learnable"}


def padded_vocab_size(model: ModelConfig, tokenizer_size: int) -> int:
    """Return the number of rows of the embedding: the model's own size, or the tokenizer's rounded up.

    It does not depend on the tensor-parallel size, so checkpoints load at any other.

    Raises:
        ValueError: the model has fewer entries than the tokenizer.
    """
    if model.vocab_size is None:
        return -(-tokenizer_size // model.vocab_multiple) * model.vocab_multiple
    if model.vocab_size < tokenizer_size:
        expected = f"at least the tokenizer's {tokenizer_size}"
        raise refuse("model.vocab_size", model.vocab_size, expected, "Raise it, or set it to null to use that size.")
    return model.vocab_size


def uses_transformer_engine(model: ModelConfig) -> bool:
    """Whether layers are TransformerEngine's; `auto` uses it if it is installed."""
    return model.implementation == "transformer_engine" or (
        model.implementation == "auto"
        and torch.cuda.is_available()
        and importlib.util.find_spec("transformer_engine") is not None
    )


def transformer_config(config: Config) -> TransformerConfig:
    """Return Megatron's configuration of the model and its parallelism, for `model.builder`.

    Fusions that need TransformerEngine or Apex are on if these are installed; on CPU all are off.
    """
    model = config.model
    kind = MLATransformerConfig if model.latent else TransformerConfig
    gpt = kind(**_layer_settings(model), **_run_settings(config), **expert_settings(config), **_latent_settings(config))
    if model.builder == "hybrid":
        require_hybrid_model()
        from .hybrid import as_hybrid

        return as_hybrid(gpt)
    return gpt


def _layer_settings(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's settings of the architecture."""
    same_names = (
        *("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size"),
        *("attention_output_gate", *(RECURRENT_KEYS if model.recurrent else ())),
    )
    return dict(
        **{name: getattr(model, name) for name in same_names},
        num_query_groups=model.num_kv_heads,
        normalization={"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[model.normalization],
        layernorm_epsilon=model.norm_epsilon,
        layernorm_zero_centered_gamma=model.zero_centered_norms,
        qk_layernorm=model.qk_norm,
        softmax_scale=model.attention_scale,
        gated_linear_unit=model.fc1_columns == 2,
        activation_func=_ACTIVATIONS[model.activation],
        add_bias_linear=model.bias,
        add_qkv_bias=model.bias or model.qkv_bias,
        init_method_std=model.init_std,
        window_size=None if model.window is None else (model.window, 0),
        window_attn_skip_freq=model.window_pattern,
        softmax_type=_SOFTMAX[model.sinks],
        linear_attention_freq=list(map("*GMK".index, model.mixers)) if model.recurrent else None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **(_OAI if model.activation == "swiglu_oai" else {}),
    )


def _run_settings(config: Config) -> dict[str, Any]:
    """Return Megatron's settings of precision, parallelism, fusions and recomputation."""
    model, par = config.model, config.parallelism
    cuda, bf16 = torch.cuda.is_available(), config.train.precision == "bf16"
    # Tiles of the MLP accumulate their gradients themselves.
    tiled = config.recompute.mlp_tile_tokens is not None
    fused_accumulation = cuda and not tiled and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    recompute: dict[str, Any] = {}
    if config.recompute.mode == "layer":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return dict(
        bf16=bf16,
        **dict.fromkeys(("params_dtype", "pipeline_dtype"), torch.bfloat16 if bf16 else torch.float32),
        tensor_model_parallel_size=par.tensor_parallel_size,
        pipeline_model_parallel_size=par.pipeline_parallel_size,
        context_parallel_size=par.context_parallel_size,
        sequence_parallel=par.uses_sequence_parallel,
        # Initialization on the CPU gives the same weights at every tensor-parallel size, but is slow for big models.
        use_cpu_initialization=not cuda,
        # Ranks may hold unequal numbers of tokens: gradients are summed and divided once by the number of tokens.
        calculate_per_token_loss=True,
        batch_p2p_comm=cuda,
        batch_p2p_sync=False,
        bias_activation_fusion=cuda and model.activation == "swiglu",
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        cross_entropy_loss_fusion=cuda and bf16,  # its gradients are bf16, whatever the logits' dtype
        cross_entropy_fusion_impl="native",
        gradient_accumulation_fusion=fused_accumulation,
        attention_softmax_in_fp32=True,
        deterministic_mode=False,
        **recompute,
        **fp8_settings(config.train),
    )


def _latent_settings(config: Config) -> dict[str, Any]:
    """Return Megatron's settings of MLA; none for other models.

    RoPE frequencies and the scale are our own, but only layers with `rope_type="yarn"` apply an attention factor.
    """
    model = config.model
    if not model.latent:
        return {}
    sizes = ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    return {name: getattr(model, name) for name in sizes} | {
        "rope_type": "yarn" if model.rope_scaling.kind == "yarn" else "rope",
        "rotary_scaling_factor": 1.0,
        # For a table that `LatentSelfAttention` replaces, and that Megatron divides in zigzag order.
        "original_max_position_embeddings": 2 * config.parallelism.context_parallel_size,
        "rotary_base": model.rope_base,
    }


def build_model(
    config: Config,
    megatron: TransformerConfig,
    groups: ProcessGroupCollection,
    sequence: ShardedSequence,
    vocab_size: int,
) -> LanguageModule:
    """Build this pipeline stage's part of the GPT, with context-parallel attention, and RoPE for its layout.

    megatron: the result of `transformer_config`.
    """
    model = config.model
    use_te = uses_transformer_engine(model)
    if torch.distributed.get_rank() == 0:
        logger.info("transformer layers: %s", "TransformerEngine" if use_te else "Megatron-Core (local)")
    chunk = config.recompute.head_chunk_tokens
    frequencies = frequencies_of(model)
    layers = block_spec(
        megatron,
        sequence,
        transformer_engine=use_te,
        recompute=config.recompute,
        reductions=RowReductions.of(config.reduction),
        post_norms=model.post_norms,
        latent_frequencies=frequencies[0],
    )
    if model.builder == "hybrid":
        from .hybrid import HybridGPT, pattern

        kind: type = HybridGPT
        layer_settings: dict[str, Any] = {"hybrid_stack_spec": layers, "hybrid_layer_pattern": pattern(megatron)}
    else:
        kind, layer_settings = GPTModel, {"transformer_layer_spec": layers}
    if chunk is not None:
        kind, layer_settings["chunk_tokens"] = with_chunked_head(kind), chunk
    gpt: LanguageModule = kind(
        config=megatron,
        **layer_settings,
        vocab_size=vocab_size,
        max_sequence_length=config.data.seq_length,
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type={"rope": "rope", "learned": "learned_absolute"}[model.position_embedding],
        rotary_base=model.rope_base,
        pg_collection=groups,
    )
    if use_te and config.recompute.mlp_tile_tokens is None:
        # TransformerEngine then accumulates weights' gradients in DDP's fp32 buffers. Megatron's one setting for it,
        # `gradient_accumulation_fusion`, includes the LM head, which needs Apex for that.
        for module in gpt.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
    if model.position_embedding == "rope" and not model.latent:
        gpt.rotary_pos_emb = ShardedRotaryEmbedding(gpt.rotary_pos_emb, sequence, *frequencies)
    if model.scale_embedding and gpt.pre_process:
        gpt.embedding.register_forward_hook(_scale_embedding)
    return gpt


def _scale_embedding(embedding: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Multiply the embedding as Gemma does, with the same rounding of the factor."""
    return output * torch.tensor(math.sqrt(output.shape[-1]), dtype=output.dtype)


def fingerprint(config: Config, vocab_size: int) -> dict[str, Any]:
    """Return the properties of a model that must equal those of a checkpoint it loads; no parallel sizes."""
    model = config.model
    # Included only if set, so that checkpoints written before these keys existed load.
    optional = (
        *("window", "window_pattern", "window_rope_base", "sinks", "qkv_bias"),
        *("zero_centered_norms", "qk_norm", "post_norms", "attention_scale", "scale_embedding"),
        "attention_output_gate",
    )
    special = {key: getattr(model, key) for key in optional}
    if model.latent:
        special |= {key: getattr(model, key) for key in LATENT_KEYS}
    if model.rotary_percent != 1:
        special["rotary_percent"] = model.rotary_percent
    if model.recurrent:
        special |= {"mixers": model.mixers, **{key: getattr(model, key) for key in RECURRENT_KEYS}}
    if model.rope_scaling.kind != "none":
        special["rope_scaling"] = asdict(model.rope_scaling)
    if model.num_moe_experts is not None:
        of_experts = (
            *("num_moe_experts", "moe_router_topk", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
            *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
        )
        special |= {key: getattr(model, key) for key in of_experts}
        special["moe_ffn_hidden_size"] = model.expert_width
        special["moe_layers"] = "".join(str(int(experts)) for experts in model.expert_layers)
    keys = (
        *("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "head_dim", "ffn_hidden_size"),
        *("vocab_size", "normalization", "activation", "position_embedding", "rope_base", "bias", "tie_embeddings"),
    )
    return {
        **{key: value for key, value in special.items() if value not in (None, "none", False)},
        **{key: getattr(model, key) for key in keys},
        **{"head_dim": model.kv_channels, "vocab_size": vocab_size},  # the configuration may leave them null
    }
