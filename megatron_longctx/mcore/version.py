"""Differences between the supported releases of Megatron-Core: 0.16.1 on Python 3.11, and 0.19 from Python 3.12 on.

No other file depends on the release.
"""

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from megatron.core.transformer import ModuleSpec

from ..core.errors import refuse

RELEASE: tuple[int, int] = tuple(map(int, version("megatron-core").split(".")[:2]))  # type: ignore[assignment]
_NEW = RELEASE >= (0, 19)

SAVE_ARGUMENTS = {"async_strategy": "mcore"} if _NEW else {}
"""Arguments of `dist_checkpointing.save`. By default, 0.19 saves asynchronously with a package that may be missing."""


def require_hybrid_model() -> None:
    """Raise ValueError unless this release has `HybridModel`."""
    if not _NEW:
        remedy = "Leave it, or install Megatron-Core 0.19, which needs Python 3.12; checkpoints are equal."
        raise refuse("model.builder", "hybrid", f"gpt with Megatron-Core {RELEASE[0]}.{RELEASE[1]}", remedy)


def common_state_loader() -> tuple[Any, str]:
    """Return the object (in 0.16 a strategy) and the name of its function that reads `common.pt`; the folder is its
    last argument."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common

    return (serialization, "load_common_state_dict") if _NEW else (common.TorchCommonLoadStrategy, "load_common")


def pop_common_state(sharded: dict[str, Any]) -> dict[str, Any] | None:
    """Remove and return the state that 0.19 would write as a sharded object, and that 0.16 writes into `common.pt`,
    which both read."""
    common = sharded.pop("common_state", None)
    return None if common is None else common.data


def complete_without_transformer_engine() -> None:
    """Let 0.16 run experts and MLA without TransformerEngine.

    Its experts read a name that only TransformerEngine defines, and its MLA mistakes placeholders for classes. 0.19 has
    None for both.
    """
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not _NEW and not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def norms_of_latents(config: Any, submodules: Any) -> dict[str, Any]:
    """Return the norms and projections of MLA; only 0.19 calls this.

    Queries without a latent keep the projection of the spec. By default, 0.19 puts a norm of the layer's input before
    it, which 0.16 and published models do not have.
    """
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    class Resolver(QKNormConfigResolver):  # type: ignore[misc]
        def _mla_fused_linear_or_default(self, spec: Any, name: str) -> Any:
            keep = name == "linear_q_proj" and spec is not None
            return spec if keep else super()._mla_fused_linear_or_default(spec, name)

    return Resolver(config, submodules).resolve()  # type: ignore[no-any-return]


@contextmanager
def match_groups_by_kind() -> Iterator[None]:
    """Let optimizers match a checkpoint's parameter groups by kind only: 0.19 also compares the rates, which a run may
    change."""
    from megatron.core.optimizer import distrib_optimizer, optimizer

    original = optimizer.param_group_identifier_keys
    if _NEW:
        without_rates = tuple(key for key in original if key not in ("max_lr", "min_lr"))
        optimizer.param_group_identifier_keys = distrib_optimizer.param_group_identifier_keys = without_rates
    try:
        yield
    finally:
        optimizer.param_group_identifier_keys = distrib_optimizer.param_group_identifier_keys = original


def as_spec(builder: Any) -> Any:
    """Return the spec of the class that builds a part of a layer.

    In 0.19 the builder is a partial of the class or of one of its methods.
    """
    if not isinstance(builder, functools.partial):
        return builder
    params = dict(builder.keywords)
    submodules = params.pop("submodules", None)
    return ModuleSpec(module=getattr(builder.func, "__self__", builder.func), params=params, submodules=submodules)


def as_builder(spec: Any) -> Any:
    """Return a spec as the builder that a layer calls: the reverse of `as_spec`.

    0.19 calls the builder of an MLP with more arguments than the class has.
    """
    if not _NEW:
        return spec
    build = getattr(spec.module, "as_mlp_submodule", spec.module)
    return functools.partial(build, submodules=spec.submodules, **spec.params)


def copy_spec(spec: Any) -> Any:
    """Return a copy of a spec whose submodules can be replaced.

    The submodules themselves are not copied: process groups cannot be copied, and some objects equal only themselves.
    """
    spec = copy.copy(spec)
    spec.submodules = copy.copy(spec.submodules)
    return spec


def mlp_spec(layer: ModuleSpec) -> Any:
    """Return the spec of a layer's MLP, or None."""
    return as_spec(getattr(layer.submodules, "mlp", None))
