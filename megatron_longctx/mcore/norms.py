"""torch's norms for Megatron layer specs.

Megatron's ``WrappedTorchNorm`` refuses sequence parallelism, so without TransformerEngine or Apex no norm of
Megatron's can be used with it. These two mark their parameters with ``sequence_parallel``: that is how Megatron's
gradient finalization knows to sum their gradients over the tensor-parallel ranks, each of which saw other tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class _MegatronNorm(torch.nn.Module):
    """Over the last dimension, of ``hidden_size``.

    Args:
        config: the model's configuration; ``params_dtype``, ``sequence_parallel`` and ``layernorm_zero_centered_gamma``
            (``weight`` is kept less 1) are read from it.
        eps: added to the mean square, or to the variance.
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of shape [..., hidden_size] to the same shape and dtype; statistics in fp32."""
        bias: torch.Tensor | None = getattr(self, "bias", None)
        if x.dtype == self.weight.dtype and not self._zero_centered:
            return self._of(x, self.weight, bias)
        # Mixed dtypes have no fused kernel, and 1 + weight must not be rounded: compute in fp32 and round once.
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide) + (1 if self._zero_centered else 0)
        return self._of(x.to(wide), weight, None if bias is None else bias.to(wide)).to(x.dtype)

    def _of(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError


class RMSNorm(_MegatronNorm, torch.nn.RMSNorm):
    """``x / rms(x) * weight``."""

    def _of(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.rms_norm(x, self.normalized_shape, weight, self.eps)


class LayerNorm(_MegatronNorm, torch.nn.LayerNorm):
    """``(x - mean(x)) / std(x) * weight + bias``."""

    def _of(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


_NORMS: dict[str, type[torch.nn.Module]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


def norm_class(normalization: str) -> type[torch.nn.Module]:
    """The norm called "RMSNorm" or "LayerNorm", in Megatron's spelling or in lower case.

    Raises:
        ValueError: for any other name.
    """
    norm = _NORMS.get(normalization.lower())
    if norm is None:
        raise ValueError(
            f"normalization is {normalization!r}, expected rmsnorm or layernorm: "
            "set the model's normalization to one of these"
        )
    return norm
