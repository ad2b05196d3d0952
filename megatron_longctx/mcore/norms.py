"""torch's norms for Megatron layer specs.

Megatron's ``WrappedTorchNorm`` refuses sequence parallelism, so without TransformerEngine or Apex no norm of
Megatron's can be used with it. These two mark their parameters with ``sequence_parallel``: that is how Megatron's
gradient finalization knows to sum their gradients over the tensor-parallel ranks, each of which saw other tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class _MegatronNorm(torch.nn.Module):
    """Over the last dimension, of ``hidden_size``.

    Args:
        config: the model's configuration; ``params_dtype`` and ``sequence_parallel`` are read from it.
        eps: added to the mean square, or to the variance.

    Raises:
        ValueError: if the configuration asks for zero-centred gamma.
    """

    weight: torch.nn.Parameter

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        if config.layernorm_zero_centered_gamma:
            raise ValueError(
                "layernorm_zero_centered_gamma is True, expected False: the torch norms store gamma itself; "
                "set it to False, and add 1 to the norm weights of a checkpoint that was trained with it"
            )
        on_gpu = torch.cuda.is_available() and not config.use_cpu_initialization
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        super().__init__(hidden_size, eps, device=device, dtype=config.params_dtype)
        for parameter in self.parameters():  # read by Megatron's distributed/finalize_model_grads.py
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of shape [..., hidden_size] to the same shape and dtype; statistics in fp32."""
        if x.dtype == self.weight.dtype:
            return super().forward(x)  # type: ignore[no-any-return]
        # Mixed dtypes have no fused kernel: compute in fp32 and round once.
        in_fp32 = {name: parameter.float() for name, parameter in self.named_parameters()}
        found: torch.Tensor = torch.func.functional_call(self, in_fp32, x.float())
        return found.to(x.dtype)


class RMSNorm(_MegatronNorm, torch.nn.RMSNorm):
    """``x / rms(x) * weight``."""


class LayerNorm(_MegatronNorm, torch.nn.LayerNorm):
    """``(x - mean(x)) / std(x) * weight + bias``."""


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
