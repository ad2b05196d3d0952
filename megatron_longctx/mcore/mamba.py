"""Mamba-2 layers, as in Bamba, Nemotron-H and Megatron's own `MambaMixer`.

Groups of heads share C and B, as value heads of a gated delta net share queries and keys. So the sizes of the state, of
heads and of groups are those of the `linear_*` fields: keys, values, and heads of each.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..models import delta_rule
from . import delta_kernels
from .recurrent import RecurrentMixer, inverse_steps


class Mamba2(RecurrentMixer):
    """A state space with a scalar decay, a skip connection, and a norm of each group after SiLU of the gates.

    Queries are C, keys B, and values x times the time step, from which the decay is computed as well.
    """

    numbers = 1  # the time step

    def _initial_values(self, heads: int, bound: float) -> Mapping[str, Tensor]:
        steps = inverse_steps(heads)
        return {
            "conv_bias": torch.empty(self._heads * self._mixed).uniform_(-bound, bound),
            "decay_bias": steps,
            "skip": torch.ones(heads),
            "norm_weight": torch.ones(heads * self._value),
        }

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, *numbers: Tensor, pack: Any, fast: bool) -> Tensor:
        steps = functional.softplus(numbers[0].float() + self.decay_bias.float())
        g = -self.decay_log.float().exp() * steps
        by_kernel = fast or (self.states is not None and self._uses_kernels(v))
        kernel = delta_kernels.state_space if by_kernel else delta_rule.chunked
        q, k = (x.repeat_interleave(self._shared, dim=2) for x in (q, k))
        out = self._recur(pack, kernel, q, k, (v * steps.unsqueeze(-1)).to(v.dtype), g)
        skipped: Tensor = self.skip.unsqueeze(-1) * v
        return out + skipped

    def _normed(self, out: Tensor, gates: Tensor, fast: bool) -> Tensor:
        wide = torch.promote_types(out.dtype, torch.float32)
        group = self._shared * self._value
        gated = (out.to(wide) * functional.silu(gates.to(wide))).reshape(*out.shape[:2], -1, group)
        normed = functional.rms_norm(gated, (group,), None, self.config.layernorm_epsilon)
        weighted: Tensor = normed.view(out.shape) * self.norm_weight.to(wide).view(out.shape[2:])
        return weighted.to(gates.dtype)
