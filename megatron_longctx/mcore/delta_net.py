"""Gated delta nets, as in Qwen3-Next and Megatron's own `GatedDeltaNet`."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from megatron.core import tensor_parallel
from torch import Tensor
from torch.nn import functional

from ..models import delta_rule
from . import delta_kernels
from .recurrent import RecurrentMixer


class GatedDeltaNet(RecurrentMixer):
    """The delta rule with normalized queries and keys; outputs are normed, then multiplied by SiLU of the gates."""

    numbers = 2  # how strongly the state is corrected, and its decay
    activation: ClassVar[str] = "silu"  # of the gates

    def _add_parameters(self, config: Any) -> None:
        super()._add_parameters(config)
        self.norm_weight = torch.nn.Parameter(self.decay_log.new_ones(self._value))

    def _initial_values(self, heads: int, bound: float) -> Mapping[str, Tensor]:
        return {"decay_bias": torch.ones(heads)}

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, *numbers: Tensor, pack: Any, fast: bool) -> Tensor:
        beta, rate = numbers[0].float().sigmoid(), functional.softplus(numbers[1].float() + self.decay_bias.float())
        g = -self.decay_log.float().exp() * rate
        if fast:
            q, k, g, beta = (x.contiguous() for x in (q, k, g, beta))
            return delta_kernels.gated_delta_rule(q, k, v, g, beta, pack, self._cp)
        return self._corrected(pack, q, k, v, g, beta)

    def _corrected(self, pack: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Compute the delta rule over all ranks. q, k: of key heads; g: of the logarithms of decays."""
        by_kernel = self.states is not None and self._uses_kernels(v)
        kernel = delta_kernels.chunked if by_kernel else delta_rule.chunked
        q, k = _normalized(q, q.shape[-1] ** -0.5), _normalized(k)
        q, k = (x.repeat_interleave(self._shared, dim=2) for x in (q, k))
        return self._recur(pack, kernel, q, k, v, g, beta)

    def _normed(self, out: Tensor, gates: Tensor, fast: bool) -> Tensor:
        # Tensor-parallel ranks share the weight, and their heads' gradients are summed here.
        weight: Tensor = tensor_parallel.copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        epsilon = self.config.layernorm_epsilon
        if fast:
            return delta_kernels.gated_norm(out, gates, weight, epsilon, self.activation)
        wide = torch.promote_types(out.dtype, torch.float32)
        normed = functional.rms_norm(out.to(wide), out.shape[-1:], weight.to(wide), epsilon)
        return (normed * getattr(functional, self.activation)(gates.to(wide))).to(gates.dtype)  # type: ignore[no-any-return]


def _normalized(x: Tensor, length: float = 1.0) -> Tensor:
    """Return vectors of this length, as Qwen3-Next does: computed in fp32 or wider, with 1e-6 under the root."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * ((wide.square().sum(-1, keepdim=True) + 1e-6) * length**-2).rsqrt()).to(x.dtype)
