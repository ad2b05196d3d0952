"""Megatron's GPT layer specs with our attention put in."""

from __future__ import annotations

import copy
import functools
import importlib

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from ..config import RecomputeConfig
from ..errors import refuse
from ..recompute import DeviceStore, HostStore
from .core_attention import ContextParallelCoreAttention
from .norms import norm_class
from .post_norm import with_post_norms
from .recompute import with_recompute
from .row_parallel import RowReductions, with_reductions
from .sequence import ShardedSequence
from .tiles import with_mlp_tiles

KEEP_ALL = RecomputeConfig()


def with_context_parallel(layer: ModuleSpec, sequence: ShardedSequence) -> ModuleSpec:
    """A copy of a transformer layer's spec whose self-attention computes context-parallel attention.

    Works on every spec with a `self_attention` submodule: Megatron's local and TransformerEngine layers and specs made
    from them.

    Raises:
        ValueError: a spec without self-attention, or of multi-latent attention.
    """
    attention = getattr(layer.submodules, "self_attention", None)
    if not isinstance(attention, ModuleSpec) or not hasattr(attention.submodules, "core_attention"):
        raise ValueError(f"layer spec of {layer.module}: expected a self_attention with a core_attention to replace.")
    if isinstance(attention.module, type) and issubclass(attention.module, MultiLatentAttention):
        expected, remedy = "a self_attention without latents", "Context-parallel attention does not serve MLA yet."
        raise refuse("self_attention", attention.module.__name__, expected, remedy)
    layer = copy.deepcopy(layer)
    layer.submodules.self_attention.submodules.core_attention = functools.partial(
        ContextParallelCoreAttention, sequence=sequence
    )
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
) -> TransformerBlockSubmodules:
    """The spec of this pipeline stage's layers: Megatron's own, local or TransformerEngine's, with our attention and,
    where `reductions` says so, our sums over tensor-parallel ranks.

    Args:
        recompute: the mode `layer` is `config`'s own business.
        post_norms: see `post_norm.PostNormAdd`.

    Raises:
        ValueError: TransformerEngine asked for and not importable.
    """
    if transformer_engine:
        require_transformer_engine()
        from megatron.core.extensions.transformer_engine import TENorm

        layer, final_norm = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm), TENorm
    else:
        layer, final_norm = (
            get_gpt_layer_local_spec(normalization=config.normalization),
            norm_class(config.normalization),
        )
        # Megatron's torch norms refuse sequence parallelism; ours take it.
        layer = copy.deepcopy(layer)
        layer.submodules.input_layernorm = final_norm
        layer.submodules.pre_mlp_layernorm = final_norm
        if config.qk_layernorm:
            inner = layer.submodules.self_attention.submodules
            inner.q_layernorm = inner.k_layernorm = final_norm
    layer = with_context_parallel(layer, sequence)
    if post_norms:
        layer = with_post_norms(layer, config, final_norm)
    if recompute.mlp_tile_tokens is not None:
        layer = with_mlp_tiles(layer, recompute.mlp_tile_tokens)
    if recompute.mode.startswith("attention_output"):
        layer = with_recompute(layer, HostStore() if recompute.mode.endswith("offload") else DeviceStore())
    layer = with_reductions(layer, reductions or RowReductions())
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=final_norm)
