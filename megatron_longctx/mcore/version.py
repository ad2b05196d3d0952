"""What differs between the releases of Megatron-Core that are served: 0.16.1 on Python 3.11, 0.19 from 3.12 on.

No other file asks for the release.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from megatron.core.transformer import ModuleSpec

RELEASE: tuple[int, int] = tuple(map(int, version("megatron-core").split(".")[:2]))  # type: ignore[assignment]
_NEW = RELEASE >= (0, 19)


SAVE_ARGUMENTS = {"async_strategy": "mcore"} if _NEW else {}
"""Of `dist_checkpointing.save`: 0.19 would take a package that may be missing where nobody waits for the save."""


def common_loader() -> tuple[Any, str]:
    """Whose attribute of which name reads `common.pt`, given its folder last: a strategy's method until 0.16."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common

    return (serialization, "load_common_state_dict") if _NEW else (common.TorchCommonLoadStrategy, "load_common")


def take_common(sharded: dict[str, Any]) -> dict[str, Any] | None:
    """What 0.19 would write as one of the sharded objects; 0.16 has written it into `common.pt`, which both read."""
    found = sharded.pop("common_state", None)
    return None if found is None else found.data


def complete_without_transformer_engine() -> None:
    """0.16's experts read a name that only TransformerEngine defines, and its MLA takes stand-ins for classes; 0.19 has
    None for both."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not _NEW and not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def norms_of_latents(config: Any, submodules: Any) -> dict[str, Any]:
    """Of 0.19 alone, which asks for it: the norms and projections of MLA.

    Queries without a latent keep the projection of the spec. 0.19 puts a norm of the layer's input before it, which
    0.16 and published models do not have.
    """
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    class Resolver(QKNormConfigResolver):  # type: ignore[misc]
        def _mla_fused_linear_or_default(self, spec: Any, name: str) -> Any:
            given = name == "linear_q_proj" and spec is not None
            return spec if given else super()._mla_fused_linear_or_default(spec, name)

    return Resolver(config, submodules).resolve()  # type: ignore[no-any-return]


@contextmanager
def groups_by_kind() -> Iterator[None]:
    """Optimizers load parameter groups by their kind alone: 0.19 also compares the rates, which a run may change."""
    from megatron.core.optimizer import distrib_optimizer, optimizer

    kept = optimizer.param_group_identifier_keys
    if _NEW:
        of_kind = tuple(key for key in kept if key not in ("max_lr", "min_lr"))
        optimizer.param_group_identifier_keys = distrib_optimizer.param_group_identifier_keys = of_kind
    try:
        yield
    finally:
        optimizer.param_group_identifier_keys = distrib_optimizer.param_group_identifier_keys = kept


def spec_of(builder: Any) -> Any:
    """What builds a part of a layer, as a spec of its class: 0.19 has a partial of the class, or of its own builder."""
    if not isinstance(builder, functools.partial):
        return builder
    params = dict(builder.keywords)
    submodules = params.pop("submodules", None)
    return ModuleSpec(module=getattr(builder.func, "__self__", builder.func), params=params, submodules=submodules)


def builder_of(spec: Any) -> Any:
    """The reverse of `spec_of`: 0.19 calls what builds an MLP with more than the class takes."""
    if not _NEW:
        return spec
    build = getattr(spec.module, "as_mlp_submodule", spec.module)
    return functools.partial(build, submodules=spec.submodules, **spec.params)


def copied(spec: Any) -> Any:
    """A copy of a spec whose submodules can be replaced. What these hold is not copied: process groups cannot be, and
    some things equal themselves alone."""
    spec = copy.copy(spec)
    spec.submodules = copy.copy(spec.submodules)
    return spec


def mlp_of(layer: ModuleSpec) -> Any:
    """The spec of a layer's MLP, if it has one."""
    return spec_of(getattr(layer.submodules, "mlp", None))
