"""Which reductions are quantized: a policy for a group of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import check_value
from .crossover import Case, Crossover, crossover
from .peer_reduce import PeerReduction, peer_reduction
from .quantized import all_reduce, reduce_scatter, share_like

_BITS = {"int8": 8, "int6": 6, "int4": 4}
_AUTO_BITS = 8
# torch 2.13 gave it a new name, and warns of the old one.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class ReductionPolicy:
    """How tensors are summed over ranks.

    Args:
        mode: none; int8, int6 or int4 (`quantized.all_reduce`); or auto: int8 from the size on from which it was
            measured to be faster on this group, else none. Coarser integers are never chosen unasked.
        group_size: neighbours that share a range: 32, 64 or 128.
        symmetric: ranges around zero.
        min_kib: smaller tensors (KiB of one rank's) are never quantized.
        transport: over what quantized values travel: peer, collective, or auto; see `peer_reduction`.

    Raises:
        ValueError: a value that is not offered.
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
    """Sums over the ranks of one process group, by a policy. All ranks call the same with the same sizes.

    Args:
        group: the process group: NCCL for CUDA tensors, gloo for CPU tensors.
        policy: what is quantized.
        folder: where crossovers of `auto` are kept; None for the user's cache.

    Attributes:
        crossovers: what `auto` goes by, by operation and dtype, as far as it had to decide yet.
    """

    def __init__(self, group: dist.ProcessGroup, policy: ReductionPolicy, folder: Path | None = None) -> None:
        self.group, self.policy, self._folder = group, policy, folder
        self._alone = dist.get_world_size(group) == 1
        exact = policy.mode == "none" or self._alone
        self._least = float("inf") if exact else policy.min_kib * 1024
        self.crossovers: dict[tuple[str, torch.dtype], Crossover] = {}
        self._peers: dict[torch.device, PeerReduction | None] = {}

    def all_reduce(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        """The sum, of x's shape and dtype: in a new tensor, or, with `overwrite`, in x's memory where it is exact."""
        bits = self.bits("all_reduce", x)
        if bits is not None:
            return self._quantized("all_reduce", x, bits)
        return self._sum_in_place(x if overwrite else x.clone(memory_format=torch.contiguous_format))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's share, along the first dimension, of the sum: `[n * s, ...]` to `[s, ...]`."""
        bits = self.bits("reduce_scatter", x)
        return self._plain_share(x) if bits is None else self._quantized("reduce_scatter", x, bits)

    def bits(self, operation: str, x: Tensor) -> int | None:
        """What `operation` (all_reduce or reduce_scatter) of `x` is quantized to; None: it is not.

        With `auto` the first call for a dtype measures, if no file says, and logs what it found.
        """
        num_bytes = x.numel() * x.element_size()
        if num_bytes < self._least:
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
        kind = f"int{_AUTO_BITS} g{policy.group_size}{' symmetric' * policy.symmetric}{over}"
        case = Case.of(operation, self.group, x, kind)
        plain = self._sum_in_place if operation == "all_reduce" else self._plain_share
        ways = (plain, lambda tensor: self._quantized(operation, tensor, _AUTO_BITS))
        with torch.no_grad():
            return crossover(case, self.group, x.device, ways, self._folder)

    def _sum_in_place(self, x: Tensor) -> Tensor:
        out = x.contiguous()
        if not self._alone:
            dist.all_reduce(out, group=self.group)
        return out

    def _quantized(self, operation: str, x: Tensor, bits: int) -> Tensor:
        policy, peers = self.policy, self._peer_reduction(x.device)
        how: dict[str, Any] = {"bits": bits, "group_size": policy.group_size, "symmetric": policy.symmetric}
        if operation == "all_reduce":
            return all_reduce(x, self.group, **how) if peers is None else peers.all_reduce(x, **how)
        return reduce_scatter(x, self.group, **how) if peers is None else peers.reduce_scatter(x, **how)

    def _plain_share(self, x: Tensor) -> Tensor:
        out = share_like(x, dist.get_world_size(self.group))
        _reduce_scatter(out, x.contiguous(), group=self.group)
        return out

    def _peer_reduction(self, device: torch.device) -> PeerReduction | None:
        """Set up by all ranks together at the first sum that is quantized; shared by all reducers of a group."""
        if device not in self._peers:
            self._peers[device] = peer_reduction(self.policy.transport, self.group, device)
        return self._peers[device]
