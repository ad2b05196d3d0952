"""Megatron's GPT layer specs with context-parallel attention."""

import importlib
from dataclasses import replace
from typing import TypeVar

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from ..config import RecomputeConfig
from ..core.errors import refuse
from ..models.rope_frequencies import Frequencies
from .core_attention import ContextParallelCoreAttention
from .delta_net import GatedDeltaNet
from .experts import experts_spec, with_summed_losses
from .kimi_delta import KimiDeltaAttention
from .mamba import Mamba2
from .norms import NORMS, with_post_norms
from .recompute import with_mlp_tiles, with_recompute
from .recurrent import with_mixer
from .rope import LatentSelfAttention, checking_rope
from .row_parallel import RowReductions, with_reductions
from .sequence import ShardedSequence
from .stack import is_stack, with_layers
from .stores import HostStore, Store
from .version import as_builder, copy_spec, mlp_spec

_MIXERS = {1: GatedDeltaNet, 2: Mamba2, 3: KimiDeltaAttention}  # keyed by the numbers of `linear_attention_freq`
_Spec = TypeVar("_Spec", ModuleSpec, TransformerBlockSubmodules)


def with_context_parallel(
    spec: _Spec, sequence: ShardedSequence, latent_frequencies: Frequencies | None = None
) -> _Spec:
    """Return a copy of a transformer layer's or block's spec whose self-attention computes context-parallel attention.

    The spec may also be of a stack (Megatron's `HybridModel`): its layers of attention change, and its Mamba and
    gated-delta-net layers are refused when they are built.

    Every spec with a `self_attention` submodule is supported: those of Megatron's local and TransformerEngine layers
    and specs derived from them, also with multi-latent attention (MLA). Megatron's router of experts becomes
    `experts.SummedLossRouter`, unless Megatron slices the batches, so that ranks have equal shares.

    Args:
        spec: of a layer, or of a block of layers as for models with experts.
        latent_frequencies: RoPE frequencies of MLA; None for those of Megatron's configuration.

    Raises:
        ValueError: a layer without self-attention, or of MLA with fused projections.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        layers = {id(each): with_context_parallel(each, sequence, latent_frequencies) for each in spec.layer_specs}
        return replace(spec, layer_specs=[layers[id(each)] for each in spec.layer_specs])
    if isinstance(spec.module, type) and issubclass(spec.module, TransformerBlock):
        block = copy_spec(spec)
        block.submodules = with_context_parallel(spec.submodules, sequence, latent_frequencies)
        return block
    if is_stack(spec):
        return with_layers(
            spec,
            lambda each: with_context_parallel(each, sequence, latent_frequencies),
            lambda each: _with_summed_losses(each, sequence),
        )
    return _layer_with_context_parallel(spec, sequence, latent_frequencies)


def _layer_with_context_parallel(
    layer: ModuleSpec, sequence: ShardedSequence, latent_frequencies: Frequencies | None
) -> ModuleSpec:
    attention = getattr(layer.submodules, "self_attention", None)
    if not isinstance(attention, ModuleSpec) or not hasattr(attention.submodules, "core_attention"):
        raise ValueError(f"layer spec of {layer.module}: expected a self_attention with a core_attention to replace.")
    layer, attention = copy_spec(layer), copy_spec(attention)
    layer.submodules.self_attention = attention
    if isinstance(attention.module, type) and issubclass(attention.module, MultiLatentAttention):
        if attention.module is not MLASelfAttention:
            remedy = "Use Megatron's plain layer."
            raise refuse("self_attention", attention.module.__name__, "MLASelfAttention", remedy)
        attention.module = LatentSelfAttention
        attention.params = {**attention.params, "sequence": sequence, "frequencies": latent_frequencies}
    elif isinstance(attention.module, type):
        attention.module = checking_rope(attention.module)
    attention.submodules.core_attention = ModuleSpec(ContextParallelCoreAttention, params={"sequence": sequence})
    return _with_summed_losses(layer, sequence)


def _with_summed_losses(layer: ModuleSpec, sequence: ShardedSequence) -> ModuleSpec:
    """Return a layer's spec with `experts.SummedLossRouter`, if it has experts; the spec itself is not changed."""
    mlp = mlp_spec(layer)
    if not sequence.megatron_slices and (summed := with_summed_losses(mlp)) is not mlp:
        layer = copy_spec(layer)
        layer.submodules.mlp = as_builder(summed)
    return layer


def require_transformer_engine() -> None:
    """Raise ValueError unless TransformerEngine can be imported."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a broken installation fails in other ways than ImportError
        raise ValueError(
            f"model.implementation: expected a working TransformerEngine ({error}). "
            "Repair it (the gpu extra), or set model.implementation=local."
        ) from error


def block_spec(
    config: TransformerConfig,
    sequence: ShardedSequence,
    *,
    transformer_engine: bool,
    recompute: RecomputeConfig | None = None,
    reductions: RowReductions | None = None,
    post_norms: bool = False,
    latent_frequencies: Frequencies | None = None,
) -> TransformerBlockSubmodules | ModuleSpec:
    """Return the spec of this pipeline stage's layers, or of a hybrid model's stack, with context-parallel attention.

    Args:
        recompute: what layers store for backward; the mode `layer` is part of `config` instead.
        reductions: sums over tensor-parallel ranks (see `row_parallel.with_reductions`).
        post_norms: whether layers have norms behind attention and MLP (see `norms.PostNormAdd`).
        latent_frequencies: see `with_context_parallel`.

    Raises:
        ValueError: TransformerEngine was requested and cannot be imported.
    """
    recompute = recompute or RecomputeConfig()
    latent = config.multi_latent_attention
    if transformer_engine:
        require_transformer_engine()
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm, multi_latent_attention=latent
        )
        final_norm = TENorm
    else:
        layer = get_gpt_layer_local_spec(normalization=config.normalization, multi_latent_attention=latent)
        final_norm = NORMS[config.normalization]
        # Megatron's torch norms refuse sequence parallelism; these support it.
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = final_norm
        if config.qk_layernorm:
            inner = layer.submodules.self_attention.submodules
            if not latent or config.q_lora_rank is not None:  # MLA's norm is of the latent
                inner.q_layernorm = final_norm
            setattr(inner, "kv_layernorm" if latent else "k_layernorm", final_norm)
    layer = with_context_parallel(layer, sequence, latent_frequencies)
    if post_norms:
        layer = with_post_norms(layer, config, final_norm)
    if recompute.mlp_tile_tokens is not None:
        layer = with_mlp_tiles(layer, recompute.mlp_tile_tokens)
    if recompute.mode.startswith("attention_output"):
        store = HostStore if recompute.mode.endswith("offload") else Store
        layer = with_recompute(layer, store(recompute.kept_results))
    layer = with_reductions(layer, reductions or RowReductions())
    experts = config.num_moe_experts
    expert_layer = None if experts is None else _with_experts(layer, experts, final_norm, transformer_engine)
    if config.is_hybrid_model:
        from .hybrid import stack_spec  # needs Megatron-Core 0.19

        return stack_spec(layer, expert_layer, final_norm, _recurrent(config, layer, sequence))
    layers = _layers_of_stage(config, sequence, layer, expert_layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm)


def _layers_of_stage(
    config: TransformerConfig, sequence: ShardedSequence, layer: ModuleSpec, expert_layer: ModuleSpec | None
) -> list[ModuleSpec]:
    """Return the layers of this pipeline stage: dense or with experts, with attention or recurrent."""
    count, recurrent = get_num_layers_to_build(config), config.linear_attention_freq
    if expert_layer is None and not recurrent:
        return [layer] * count
    first = get_transformer_layer_offset(config)
    numbers = range(first, first + count)
    layers = [layer if expert_layer is None or not config.moe_layer_freq[i] else expert_layer for i in numbers]
    return [
        _recurrent(config, each, sequence) if recurrent and recurrent[i] else each
        for i, each in zip(numbers, layers, strict=True)
    ]


def _recurrent(config: TransformerConfig, layer: ModuleSpec, sequence: ShardedSequence) -> ModuleSpec:
    """Return a copy of a layer's spec with the model's kind of recurrent layer in the place of attention."""
    return with_mixer(layer, _MIXERS[max(config.linear_attention_freq or [1])], sequence)


def _with_experts(layer: ModuleSpec, num_experts: int, norm: type, transformer_engine: bool) -> ModuleSpec:
    """Return a copy of a layer's spec whose MLP is a mixture of experts, with a separate norm before it."""
    layer = copy_spec(layer)
    layer.submodules.mlp = experts_spec(num_experts, transformer_engine)
    layer.submodules.pre_mlp_layernorm = norm
    # In checkpoints of TransformerEngine's dense layers, that norm is part of the MLP's first product; here it is not.
    names = layer.submodules.sharded_state_dict_keys_map
    layer.submodules.sharded_state_dict_keys_map = {
        name: stored for name, stored in names.items() if not name.startswith("pre_mlp")
    }
    return layer
