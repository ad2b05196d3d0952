"""Normalization layers for Megatron layer specs, on torch's own fused functions.

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


class RMSNorm(torch.nn.Module):
    """``x / rms(x) * weight`` over the last dimension.

    Args:
        config: the model's configuration; ``params_dtype`` and ``sequence_parallel`` are read from it.
        hidden_size: size of the last dimension of the input.
        eps: added to the mean square.

    Raises:
        ValueError: if the configuration asks for zero-centred gamma.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        _refuse_zero_centered_gamma(config)
        self.hidden_size = hidden_size
        self.eps = eps
        self.weight = _parameter(torch.ones, config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of shape [..., hidden_size] to the same shape and dtype; statistics in fp32."""
        if x.dtype == self.weight.dtype:
            return functional.rms_norm(x, (self.hidden_size,), self.weight, self.eps)
        # Mixed dtypes have no fused kernel: compute in fp32 and round once.
        return functional.rms_norm(x.float(), (self.hidden_size,), self.weight.float(), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """Size and epsilon for ``print(model)``."""
        return f"{self.hidden_size}, eps={self.eps}"


class LayerNorm(torch.nn.Module):
    """``(x - mean(x)) / std(x) * weight + bias`` over the last dimension.

    Args and errors as for ``RMSNorm``.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        _refuse_zero_centered_gamma(config)
        self.hidden_size = hidden_size
        self.eps = eps
        self.weight = _parameter(torch.ones, config, hidden_size)
        self.bias = _parameter(torch.zeros, config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of shape [..., hidden_size] to the same shape and dtype; statistics in fp32."""
        if x.dtype == self.weight.dtype:
            return functional.layer_norm(x, (self.hidden_size,), self.weight, self.bias, self.eps)
        weight, bias = self.weight.float(), self.bias.float()
        return functional.layer_norm(x.float(), (self.hidden_size,), weight, bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """Size and epsilon for ``print(model)``."""
        return f"{self.hidden_size}, eps={self.eps}"


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


def _parameter(fill: Any, config: TransformerConfig, hidden_size: int) -> torch.nn.Parameter:
    on_gpu = torch.cuda.is_available() and not config.use_cpu_initialization
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    parameter = torch.nn.Parameter(fill(hidden_size, dtype=config.params_dtype, device=device))
    # Read by Megatron's distributed/finalize_model_grads.py.
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


def _refuse_zero_centered_gamma(config: TransformerConfig) -> None:
    if config.layernorm_zero_centered_gamma:
        raise ValueError(
            "layernorm_zero_centered_gamma is True, expected False: the torch norms store gamma itself; "
            "set it to False, and add 1 to the norm weights of a checkpoint that was trained with it"
        )
