"""Sums over a group of ranks that a policy quantizes or not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import check_value
from ..core.comm.collectives import reduce_scatter_single
from .crossover import Sum, Timings, timings
from .peer_reduce import PeerReduction, peer_reduction
from .quantized import all_reduce, reduce_scatter, shard_like

_BITS = {"int8": 8, "int6": 6, "int4": 4}
_FINE = 32
"""The group size with which `auto` considers int4: with 5 bits a value, perplexities are lower than with int6 in groups
of 128, which sends 6.25 bits on average (docs/reductions.md)."""


class SumFormat(NamedTuple):
    """The format in which values are sent: their bits (None: unquantized, over peer memory) and the group size."""

    bits: int | None
    group_size: int

    def __str__(self) -> str:
        return "exact over peers" if self.bits is None else f"int{self.bits} in groups of {self.group_size}"


@dataclass(frozen=True)
class ReductionPolicy:
    """How tensors are summed over ranks.

    Args:
        mode: none; int8, int6 or int4 (see `quantized.all_reduce`); or auto, the fastest on this group by size of exact
            sums (over peer memory as well), int8, and int4 in groups of 32.
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
        timings: what `auto` has measured or read so far, keyed by operation and dtype.
    """

    def __init__(self, group: dist.ProcessGroup, policy: ReductionPolicy, folder: Path | None = None) -> None:
        self.group, self.policy, self._folder = group, policy, folder
        self._alone = dist.get_world_size(group) == 1
        self._min_bytes = float("inf") if policy.mode == "none" or self._alone else policy.min_kib * 1024
        self.timings: dict[tuple[str, torch.dtype], Timings] = {}
        self._peers: dict[torch.device, PeerReduction | None] = {}
        self._chosen: dict[tuple[str, torch.dtype, int], SumFormat | None] = {}

    def all_reduce(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        """Return the sum, in a new tensor or, if `overwrite` is set, in x's memory."""
        form = self.format("all_reduce", x)
        if form is not None:
            return self._quantized("all_reduce", x, form, x if overwrite and x.is_contiguous() else None)
        return self._sum_in_place(x if overwrite else x.clone(memory_format=torch.contiguous_format))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's shard, along the first dimension, of the sum: `[n * s, ...]` to `[s, ...]`."""
        form = self.format("reduce_scatter", x)
        return self._exact_shard(x) if form is None else self._quantized("reduce_scatter", x, form)

    def format(self, operation: str, x: Tensor) -> SumFormat | None:
        """Return the format in which `operation` (all_reduce or reduce_scatter) sends `x`; None for the library's sum.

        With `auto`, the first call per operation and dtype measures the formats, unless a file has them, and logs it.
        """
        num_bytes = x.numel() * x.element_size()
        if num_bytes < self._min_bytes:
            return None
        if self.policy.mode != "auto":
            return SumFormat(_BITS[self.policy.mode], self.policy.group_size)
        key = operation, x.dtype, num_bytes
        if key not in self._chosen:
            self._chosen[key] = self._fastest(operation, x)
        return self._chosen[key]

    def _fastest(self, operation: str, x: Tensor) -> SumFormat | None:
        forms = [SumFormat(8, self.policy.group_size), SumFormat(4, _FINE)]
        over = " over peers" if self._peer_reduction(x.device) else ""
        if over:
            forms.insert(0, SumFormat(None, self.policy.group_size))
        key = operation, x.dtype
        if key not in self.timings:
            ways: dict[str, Sum] = {"exact": self._sum_in_place if operation == "all_reduce" else self._exact_shard}
            for form in forms:
                name = f"{form}{' symmetric' * self.policy.symmetric}{over}" if form.bits else str(form)
                ways[name] = partial(self._quantized, operation, form=form)
            with torch.no_grad():
                self.timings[key] = timings(operation, ways, self.group, x, self._folder)
        return (None, *forms)[self.timings[key].fastest(x.numel() * x.element_size())]

    def _sum_in_place(self, x: Tensor) -> Tensor:
        out = x.contiguous()
        if not self._alone:
            dist.all_reduce(out, group=self.group)
        return out

    def _quantized(self, operation: str, x: Tensor, form: SumFormat, out: Tensor | None = None) -> Tensor:
        reduce, peers = all_reduce if operation == "all_reduce" else reduce_scatter, self._peer_reduction(x.device)
        symmetric = self.policy.symmetric
        return reduce(
            x, self.group, bits=form.bits, group_size=form.group_size, symmetric=symmetric, out=out, peers=peers
        )

    def _exact_shard(self, x: Tensor) -> Tensor:
        out = shard_like(x, dist.get_world_size(self.group))
        reduce_scatter_single(out, x.contiguous(), group=self.group)
        return out

    def _peer_reduction(self, device: torch.device) -> PeerReduction | None:
        """Return the group's reduction over peer memory, which all ranks set up in their first quantized sum."""
        if device not in self._peers:
            self._peers[device] = peer_reduction(self.policy.transport, self.group, device)
        return self._peers[device]
