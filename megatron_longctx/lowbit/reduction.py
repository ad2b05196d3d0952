"""Sums over a group of ranks that a policy quantizes or not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import check_value
from ..core.comm.collectives import reduce_scatter_single
from .crossover import Crossover, crossover
from .peer_reduce import PeerReduction, peer_reduction
from .quantized import all_reduce, reduce_scatter, shard_like

_BITS = {"int8": 8, "int6": 6, "int4": 4}
_AUTO_BITS = 8


@dataclass(frozen=True)
class ReductionPolicy:
    """How tensors are summed over ranks.

    Args:
        mode: none; int8, int6 or int4 (see `quantized.all_reduce`); or auto, which is int8 for sizes at which it was
            measured to be faster on this group, otherwise none. It never chooses coarser integers.
        group_size: 32, 64 or 128 neighbouring elements that share a range.
        symmetric: whether ranges are symmetric around zero.
        min_kib: smaller tensors (in KiB per rank) are never quantized.
        transport: of quantized values: peer, collective or auto; see `peer_reduction`.

    Raises:
        ValueError: another value.
    """

    mode: str = "none"
    group_size: int = 128
    symmetric: bool = False
    min_kib: float = 64.0
    transport: str = "auto"

    def __post_init__(self) -> None:
        check_value("reduction.output_projection", self.mode)
        for name in ("group_size", "symmetric", "min_kib", "transport"):
            check_value(f"reduction.{name}", getattr(self, name))


class Reducer:
    """Sums over the ranks of a process group by a policy. All ranks make the same calls with the same sizes.

    Args:
        group: NCCL for CUDA tensors, gloo for CPU tensors.
        folder: for the crossovers of `auto`; None for the user's cache.

    Attributes:
        crossovers: the crossovers that `auto` has needed so far, keyed by operation and dtype.
    """

    def __init__(self, group: dist.ProcessGroup, policy: ReductionPolicy, folder: Path | None = None) -> None:
        self.group, self.policy, self._folder = group, policy, folder
        self._alone = dist.get_world_size(group) == 1
        self._min_bytes = float("inf") if policy.mode == "none" or self._alone else policy.min_kib * 1024
        self.crossovers: dict[tuple[str, torch.dtype], Crossover] = {}
        self._peers: dict[torch.device, PeerReduction | None] = {}

    def all_reduce(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        """Return the sum in a new tensor, or in x's memory if it is exact and `overwrite` is set."""
        bits = self.bits("all_reduce", x)
        if bits is not None:
            return self._quantized("all_reduce", x, bits)
        return self._sum_in_place(x if overwrite else x.clone(memory_format=torch.contiguous_format))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's shard, along the first dimension, of the sum: `[n * s, ...]` to `[s, ...]`."""
        bits = self.bits("reduce_scatter", x)
        return self._exact_shard(x) if bits is None else self._quantized("reduce_scatter", x, bits)

    def bits(self, operation: str, x: Tensor) -> int | None:
        """Return the bits to which `operation` (all_reduce or reduce_scatter) quantizes `x`; None if it is exact.

        With `auto`, the first call per operation and dtype measures the crossover, unless a file has it, and logs it.
        """
        num_bytes = x.numel() * x.element_size()
        if num_bytes < self._min_bytes:
            return None
        if self.policy.mode != "auto":
            return _BITS[self.policy.mode]
        key = operation, x.dtype
        if key not in self.crossovers:
            self.crossovers[key] = self._crossover(operation, x)
        start = self.crossovers[key].from_bytes
        return None if start is None or num_bytes < start else _AUTO_BITS

    def _crossover(self, operation: str, x: Tensor) -> Crossover:
        policy = self.policy
        over = " over peers" if self._peer_reduction(x.device) else ""
        quantizer = f"int{_AUTO_BITS} g{policy.group_size}{' symmetric' * policy.symmetric}{over}"
        exact = self._sum_in_place if operation == "all_reduce" else self._exact_shard
        ways = (exact, lambda tensor: self._quantized(operation, tensor, _AUTO_BITS))
        with torch.no_grad():
            return crossover(operation, quantizer, self.group, x, ways, self._folder)

    def _sum_in_place(self, x: Tensor) -> Tensor:
        out = x.contiguous()
        if not self._alone:
            dist.all_reduce(out, group=self.group)
        return out

    def _quantized(self, operation: str, x: Tensor, bits: int) -> Tensor:
        policy, peers = self.policy, self._peer_reduction(x.device)
        reduce = all_reduce if operation == "all_reduce" else reduce_scatter
        return reduce(x, self.group, bits=bits, group_size=policy.group_size, symmetric=policy.symmetric, peers=peers)

    def _exact_shard(self, x: Tensor) -> Tensor:
        out = shard_like(x, dist.get_world_size(self.group))
        reduce_scatter_single(out, x.contiguous(), group=self.group)
        return out

    def _peer_reduction(self, device: torch.device) -> PeerReduction | None:
        """Return the group's reduction over peer memory, which all ranks set up in their first quantized sum."""
        if device not in self._peers:
            self._peers[device] = peer_reduction(self.policy.transport, self.group, device)
        return self._peers[device]
