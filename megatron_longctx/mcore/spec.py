"""Megatron's GPT layer specs with our attention put in."""

from __future__ import annotations

import importlib

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from ..config import RecomputeConfig
from ..errors import refuse
from ..models.rope import Frequencies
from ..recompute import DeviceStore, HostStore
from .core_attention import ContextParallelCoreAttention
from .experts import experts_spec
from .latent import LatentSelfAttention
from .norms import norm_class, with_post_norms
from .recompute import with_recompute
from .row_parallel import RowReductions, with_reductions
from .sequence import ShardedSequence
from .tiles import with_mlp_tiles
from .version import copied

KEEP_ALL = RecomputeConfig()


def with_context_parallel(
    layer: ModuleSpec, sequence: ShardedSequence, latent_frequencies: Frequencies | None = None
) -> ModuleSpec:
    """A copy of a transformer layer's spec whose self-attention computes context-parallel attention.

    Works on every spec with a `self_attention` submodule: Megatron's local and TransformerEngine layers and specs made
    from them, with multi-latent attention (MLA), too.

    Args:
        latent_frequencies: how fast tokens turn in MLA; None: as Megatron's configuration says.

    Raises:
        ValueError: a spec without self-attention, or of MLA whose projections are fused.
    """
    attention = getattr(layer.submodules, "self_attention", None)
    if not isinstance(attention, ModuleSpec) or not hasattr(attention.submodules, "core_attention"):
        raise ValueError(f"layer spec of {layer.module}: expected a self_attention with a core_attention to replace.")
    layer, attention = copied(layer), copied(attention)
    layer.submodules.self_attention = attention
    if isinstance(attention.module, type) and issubclass(attention.module, MultiLatentAttention):
        if attention.module is not MLASelfAttention:
            raise refuse(
                "self_attention", attention.module.__name__, "MLASelfAttention", "Take Megatron's plain layer."
            )
        attention.module = LatentSelfAttention
        attention.params = {**attention.params, "sequence": sequence, "frequencies": latent_frequencies}
    core = ModuleSpec(module=ContextParallelCoreAttention, params={"sequence": sequence})
    attention.submodules.core_attention = core
    return layer


def require_transformer_engine() -> None:
    """Raise ValueError unless TransformerEngine can be imported."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a broken installation fails in other ways than ImportError
        raise ValueError(
            f"model.implementation: expected TransformerEngine to be usable ({error}). "
            "Repair it (the gpu extra), or set model.implementation=local."
        ) from error


def block_spec(
    config: TransformerConfig,
    sequence: ShardedSequence,
    *,
    transformer_engine: bool,
    recompute: RecomputeConfig = KEEP_ALL,
    reductions: RowReductions | None = None,
    post_norms: bool = False,
    latent_frequencies: Frequencies | None = None,
) -> TransformerBlockSubmodules:
    """The spec of this pipeline stage's layers: Megatron's own, local or TransformerEngine's, with our attention and,
    where `reductions` says so, our sums over tensor-parallel ranks.

    Args:
        recompute: the mode `layer` is `config`'s own business.
        post_norms: see `norms.PostNormAdd`.
        latent_frequencies: see `with_context_parallel`.

    Raises:
        ValueError: TransformerEngine asked for and not importable.
    """
    latent = config.multi_latent_attention
    if transformer_engine:
        require_transformer_engine()
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm, multi_latent_attention=latent
        )
        final_norm = TENorm
    else:
        layer, final_norm = (
            get_gpt_layer_local_spec(normalization=config.normalization, multi_latent_attention=latent),
            norm_class(config.normalization),
        )
        # Megatron's torch norms refuse sequence parallelism; ours take it.
        layer.submodules.input_layernorm = final_norm
        layer.submodules.pre_mlp_layernorm = final_norm
        if config.qk_layernorm:
            inner = layer.submodules.self_attention.submodules
            if not latent or config.q_lora_rank is not None:  # the norm is of the latent
                inner.q_layernorm = final_norm
            setattr(inner, "kv_layernorm" if latent else "k_layernorm", final_norm)
    layer = with_context_parallel(layer, sequence, latent_frequencies)
    if post_norms:
        layer = with_post_norms(layer, config, final_norm)
    if recompute.mlp_tile_tokens is not None:
        layer = with_mlp_tiles(layer, recompute.mlp_tile_tokens)
    if recompute.mode.startswith("attention_output"):
        layer = with_recompute(layer, HostStore() if recompute.mode.endswith("offload") else DeviceStore())
    layer = with_reductions(layer, reductions or RowReductions())
    layers = [layer] * get_num_layers_to_build(config)
    if config.num_moe_experts is not None:
        before = get_transformer_layer_offset(config)
        of_experts = _with_experts(layer, config.num_moe_experts, final_norm, transformer_engine)
        layers = [of_experts if config.moe_layer_freq[before + i] else layer for i in range(len(layers))]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm)


def _with_experts(layer: ModuleSpec, num_experts: int, norm: type, transformer_engine: bool) -> ModuleSpec:
    """A copy of a layer's spec whose MLP is a mixture of experts, with a norm of its own before it."""
    layer = copied(layer)
    layer.submodules.mlp = experts_spec(num_experts, transformer_engine)
    layer.submodules.pre_mlp_layernorm = norm
    # In checkpoints, that norm is not a part of the MLP's first product, as it is in TransformerEngine's dense layers.
    names = layer.submodules.sharded_state_dict_keys_map
    layer.submodules.sharded_state_dict_keys_map = {
        ours: theirs for ours, theirs in names.items() if not ours.startswith("pre_mlp")
    }
    return layer
