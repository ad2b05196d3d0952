"""The size from which a quantized reduction is faster than the exact one: measured once and stored in a file."""

from __future__ import annotations

import datetime
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import files
from ..core.cache import cache_folder
from ..core.comm.collectives import gather_objects
from ..core.comm.device import synchronize

logger = logging.getLogger(__name__)

_VERSION = 4
_SIZES = [4**k * 1024 for k in range(2, 9)]  # bytes: 16 KiB to 64 MiB
_MARGIN = 0.95
"""Quantized counts as faster below this fraction of the exact sum's time, because noise does not justify an error."""
_ROUNDS = 6
_MAX_S = 0.2
"""If a call takes longer, no more rounds or larger sizes are measured."""
_CALLS = 16
"""The calls of a row on a GPU, so that waiting for the device once does not count."""


@dataclass(frozen=True)
class Crossover:
    """The smallest size from which quantized reductions were faster at all measured sizes.

    Attributes:
        from_bytes: the bytes of a rank's tensor; None if they were never faster.
        samples: (bytes, exact seconds, quantized seconds) of the slowest rank, in ascending order of bytes.
    """

    from_bytes: int | None
    samples: tuple[tuple[int, float, float], ...]

    @staticmethod
    def from_samples(samples: list[tuple[int, float, float]]) -> Crossover:
        """Return the crossover of samples in ascending order of bytes."""
        start = None
        for size, exact, quantized in reversed(samples):
            if quantized >= exact * _MARGIN:
                break
            start = size
        return Crossover(start, tuple(samples))

    def __str__(self) -> str:
        largest = self.samples[-1][0] / 2**20 if self.samples else 0.0
        if self.from_bytes is None:
            return f"at no size up to {largest:g} MiB"
        exact, quantized = next((e, q) for size, e, q in self.samples if size == self.from_bytes)
        return f"from {self.from_bytes / 2**20:g} MiB ({exact * 1e3:.3g} ms exact, {quantized * 1e3:.3g} ms quantized)"


Reduction = Callable[[Tensor], object]


def crossover(
    operation: str,
    quantizer: str,
    group: dist.ProcessGroup,
    x: Tensor,
    ways: tuple[Reduction, Reduction],
    folder: Path | None,
) -> Crossover:
    """Return the crossover of `ways` (exact, quantized) for tensors like `x`. Collective.

    It is read from the first rank's file, or measured and stored there. A file that cannot be read is measured again;
    if it cannot be written, a warning is logged.
    """
    hosts = gather_objects(group, socket.gethostname())
    case = {
        "operation": operation,
        "device": torch.cuda.get_device_name(x.device) if x.is_cuda else "cpu",
        "backend": dist.get_backend(group),
        "ranks": len(hosts),
        "hosts": len(set(hosts)),
        "dtype": str(x.dtype).split(".")[-1],
        "quantizer": quantizer,
    }
    path, first = _path(case, folder), dist.get_rank(group) == 0
    stored = gather_objects(group, _load(path) if first else None)[0]
    result = stored or _measure(x.dtype, group, x.device, ways)
    if first and stored is None:
        _save(result, case, path)
    if first:
        source = "measured now" if stored is None else path
        about = (operation, case["dtype"], len(hosts), quantizer)
        logger.info("%s of %s on %d ranks: %s is used %s; %s", *about, result, source)
    return result


def _path(case: dict[str, Any], folder: Path | None) -> Path:
    name = re.sub(r"[^A-Za-z0-9]+", "-", "-".join(map(str, case.values()))).strip("-")
    return (folder or cache_folder()) / f"crossover-{name}.json"


def _measure(
    dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device, ways: tuple[Reduction, Reduction]
) -> Crossover:
    """Time both ways at increasing sizes, until the slowest rank takes longer than `_MAX_S`."""
    samples: list[tuple[int, float, float]] = []
    for size in _SIZES:
        shard = max(1, size // dtype.itemsize // dist.get_world_size(group))
        x = torch.empty(shard * dist.get_world_size(group), device=device, dtype=dtype)
        exact, quantized = _seconds(ways, x, group)
        samples.append((x.numel() * dtype.itemsize, exact, quantized))
        if max(exact, quantized) > _MAX_S:
            break
    return Crossover.from_samples(samples)


def _seconds(ways: Sequence[Reduction], x: Tensor, group: dist.ProcessGroup) -> list[float]:
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
            seconds = torch.tensor(_row(way, x), device=x.device)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
            best[i] = min(best[i], float(seconds))
        if max(best) > _MAX_S:
            break
    return best


def _row(way: Reduction, x: Tensor) -> float:
    """Return the wall-clock seconds per call of a row: prompts wait for the host as well as for the device."""
    calls = _CALLS if x.is_cuda else 1
    synchronize(x.device)
    begin = time.perf_counter()
    for _ in range(calls):
        way(x)
    synchronize(x.device)
    return (time.perf_counter() - begin) / calls


def _load(path: Path) -> Crossover | None:
    try:
        data = json.loads(path.read_text())
        if data["version"] != _VERSION:
            return None
        samples = [(int(size), float(exact), float(quantized)) for size, exact, quantized in data["samples"]]
        return Crossover.from_samples(samples)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s): measuring again", path, error)
        return None


def _save(result: Crossover, case: dict[str, Any], path: Path) -> None:
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
