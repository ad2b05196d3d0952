"""Norms of what attention and the MLP give, before it is added to the residual: Gemma's layers have them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from megatron.core.transformer import MegatronModule, ModuleSpec, TransformerConfig
from torch import Tensor

Add = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class PostNormAdd(MegatronModule):  # type: ignore[misc]
    """Takes the place of Megatron's bias-dropout-add, which a layer calls with what it is to do; without dropout.

    Args:
        norm: its class.

    Attributes:
        norm: of `[s, b, h]`.
    """

    def __init__(self, config: TransformerConfig, norm: Any) -> None:
        super().__init__(config=config)
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Add:
        return self._add

    def _add(self, output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        x, bias = output
        return residual + self.norm(x if bias is None else x + bias)  # type: ignore[no-any-return]


def with_post_norms(layer: ModuleSpec, config: TransformerConfig, norm: type) -> ModuleSpec:
    """A copy of a transformer layer's spec with a norm behind attention and one behind the MLP."""
    layer = copy.copy(layer)
    layer.submodules = copy.copy(layer.submodules)
    for name in ("self_attn_bda", "mlp_bda"):
        setattr(layer.submodules, name, ModuleSpec(module=PostNormAdd, params={"config": config, "norm": norm}))
    return layer
