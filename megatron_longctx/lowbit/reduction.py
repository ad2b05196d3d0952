"""Sums over a group of ranks that a policy quantizes or not, and how long exact and low-bit sums take by size: measured
once and stored in a file."""

import datetime
import json
import logging
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import check_value, files
from ..core.cache import cache_folder
from ..core.comm.collectives import gather_objects, reduce_scatter_single
from ..core.comm.device import mean_seconds
from .quantized import PeerReduction, all_reduce, peer_reduction, reduce_scatter, shard_like

logger = logging.getLogger(__name__)

_VERSION = 5
_SIZES = [4**k * 1024 for k in range(2, 9)]  # bytes: 16 KiB to 64 MiB
_MARGIN = 0.95
"""A way with a larger error counts as faster below this fraction of the time: noise does not justify an error."""
_ROUNDS = 6
_MAX_S = 0.2
"""If a call takes longer, no more rounds or larger sizes are measured."""
_CALLS = 16
"""The calls of a row on a GPU, so that waiting for the device once does not count. Time is the wall clock's: prompts
wait for the host as well."""
_BITS = {"int8": 8, "int6": 6, "int4": 4}
_FINE = 32
"""The group size with which `auto` considers int4: with 5 bits a value, perplexities are lower than with int6 in groups
of 128, which sends 6.25 bits on average (docs/reductions.md)."""

Sum = Callable[[Tensor], object]


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


@dataclass(frozen=True)
class Timings:
    """How long the ways to sum take.

    Attributes:
        ways: their names, in ascending order of their errors.
        samples: bytes of a rank's tensor, in ascending order, and the seconds of every way on the slowest rank.
    """

    ways: tuple[str, ...]
    samples: tuple[tuple[int, tuple[float, ...]], ...]

    def fastest(self, num_bytes: int) -> int:
        """Return the number of the fastest way for this size; between samples, seconds grow linearly with the bytes."""
        larger = next((i for i, (size, _) in enumerate(self.samples) if size >= num_bytes), len(self.samples) - 1)
        (low, before), (high, after) = self.samples[max(0, larger - 1)], self.samples[larger]
        share = min(1.0, max(0.0, (num_bytes - low) / (high - low))) if high > low else 1.0
        seconds = [a + (b - a) * share for a, b in zip(before, after, strict=True)]
        best = 0
        for way in range(1, len(seconds)):
            if seconds[way] < seconds[best] * _MARGIN:
                best = way
        return best

    def __str__(self) -> str:
        chosen = [(size, self.ways[self.fastest(size)]) for size, _ in self.samples]
        changes = [each for i, each in enumerate(chosen) if not i or each[1] != chosen[i - 1][1]]
        return ", ".join(f"{way} from {size / 2**20:g} MiB" for size, way in changes)


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


def timings(
    operation: str, ways: Mapping[str, Sum], group: dist.ProcessGroup, x: Tensor, folder: Path | None
) -> Timings:
    """Return how long `ways`, in ascending order of their errors, take for tensors like `x`. Collective.

    They are read from the first rank's file, or measured and stored there. A file that cannot be read is measured
    again; if it cannot be written, a warning is logged.
    """
    hosts = gather_objects(group, socket.gethostname())
    case = {
        "operation": operation,
        "device": torch.cuda.get_device_name(x.device) if x.is_cuda else "cpu",
        "backend": dist.get_backend(group),
        "ranks": len(hosts),
        "hosts": len(set(hosts)),
        "dtype": str(x.dtype).split(".")[-1],
        "ways": " or ".join(ways),
    }
    path, first = _path(case, folder), dist.get_rank(group) == 0
    stored = gather_objects(group, _load(path) if first else None)[0]
    result = stored or _measure(x.dtype, group, x.device, ways)
    if first and stored is None:
        _save(result, case, path)
    if first:
        source = "measured now" if stored is None else path
        logger.info("%s of %s on %d ranks: %s; %s", operation, case["dtype"], len(hosts), result, source)
    return result


def _path(case: dict[str, Any], folder: Path | None) -> Path:
    name = re.sub(r"[^A-Za-z0-9]+", "-", "-".join(map(str, case.values()))).strip("-")
    return (folder or cache_folder()) / f"crossover-{name}.json"


def _measure(dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device, ways: Mapping[str, Sum]) -> Timings:
    """Time all ways at increasing sizes, until the slowest rank takes longer than `_MAX_S`."""
    samples: list[tuple[int, tuple[float, ...]]] = []
    for size in _SIZES:
        shard = max(1, size // dtype.itemsize // dist.get_world_size(group))
        x = torch.empty(shard * dist.get_world_size(group), device=device, dtype=dtype)
        samples.append((x.numel() * dtype.itemsize, tuple(_seconds(tuple(ways.values()), x, group))))
        if max(samples[-1][1]) > _MAX_S:
            break
    return Timings(tuple(ways), tuple(samples))


def _seconds(ways: Sequence[Sum], x: Tensor, group: dist.ProcessGroup) -> list[float]:
    """Return the seconds per call of each way on the slowest rank: the best of several rounds of all ways.

    The first call at each size does not count: it compiles kernels and connects ranks, which takes longer than the
    largest sums.
    """
    for way in ways:
        way(x.normal_())
    best = [float("inf")] * len(ways)
    for _ in range(_ROUNDS):
        for i, way in enumerate(ways):
            x.normal_()  # exact sums are in place, so x would grow
            dist.barrier(group)
            row = mean_seconds(partial(way, x), x.device, _CALLS if x.is_cuda else 1)
            seconds = torch.tensor(row, device=x.device)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
            best[i] = min(best[i], float(seconds))
        if max(best) > _MAX_S:
            break
    return best


def _load(path: Path) -> Timings | None:
    try:
        data = json.loads(path.read_text())
        if data["version"] != _VERSION:
            return None
        ways = tuple(map(str, data["ways"]))
        samples = [(int(size), tuple(map(float, seconds))) for size, seconds in data["samples"]]
        if not samples or any(len(seconds) != len(ways) for _, seconds in samples):
            raise ValueError(f"samples of {len(ways)} ways were expected")
        return Timings(ways, tuple(samples))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s): measuring again", path, error)
        return None


def _save(result: Timings, case: dict[str, Any], path: Path) -> None:
    data = {
        "version": _VERSION,
        "case": case,
        **asdict(result),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, json.dumps(data, indent=1) + "\n")
    except OSError as error:
        logger.warning("%s cannot be written (%s): it will be measured again", path, error)
