"""Kimi Delta Attention, as in Kimi Linear: gated delta nets with a decay for each channel of the key."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor
from torch.nn import functional

from . import delta_kernels
from .delta_net import GatedDeltaNet
from .recurrent import inverse_steps


class KimiDeltaAttention(GatedDeltaNet):
    """The delta rule with decays `[k]` in place of one; gates of the output pass a sigmoid.

    Decays and gates have projections of low rank: a value's size. The first factors are the same for all heads. Their
    rows are divided over the key heads of `linear_qkv`, and tensor-parallel ranks gather what these compute: so no
    weight is replicated. The second factors are `decay_up` and `gates_up`, whose rows are those of heads.
    """

    numbers = 1  # how strongly the state is corrected
    activation = "sigmoid"

    def _columns_of_gates(self) -> int:
        return int(2 * self._value // self._heads)

    def _initial_values(self, heads: int, bound: float) -> Mapping[str, Tensor]:
        sizes = {"decay_up": heads * self._key, "gates_up": heads * self._value}
        ups = {name: torch.empty(rows, self._value) for name, rows in sizes.items()}
        for weight in ups.values():
            self.config.init_method(weight)
        return {"decay_bias": inverse_steps(heads * self._key), **ups}

    def _gates_of(self, columns: Tensor) -> tuple[Tensor, ...]:
        low = tensor_parallel.all_gather_last_dim_from_tensor_parallel_region(columns.flatten(2), group=self.tp_group)
        decay, gates = low.unflatten(2, (self._heads, 2, -1)).unbind(3)
        return functional.linear(gates.flatten(2), self.gates_up), functional.linear(decay.flatten(2), self.decay_up)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, *numbers: Tensor, pack: Any, fast: bool) -> Tensor:
        beta, rates = numbers[0].float().sigmoid(), numbers[1].view(*v.shape[:3], self._key)
        log, bias = self.decay_log.float(), self.decay_bias.float()
        if fast:
            return delta_kernels.kimi_delta_rule(q, k, v, rates, beta, log, bias, pack, self._cp)
        g = -log.exp().unsqueeze(-1) * functional.softplus(rates.float() + bias.view(-1, self._key))
        return self._corrected(pack, q, k, v, g, beta)
