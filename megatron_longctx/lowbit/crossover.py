"""From which size on a quantized reduction is faster than the library's own: measured once, kept in a file."""

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

import torch
import torch.distributed as dist
from torch import Tensor

from .. import files
from ..comm.collect import from_all
from ..schedules.calibration import cache_folder

logger = logging.getLogger(__name__)

_VERSION = 3
_SIZES = [4**k * 1024 for k in range(2, 9)]  # bytes: 16 KiB to 64 MiB
_MARGIN = 0.95
"""Quantized counts as faster below this share of the plain seconds: noise is no reason to lose precision."""
_ROUNDS = 6
_ENOUGH_S = 0.2
"""Where a call takes longer, neither more rounds nor larger sizes are measured."""
_ROW = 8
"""Calls between two marks on a device."""
_AHEAD_CYCLES = 10_000_000
"""A few milliseconds of a GPU, in which the host issues a row of calls: what it takes for that is no part of them."""


@dataclass(frozen=True)
class Case:
    """What is compared: all that the answer depends on besides the links.

    operation: all_reduce or reduce_scatter. hosts: how many the ranks are on.
    """

    operation: str
    device: str
    backend: str
    ranks: int
    hosts: int
    dtype: str
    quantizer: str

    @staticmethod
    def of(operation: str, group: dist.ProcessGroup, x: Tensor, quantizer: str) -> Case:
        """Collective: the ranks tell each other their hosts."""
        names = from_all(group, socket.gethostname())
        device = torch.cuda.get_device_name(x.device) if x.is_cuda else "cpu"
        backend = dist.get_backend(group)
        return Case(operation, device, backend, len(names), len(set(names)), str(x.dtype).split(".")[-1], quantizer)

    def path(self, folder: Path | None) -> Path:
        name = re.sub(r"[^A-Za-z0-9]+", "-", "-".join(map(str, asdict(self).values()))).strip("-")
        return (folder or cache_folder()) / f"crossover-{name}.json"


@dataclass(frozen=True)
class Crossover:
    """Bytes of a rank's tensor from which on quantized was faster at every size measured; None: at none.

    samples: (bytes, plain seconds, quantized seconds), of the slowest rank.
    """

    from_bytes: int | None
    samples: tuple[tuple[int, float, float], ...]

    @staticmethod
    def between(samples: list[tuple[int, float, float]]) -> Crossover:
        """The crossover of samples in rising order of bytes."""
        won = None
        for size, plain, quantized in reversed(samples):
            if quantized >= plain * _MARGIN:
                break
            won = size
        return Crossover(won, tuple(samples))

    def __str__(self) -> str:
        largest = self.samples[-1][0] / 2**20 if self.samples else 0.0
        if self.from_bytes is None:
            return f"at no size up to {largest:g} MiB"
        plain, quantized = next((p, q) for size, p, q in self.samples if size == self.from_bytes)
        return f"from {self.from_bytes / 2**20:g} MiB ({plain * 1e3:.3g} ms plain, {quantized * 1e3:.3g} ms quantized)"


Reduction = Callable[[Tensor], object]


def crossover(
    case: Case, group: dist.ProcessGroup, device: torch.device, ways: tuple[Reduction, Reduction], folder: Path | None
) -> Crossover:
    """The crossover of `ways` (plain, quantized), from the file or else measured and written. All ranks call it.

    The first rank's file counts for all. A file that cannot be read is measured anew, one that cannot be written is
    only warned of.
    """
    path, first = case.path(folder), dist.get_rank(group) == 0
    known = from_all(group, _load(path) if first else None)[0]
    found = known or _measure(getattr(torch, case.dtype), group, device, ways)
    if first and known is None:
        _save(found, case, path)
    if first:
        said = (case.operation, case.dtype, case.ranks, case.quantizer)
        source = "measured now" if known is None else path
        logger.info("%s of %s on %d ranks: %s is used %s; %s", *said, found, source)
    return found


def _measure(
    dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device, ways: tuple[Reduction, Reduction]
) -> Crossover:
    """Times both ways at rising sizes, until one takes more than `_ENOUGH_S`: ranks decide by the slowest."""
    samples: list[tuple[int, float, float]] = []
    for size in _SIZES:
        share = max(1, size // dtype.itemsize // dist.get_world_size(group))
        x = torch.empty(share * dist.get_world_size(group), device=device, dtype=dtype)
        plain, quantized = _seconds(ways, x, group)
        samples.append((x.numel() * dtype.itemsize, plain, quantized))
        if max(plain, quantized) > _ENOUGH_S:
            break
    return Crossover.between(samples)


def _seconds(ways: Sequence[Reduction], x: Tensor, group: dist.ProcessGroup) -> list[float]:
    """Of a call of each way on the slowest rank, the fastest of a few rounds, in which they take turns.

    First calls do not count, at any size: kernels are compiled for them and ranks connected, which takes longer than
    the largest sums.
    """
    for way in ways:
        way(x.normal_())
    best = [float("inf")] * len(ways)
    for _ in range(_ROUNDS):
        for i, way in enumerate(ways):
            x.normal_()  # again, since exact sums stay in it and grow
            dist.barrier(group)
            took = torch.tensor(_row(way, x), device=x.device)
            dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
            best[i] = min(best[i], float(took))
        if max(best) > _ENOUGH_S:
            break
    return best


def _row(way: Reduction, x: Tensor) -> float:
    """Seconds of a call: on a GPU of several in a row, as the device does them; on the host of one, by the clock."""
    if not x.is_cuda:
        begin = time.perf_counter()
        way(x)
        return time.perf_counter() - begin
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.device(x.device):
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        way(x)  # the ranks meet here
        start.record()
        for _ in range(_ROW):
            way(x)
        stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / _ROW


def _load(path: Path) -> Crossover | None:
    try:
        data = json.loads(path.read_text())
        if data["version"] != _VERSION:
            return None
        return Crossover.between([(int(size), float(plain), float(fast)) for size, plain, fast in data["samples"]])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s): measuring again", path, error)
        return None


def _save(found: Crossover, case: Case, path: Path) -> None:
    data = {
        "version": _VERSION,
        "case": asdict(case),
        "from_bytes": found.from_bytes,
        "samples": found.samples,
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, json.dumps(data, indent=1) + "\n")
    except OSError as error:
        logger.warning("%s cannot be written (%s): it will be measured again", path, error)
