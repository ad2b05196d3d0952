"""Megatron-LM: `--spec megatron_longctx.integrations.megatron_lm layer` trains on this attention.

Megatron slices batches and applies RoPE as always. For settings, name a file of your own instead:

    from megatron_longctx.integrations.megatron_lm import layer_spec
    layer = layer_spec(schedule="all_gather")
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_decoder_layer_specs
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from ..core.errors import refuse
from ..mcore.norms import NORMS
from ..mcore.sequence import ShardedSequence, shared_attention
from ..mcore.spec import with_context_parallel
from ..mcore.version import copy_spec

_Spec: TypeAlias = ModuleSpec | TransformerBlockSubmodules


def layer_spec(**options: Any) -> _Spec | Callable[..., _Spec]:
    """Return what `--spec` names: the spec of Megatron's own layers for the command line, with this attention.

    Megatron-LM 0.16 reads it while it builds the model, when groups exist, and gets a spec. 0.19 reads it earlier and
    gets a function, which it calls with the model's configuration.

    Args:
        options: of `ContextParallelAttention`. `layout` is Megatron's unless given, `deterministic` is
            `deterministic_mode`.

    Raises:
        ValueError: at the latest when the model is built: unknown options, or settings of Megatron-LM whose results
            would differ from those of its own attention.
    """
    args = _arguments()
    if args is not None and parallel_state.model_parallel_is_initialized():
        from megatron.training.arguments import core_transformer_config_from_args

        return _spec(core_transformer_config_from_args(args), None, options)

    def build(config: Any, vp_stage: int | None = None) -> _Spec:
        return _spec(getattr(config, "transformer", config), vp_stage, options)

    return build


def _spec(config: TransformerConfig, vp_stage: int | None, options: dict[str, Any]) -> _Spec:
    transformer_engine = config.transformer_impl == "transformer_engine"
    if config.heterogeneous_block_specs or config.transformer_impl not in ("transformer_engine", "local"):
        remedy = "Use with_context_parallel(spec, ShardedSequence(attention)) on the spec of such layers."
        kind = "heterogeneous" if config.heterogeneous_block_specs else config.transformer_impl
        raise refuse("layers", kind, "those of transformer_engine or local", remedy)
    settings: dict[str, Any] = {"normalization": config.normalization, "qk_l2_norm": config.qk_l2_norm}
    layers = get_gpt_decoder_layer_specs(config, transformer_engine, **settings, vp_stage=vp_stage)
    layout = _layout()
    options = {"layout": layout, "deterministic": config.deterministic_mode, **options}
    attention = shared_attention(parallel_state.get_context_parallel_group(), **options)
    sequence = ShardedSequence(attention, whole_packs=layout == "zigzag")
    norm = NORMS[config.normalization] if config.sequence_parallel and not transformer_engine else None
    if config.virtual_pipeline_model_parallel_size is not None and vp_stage is None:
        # One object serves all virtual stages, so it cannot list the layers of one.
        if any(each is not layers[0] for each in layers):
            remedy = "Use Megatron-LM 0.19, or no virtual stages."
            raise refuse("moe_layer_freq", config.moe_layer_freq, "equal layers with virtual stages", remedy)
        return with_context_parallel(layers[0] if norm is None else with_norms(layers[0], norm), sequence)
    block = get_gpt_decoder_block_spec(config, transformer_engine, **settings, vp_stage=vp_stage)
    if norm is not None:
        block = TransformerBlockSubmodules([with_norms(each, norm) for each in block.layer_specs], norm)
    return with_context_parallel(block, sequence)


def _arguments() -> Any:
    """Return Megatron-LM's arguments; None before it has them, and without Megatron-LM."""
    try:
        from megatron.training import get_args

        return get_args()
    except (ImportError, AssertionError):
        return None


def _layout() -> str:
    """Return the layout in which Megatron-LM slices packs; a plain sequence is in zigzag in both."""
    args = _arguments()
    if getattr(args, "reset_attention_mask", False):
        remedy = "Without it, documents see each other; to keep them apart, train on packs (--sft)."
        raise refuse("--reset-attention-mask", True, "False: its mask is ignored in causal layers", remedy)
    whole = getattr(args, "dataloader_inter_document_masking", False) and not getattr(args, "sft", False)
    return "zigzag" if whole else "per_document"


def with_norms(layer: ModuleSpec, norm: Any) -> ModuleSpec:
    """Return a copy of a local layer's spec with this norm, since Megatron's own refuses sequence parallelism."""
    layer = copy_spec(layer)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    layer.submodules.self_attention = attention = copy_spec(layer.submodules.self_attention)
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention.submodules, name, None) not in (None, IdentityOp, L2Norm):  # L2Norm has no weights
            setattr(attention.submodules, name, norm)
    return layer


layer = block = layer_spec()
