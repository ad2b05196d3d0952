"""`bench all_reduce`: the library's all-reduces, torch's over symmetric memory and ours, beside each other by size."""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.hosts import why_no_peers
from ..comm.peer_reduce import peer_reduction
from ..comm.quantized import all_reduce
from ..comm.symmetric import symmetric_memory
from ..config import refuse
from . import all_reduce_report as report
from .command import Where, start
from .recorded import Recorded
from .timing import Stopwatch

logger = logging.getLogger(__name__)

LIBRARY = {"nccl": "NCCL", "gloo": "gloo"}
_LARGEST_CHECKED = 16 * 2**20
_ENOUGH_S, _LEAST, _MOST = 0.04, 5, 200
"""A measurement makes so many seconds of calls, but at least and at most so many."""
_ONE_STEP, _LARGEST_ONE_STEP = "in 1 step", 4 * 2**20

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Bytes of a rank's tensor from `smallest` to `largest`, each `step` times the one before; of `dtype`.

    eager: calls are issued one by one also on GPUs, not replayed from CUDA graphs. group_size: of what is quantized.
    steps: also each number of steps over peers by itself.
    """

    smallest: int
    largest: int
    step: int
    dtype: torch.dtype = torch.bfloat16
    group_size: int = 128
    eager: bool = False
    steps: bool = False

    def __post_init__(self) -> None:
        if not 1024 <= self.smallest <= self.largest:
            raise refuse("--smallest-kib", self.smallest / 1024, "1 or more, and not above the largest", "Correct it.")
        if self.step not in (2, 4):
            raise refuse("--step", self.step, "2 or 4", "4 takes half as many sizes.")

    def all(self) -> list[int]:
        found = [self.smallest]
        while found[-1] * self.step <= self.largest:
            found.append(found[-1] * self.step)
        return found if found[-1] == self.largest else [*found, self.largest]


def sizes_of(where: Where, words: argparse.Namespace) -> Sizes:
    """The sizes that the command line asks for."""
    largest = words.largest_mib
    if largest is None:
        largest = 512 if where.device == "cuda" else 4
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[words.dtype]
    return Sizes(
        words.smallest_kib * 1024, largest * 2**20, words.step, dtype, words.group_size, words.eager, words.steps
    )


@dataclass
class Measured:
    """One way at one size. seconds: median of the slowest rank. error: relative to the exact sum; None: not checked."""

    way: str
    num_bytes: int
    seconds: float
    error: float | None


@dataclass
class Found:
    """All that was measured, and why ways were left out. graphs: whether calls were replayed from CUDA graphs."""

    graphs: bool
    measured: list[Measured] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def run_all_reduce(where: Where, sizes: Sizes, out: Path) -> None:
    """Measure, write JSON and a Markdown table after every size, and a picture beside them at the end.

    Args:
        out: a .json file.

    Raises:
        ValueError: a place that cannot be used.
    """
    if out.suffix != ".json" or not out.parent.is_dir():
        raise refuse("--out", out, "a .json file in a folder that exists", "Give another file name.")
    record = _Record(out, where.device, where.ranks, sizes)
    found: Found = start(where, measure, where, sizes, record)[0]
    print(record(found))
    report.draw(found.measured, out.with_suffix(".png"), record.title)
    logger.info("written to %s, and .md and .png beside it", out)


@dataclass(frozen=True)
class _Record(Recorded):
    """Writes what has been found so far; returns the tables."""

    ranks: int
    sizes: Sizes

    @property
    def title(self) -> str:
        dtype = str(self.sizes.dtype).removeprefix("torch.")
        return f"all-reduce of {dtype}, {self.ranks} x {self.facts['device']}, {self.facts['date'][:10]}"

    def __call__(self, found: Found) -> str:
        library = LIBRARY["nccl" if self.device == "cuda" else "gloo"]
        starts = report.crossovers(found.measured, library)
        data = {
            "what": "all-reduce: median seconds of the slowest rank, by bytes of a rank's tensor",
            "ranks": self.ranks,
            "environment": self.facts,
            "sizes": asdict(self.sizes) | {"dtype": str(self.sizes.dtype)},
            "from_cuda_graphs": found.graphs,
            "measurements": [asdict(m) for m in found.measured],
            "faster_from_bytes": starts,
            "left_out": found.left_out,
        }
        issued = "calls replayed from CUDA graphs" if found.graphs else "calls issued one by one"
        text = report.tables(found, library, starts)
        self.write(data, f"medians in µs, of the slowest rank; {issued}", text)
        return text


def measure(rank: int, where: Where, sizes: Sizes, keep: Callable[[Found], object]) -> Found:
    """Every way at every size; all ranks call it. keep: told by rank 0 after every size."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device()) if where.device == "cuda" else torch.device("cpu")
    found = Found(graphs=where.device == "cuda" and not sizes.eager)
    makers = ways(group, device, sizes, found.left_out)
    for size in sizes.all():
        x = _values(size // sizes.dtype.itemsize, sizes.dtype, device, rank)
        exact = x.to(torch.float32, copy=True) if size <= _LARGEST_CHECKED else None
        if exact is not None:
            dist.all_reduce(exact, group=group)
        for name, make in makers.items():
            if name.endswith(_ONE_STEP) and size > _LARGEST_ONE_STEP:
                continue
            call = make(x)
            error = None if exact is None else float((call().float() - exact).norm() / exact.norm())
            seconds = _seconds(call, group, device, found.graphs)
            found.measured.append(Measured(name, size, seconds, error))
        del x, exact
        if rank == 0:
            keep(found)
    return found


def ways(
    group: dist.ProcessGroup, device: torch.device, sizes: Sizes, left_out: dict[str, str]
) -> dict[str, Callable[[Tensor], Call]]:
    """By name, what makes a call that returns the sum of the ranks' x. `left_out`: gets what there is not, and why."""
    makers: dict[str, Callable[[Tensor], Call]] = {LIBRARY[dist.get_backend(group)]: partial(_library, group)}
    library = next(iter(makers))
    reason = why_no_peers(group, device)
    if reason is None:
        makers |= _torch_ways(group, device, sizes, left_out)
    else:
        left_out["torch symmetric memory"] = left_out["over peers"] = reason
    for bits in (8, 6, 4):
        makers[f"int{bits} over {library}"] = partial(_collective, group, bits, sizes.group_size)
    peers = peer_reduction("auto", group, device) if reason is None else None
    if peers is not None:
        for bits_or_none in (None, 8, 6, 4):
            name = f"int{bits_or_none}" if bits_or_none else "unquantized"
            call = partial(peers.all_reduce, bits=bits_or_none, group_size=sizes.group_size)
            makers[f"{name} over peers"] = partial(_peers, call)
            for steps, how in ((1, _ONE_STEP), (2, "in 2 steps")) if sizes.steps else ():
                makers[f"{name} over peers {how}"] = partial(_peers, partial(call, steps=steps))
    elif reason is None:
        left_out["over peers"] = "it could not be set up; the log says why"
    return makers


def _library(group: dist.ProcessGroup, x: Tensor) -> Call:
    out = x.clone()

    def call() -> Tensor:
        dist.all_reduce(out, group=group)
        return out

    return call


def _collective(group: dist.ProcessGroup, bits: int, group_size: int, x: Tensor) -> Call:
    return partial(all_reduce, x, group, bits=bits, group_size=group_size, out=torch.empty_like(x))


def _peers(reduce: Callable[..., Tensor], x: Tensor) -> Call:
    return partial(reduce, x, out=torch.empty_like(x))


def _torch_ways(
    group: dist.ProcessGroup, device: torch.device, sizes: Sizes, left_out: dict[str, str]
) -> dict[str, Callable[[Tensor], Call]]:
    symmetric = symmetric_memory()
    room = symmetric.empty(max(sizes.all()) // sizes.dtype.itemsize, dtype=sizes.dtype, device=device)
    handle = symmetric.rendezvous(room, group)
    ops = torch.ops.symm_mem
    makers: dict[str, Callable[[Tensor], Call]] = {
        "torch one-shot": partial(_torch, room, group, ops.one_shot_all_reduce),
        "torch two-shot": partial(_torch, room, group, ops.two_shot_all_reduce_),
    }
    if handle.multicast_ptr:
        makers["torch multimem"] = partial(_torch, room, group, ops.multimem_all_reduce_)
    else:
        left_out["torch multimem"] = "NVLink multicast is off or not there"
    small = torch.zeros(sizes.smallest // sizes.dtype.itemsize, dtype=sizes.dtype, device=device)
    for name, make in tuple(makers.items()):
        try:
            make(small)()
        except (RuntimeError, TypeError) as error:  # another version of torch may ask for something else
            left_out[name] = str(error).split("\n", 1)[0]
            del makers[name]
    return makers


def _torch(room: Tensor, group: dist.ProcessGroup, operation: Callable[..., Tensor], x: Tensor) -> Call:
    inside = room[: x.numel()].copy_(x)
    return partial(operation, inside, "sum", group.group_name)


def _values(numel: int, dtype: torch.dtype, device: torch.device, rank: int) -> Tensor:
    """Normal values with outliers, as activations have them."""
    gen = torch.Generator(device).manual_seed(rank)
    x = torch.randn(numel, generator=gen, device=device)
    return (x * torch.where(torch.rand(numel, generator=gen, device=device) < 0.01, 20.0, 1.0)).to(dtype)


def _seconds(call: Call, group: dist.ProcessGroup, device: torch.device, graph: bool) -> float:
    """Median seconds of a call: of a CUDA graph of many, or of calls issued one after another."""
    watch = Stopwatch(device)
    once = _slowest([_timed(watch, call) for _ in range(3)][-1], group, device)
    count = max(_LEAST, min(_MOST, int(_ENOUGH_S / once)))
    dist.barrier(group)
    if not graph:
        found = statistics.median(_marks(watch, call, count))
        return _slowest(found, group, device)
    each = min(count, 20)
    with _graph_of(call, each, device) as replay:
        replay()
        found = statistics.median(_marks(watch, replay, max(_LEAST, count // each))) / each
    return _slowest(found, group, device)


@contextmanager
def _graph_of(call: Call, count: int, device: torch.device) -> Iterator[Callable[[], None]]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    # NCCL's watchdog thread queries events of its own meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            call()
    yield graph.replay
    torch.cuda.synchronize(device)
    graph.reset()


def _timed(watch: Stopwatch, call: Call) -> float:
    return _marks(watch, call, 1)[0]


def _marks(watch: Stopwatch, call: Callable[[], object], count: int) -> Sequence[float]:
    marks = [watch.mark()]
    for _ in range(count):
        call()
        marks.append(watch.mark())
    watch.finish()
    return [watch.seconds(a, b) for a, b in pairwise(marks)]


def _slowest(seconds: float, group: dist.ProcessGroup, device: torch.device) -> float:
    worst = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return float(worst)
