"""Megatron-Bridge: the layer spec of a provider with context-parallel attention; for NeMo, verl and SkyRL, too.

    provider.transformer_layer_spec = longctx_layer_spec(provider.transformer_layer_spec)

Batches, RoPE, losses and checkpoints stay Bridge's own. It slices packs with TransformerEngine's
`thd_get_partitioned_indices`, which is the layout `per_document` here.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from ..core.errors import refuse
from ..mcore.core_attention import ContextParallelCoreAttention
from ..mcore.sequence import MEGATRONS_LAYOUTS, ShardedSequence, shared_attention
from ..mcore.spec import with_context_parallel

logger = logging.getLogger(__name__)

_PLAIN = ("DotProductAttention", "TEDotProductAttention")


def longctx_layer_spec(original: Any, layout: str = "per_document", **options: Any) -> Callable[..., Any]:
    """Return a provider's `transformer_layer_spec` or `hybrid_stack_spec` with context-parallel attention.

    Args:
        original: the provider's own: a spec of a layer, block or stack, or a function of the provider that returns it.
        layout: `per_document`, or `zigzag` for data that is never packed.
        options: other arguments of `ContextParallelAttention`, such as `schedule` (by default zigzag) and `kernel`.

    Raises:
        ValueError: a layout in which Megatron does not slice. The returned function refuses core attention other than
            Megatron's or TransformerEngine's own, which may compute something else, and `attention_backend=local`.
    """
    if layout not in MEGATRONS_LAYOUTS:
        expected = f"{' or '.join(MEGATRONS_LAYOUTS)}, in which Megatron slices batches"
        raise refuse("layout", layout, expected, "Leave it out.")
    if original is None:
        remedy = "Give the spec that the provider would take without it (hybrid: get_default_hybrid_stack_spec)."
        raise refuse("layer spec", None, "a spec, or a function that returns it", remedy)
    settings = {"schedule": "zigzag", "layout": layout, **options}

    @functools.cache
    def sequence_of(group: dist.ProcessGroup) -> ShardedSequence:
        return ShardedSequence(shared_attention(group, **settings))

    # Bridge looks for the name `vp_stage` among the parameters.
    def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
        if getattr(config, "attention_backend", None) == AttnBackend.local:
            remedy = "Leave it out: Bridge would put Megatron's own attention into the place of this one."
            raise refuse("attention_backend", "local", "another one with context-parallel attention", remedy)
        spec = _resolved(original, config, vp_stage)
        _check_cores(spec)
        groups = getattr(config, "_pg_collection", None)
        return with_context_parallel(
            spec, sequence_of(groups.cp if groups else parallel_state.get_context_parallel_group())
        )

    layer_spec.longctx = True  # type: ignore[attr-defined]
    return layer_spec


@functools.cache
def switch_providers() -> None:
    """Switch every provider whose model is built from now on in this process, and say so in the log.

    For programs that build the provider themselves (verl, SkyRL). A provider that has `longctx_layer_spec` already
    keeps it.

    Raises:
        ModuleNotFoundError: Megatron-Bridge is not installed.
    """
    from megatron.bridge.models.model_provider import ModelProviderMixin

    build = ModelProviderMixin.provide_distributed_model

    @functools.wraps(build)
    def switched(provider: Any, *args: Any, **kwargs: Any) -> Any:
        with _switched(provider):
            models = build(provider, *args, **kwargs)
        _check_built(type(provider).__name__, models)
        return models

    ModelProviderMixin.provide_distributed_model = switched
    logger.warning("every Megatron-Bridge model that this process builds from now on has megatron-longctx's attention")


@contextmanager
def _switched(provider: Any) -> Iterator[None]:
    """Give a provider another layer spec while it builds its model.

    Raises:
        ValueError: a provider without a layer spec.
    """
    names = [name for name in ("transformer_layer_spec", "hybrid_stack_spec") if hasattr(provider, name)]
    if not names:
        expected = "one with transformer_layer_spec or hybrid_stack_spec"
        raise refuse("provider", type(provider).__name__, expected, "Leave megatron-longctx out for this model.")
    own = {name: getattr(provider, name) for name in names}
    for name, spec in own.items():
        if spec is None and name == "hybrid_stack_spec":
            from megatron.bridge.models.hybrid.hybrid_provider import get_default_hybrid_stack_spec

            spec = get_default_hybrid_stack_spec
        if not getattr(spec, "longctx", False):
            setattr(provider, name, longctx_layer_spec(spec))
    try:
        yield
    finally:
        for name, spec in own.items():
            setattr(provider, name, spec)


def _check_built(provider: str, models: Sequence[Any]) -> None:
    """Refuse a model whose provider has ignored its layer spec."""
    cores = [part.core_attention for model in models for part in model.modules() if hasattr(part, "core_attention")]
    if cores and not any(isinstance(core, ContextParallelCoreAttention) for core in cores):
        expected = "one that builds its layers from its layer spec"
        raise refuse("provider", provider, expected, "Leave megatron-longctx out for this model.")


def _resolved(spec: Any, config: Any, vp_stage: int | None) -> Any:
    """Return the spec that a provider's field stands for, called as Bridge calls it."""
    if isinstance(spec, ModuleSpec | TransformerBlockSubmodules):
        return spec
    takes = inspect.signature(spec).parameters
    return spec(*([config] if takes else []), **({"vp_stage": vp_stage} if "vp_stage" in takes else {}))


def _check_cores(spec: Any) -> None:
    """Refuse layers whose own core attention would be replaced by one that computes something else."""
    parts = getattr(spec, "submodules", spec)
    layers = getattr(parts, "layer_specs", None) or [getattr(parts, "attention_layer", spec)]
    for layer in layers:
        attention = getattr(getattr(layer, "submodules", None), "self_attention", None)
        core = getattr(getattr(attention, "submodules", None), "core_attention", None)
        name = getattr(getattr(core, "module", core), "__name__", None)
        if name is not None and name not in _PLAIN:
            expected = f"{' or '.join(_PLAIN)}, which context-parallel attention replaces"
            raise refuse("core_attention", name, expected, "It may compute something else: keep it for this model.")
