"""Norms for Megatron layer specs: torch's, and norms behind attention and the MLP.

Megatron's `WrappedTorchNorm` refuses sequence parallelism, so without TransformerEngine or Apex none of Megatron's
norms supports it. The norms here mark their parameters with `sequence_parallel`, which tells Megatron's gradient
finalization to sum their gradients over the tensor-parallel ranks. Each has processed other tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import MegatronModule, ModuleSpec, TransformerConfig
from torch import Tensor
from torch.nn import functional

from .version import copy_spec


class _MegatronNorm(torch.nn.Module):
    """A norm over the last dimension, of `hidden_size`; `eps` is added to the mean square, or to the variance.

    config: `params_dtype`, `sequence_parallel` and `layernorm_zero_centered_gamma` (`weight` is stored minus 1) are
    read.
    """

    weight: torch.nn.Parameter

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        on_gpu = torch.cuda.is_available() and not config.use_cpu_initialization
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        super().__init__(hidden_size, eps, device=device, dtype=config.params_dtype)
        self._zero_centered = config.layernorm_zero_centered_gamma
        if self._zero_centered:
            torch.nn.init.zeros_(self.weight)
        for parameter in self.parameters():  # read by Megatron's distributed/finalize_model_grads.py
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` of shape [..., hidden_size], with statistics in fp32, to the same shape and dtype."""
        bias: Tensor | None = getattr(self, "bias", None)
        if x.dtype == self.weight.dtype and not self._zero_centered:
            return self._normalize(x, self.weight, bias)
        # Mixed dtypes have no fused kernel, and 1 + weight must not be rounded: compute in fp32 and round once.
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide) + (1 if self._zero_centered else 0)
        return self._normalize(x.to(wide), weight, None if bias is None else bias.to(wide)).to(x.dtype)

    def _normalize(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError


class RMSNorm(_MegatronNorm, torch.nn.RMSNorm):
    """`x / rms(x) * weight`."""

    @property
    def plain(self) -> tuple[Tensor, float] | None:
        """The weight and eps of a norm that uses its weight as it is stored; None for another."""
        return None if self._zero_centered or self.eps is None else (self.weight, self.eps)

    def _normalize(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, weight, self.eps)


class LayerNorm(_MegatronNorm, torch.nn.LayerNorm):
    """`(x - mean(x)) / std(x) * weight + bias`."""

    def _normalize(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


NORMS: dict[str, type[torch.nn.Module]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
"""Norms by Megatron's names."""


class PostNormAdd(MegatronModule):  # type: ignore[misc]
    """A norm of a layer part's output `[s, b, h]` before the residual is added, with the interface of bias-dropout-add.

    It has no dropout.
    """

    def __init__(self, config: TransformerConfig, norm: Any) -> None:
        super().__init__(config=config)
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """Return the function that Megatron's layer calls with (output, bias), the residual and the dropout."""
        return self._add

    def _add(self, output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        x, bias = output
        return residual + self.norm(x if bias is None else x + bias)  # type: ignore[no-any-return]


def with_post_norms(layer: ModuleSpec, config: TransformerConfig, norm: type) -> ModuleSpec:
    """Return a copy of a transformer layer's spec with a norm behind attention and one behind the MLP."""
    layer = copy_spec(layer)
    for name in ("self_attn_bda", "mlp_bda"):
        setattr(layer.submodules, name, ModuleSpec(module=PostNormAdd, params={"config": config, "norm": norm}))
    return layer
