"""The library's all-reduces, torch's over symmetric memory and ours, beside each other by size."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import takewhile

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.calibrate.timing import row_seconds, step_seconds
from megatron_longctx.comm import gather_objects
from megatron_longctx.comm.peer_memory import MAX_BLOCKS, allocate_peer_memory
from megatron_longctx.comm.symmetric import find_hosts, symmetric_memory
from megatron_longctx.errors import refuse
from megatron_longctx.lowbit.crossover import Crossover
from megatron_longctx.lowbit.peer_reduce import HALF_BYTES, PeerReduction, peer_reduction
from megatron_longctx.lowbit.quantized import all_reduce
from megatron_longctx.training.ranks import Ranks, run_on_ranks, world_group

from .inference_ranks import numbers
from .recorded import Report, table

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GROUP_SIZE = 128
_ISSUED = {"cuda": "replayed from CUDA graphs", "cpu": "issued one by one"}
_LARGEST_CHECKED = 16 * 2**20
_ENOUGH_S, _LEAST, _MOST = 0.04, 5, 200
"""A row lasts so many seconds, but has at least and at most so many calls."""
_IN_GRAPH, _ROUNDS = 20, 5

Call = Callable[[], Tensor]
"""Gives the sum."""
Maker = Callable[[Tensor], Call]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="ranks to start on this host (default: one per GPU, 2 on CPU)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--smallest-kib", type=int, default=64, help="smallest tensor of a rank (default: %(default)s)")
    parser.add_argument("--largest-mib", type=int, help="largest tensor of a rank (default: 512 on GPUs, 4 on CPU)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument(
        "--blocks",
        help="over peers, also with so many blocks of the kernel, like 16,32,48 (Flash Communication, figure 11)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure; write JSON and a Markdown table after every size.

    Raises:
        ValueError: sizes or ranks that cannot be used.
    """
    where = Ranks.of(arguments.ranks, arguments.device)
    largest = (arguments.largest_mib or (512 if where.device == "cuda" else 4)) * 2**20
    smallest = arguments.smallest_kib * 1024
    if not 0 < smallest <= largest:
        raise refuse("--smallest-kib", arguments.smallest_kib, "1 or more, and not above the largest", "Correct it.")
    blocks = tuple(map(int, numbers("--blocks", arguments.blocks, 1))) if arguments.blocks else ()
    if max(blocks, default=1) > MAX_BLOCKS:
        raise refuse("--blocks", max(blocks), f"1 to {MAX_BLOCKS}", "A kernel has no more.")
    sizes = tuple(takewhile(lambda size: size <= largest, (smallest << i for i in range(64))))
    what, about = "seconds of the slowest rank, by bytes of a rank's tensor", f"all-reduce of {arguments.dtype}"
    unit = f"{where.count} ranks; µs, of the slowest rank; calls {_ISSUED[where.device]}"
    keep = partial(record, Report(arguments.out, where.device, what, about, unit), where.count, arguments.dtype)
    print(keep(run_on_ranks(where, measure, where, sizes, arguments.dtype, keep, blocks)))


@dataclass
class Measured:
    """One way at one size. seconds: of the slowest rank. error: relative to the exact sum; None: not checked."""

    way: str
    num_bytes: int
    seconds: float
    error: float | None


@dataclass
class Found:
    """All that was measured, the library's way first, and why ways were left out."""

    measured: list[Measured] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def library(self) -> str:
        return self.measured[0].way

    @property
    def by_way(self) -> dict[str, dict[int, Measured]]:
        found: dict[str, dict[int, Measured]] = {}
        for m in self.measured:
            found.setdefault(m.way, {})[m.num_bytes] = m
        return found


def record(report: Report, ranks: int, dtype: str, found: Found) -> str:
    """Write what has been found so far; returns the tables."""
    data = {
        "ranks": ranks,
        "dtype": dtype,
        "group_size": GROUP_SIZE,
        "issued": _ISSUED[report.device],
        "measurements": [asdict(m) for m in found.measured],
        "faster_from_bytes": crossovers(found),
        "left_out": found.left_out,
    }
    return report.write(data, tables(found))


def measure(
    rank: int,
    where: Ranks,
    sizes: Sequence[int],
    dtype: str,
    keep: Callable[[Found], object],
    blocks: Sequence[int] = (),
) -> Found:
    """Every way at every size; all ranks call it. keep: told by rank 0 after every size."""
    group, device, found = world_group(), where.local_device, Found()
    makers = ways(group, device, DTYPES[dtype], max(sizes), found.left_out)
    if "over peers" not in found.left_out:
        makers |= _with_blocks(group, device, blocks, found.left_out)
    for size in sizes:
        x = _values(size // DTYPES[dtype].itemsize, DTYPES[dtype], device, rank)
        exact = x.to(torch.float32, copy=True) if size <= _LARGEST_CHECKED else None
        if exact is not None:
            dist.all_reduce(exact, group=group)
        for name, make in makers.items():
            call = make(x)
            error = None if exact is None else float((call().float() - exact).norm() / exact.norm())
            found.measured.append(Measured(name, size, _seconds(call, group, device), error))
        del x, exact
        if rank == 0:
            keep(found)
    return found


def ways(
    group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, most: int, left_out: dict[str, str]
) -> dict[str, Maker]:
    """By name, what makes a call that returns the sum of the ranks' x. `left_out`: gets what there is not, and why."""
    library = {"nccl": "NCCL", "gloo": "gloo"}[dist.get_backend(group)]
    makers: dict[str, Maker] = {library: partial(_library, group)}
    reason = find_hosts(group, device).reason
    if reason is None:
        makers |= _torch_ways(group, torch.empty(most // dtype.itemsize, dtype=dtype, device=device), left_out)
    else:
        left_out["torch symmetric memory"] = left_out["over peers"] = reason
    for bits in (8, 6, 4):
        makers[f"int{bits} over {library}"] = partial(_ours, partial(all_reduce, group=group, bits=bits))
    peers = peer_reduction("auto", group, device) if reason is None else None
    if peers is not None:
        for name, bits_or_none in (("unquantized", None), ("int8", 8), ("int6", 6), ("int4", 4)):
            reduce = partial(all_reduce, group=group, bits=bits_or_none, peers=peers)
            makers[f"{name} over peers"] = partial(_ours, reduce)
    elif reason is None:
        left_out["over peers"] = "it could not be set up; the log says why"
    return makers


def _with_blocks(
    group: dist.ProcessGroup, device: torch.device, blocks: Sequence[int], left_out: dict[str, str]
) -> dict[str, Maker]:
    """Over peers, with so many blocks of the kernel instead of as many as a GPU runs at once."""
    makers: dict[str, Maker] = {}
    if not blocks:
        return makers
    memory = allocate_peer_memory(group, device, HALF_BYTES, "Leave --blocks out.")
    for count in blocks:
        if count > memory.blocks:
            left_out[f"{count} blocks"] = f"a GPU here runs {memory.blocks} at once"
            continue
        reduction = PeerReduction(replace(memory, blocks=count))
        for bits in (8, 4):
            reduce = partial(all_reduce, group=group, bits=bits, peers=reduction)
            makers[f"int{bits} over peers, {count} blocks"] = partial(_ours, reduce)
    return makers


def _library(group: dist.ProcessGroup, x: Tensor) -> Call:
    out = x.clone()

    def call() -> Tensor:
        dist.all_reduce(out, group=group)
        return out

    return call


def _ours(reduce: Callable[..., Tensor], x: Tensor) -> Call:
    return partial(reduce, x, group_size=GROUP_SIZE, out=torch.empty_like(x))


def _torch_ways(group: dist.ProcessGroup, like: Tensor, left_out: dict[str, str]) -> dict[str, Maker]:
    symmetric, ops = symmetric_memory(), torch.ops.symm_mem
    room = symmetric.empty(like.shape, dtype=like.dtype, device=like.device)
    handle = symmetric.rendezvous(room, group)
    found = {"torch one-shot": ops.one_shot_all_reduce, "torch two-shot": ops.two_shot_all_reduce_}
    if handle.multicast_ptr:
        found["torch multimem"] = ops.multimem_all_reduce_
    else:
        left_out["torch multimem"] = "NVLink multicast is off or not there"
    makers: dict[str, Maker] = {}
    for name, operation in found.items():
        maker = partial(_torch, room, group, operation)
        try:
            maker(torch.zeros_like(like[:512]))()
            makers[name] = maker
        except (RuntimeError, TypeError) as error:  # another version of torch may ask for something else
            left_out[name] = str(error).split("\n", 1)[0]
    return makers


def _torch(room: Tensor, group: dist.ProcessGroup, operation: Callable[..., Tensor], x: Tensor) -> Call:
    return partial(operation, room[: x.numel()].copy_(x), "sum", group.group_name)


def _values(numel: int, dtype: torch.dtype, device: torch.device, rank: int) -> Tensor:
    """Normal values with outliers, as activations have them."""
    gen = torch.Generator(device).manual_seed(rank)
    x = torch.randn(numel, generator=gen, device=device)
    return (x * torch.where(torch.rand(numel, generator=gen, device=device) < 0.01, 20.0, 1.0)).to(dtype)


def _seconds(call: Call, group: dist.ProcessGroup, device: torch.device) -> float:
    """Of one call in a row of them, on GPUs replayed from a CUDA graph."""
    row_seconds(call, device, 3)
    about = max(gather_objects(group, row_seconds(call, device, 3)))
    count = max(_LEAST, min(_MOST, int(_ENOUGH_S / about)))
    if device.type != "cuda":
        return sorted(step_seconds(call, group, device, count, _ROUNDS))[_ROUNDS // 2]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    # NCCL's watchdog thread queries events of its own meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_IN_GRAPH):
            call()
    rows = step_seconds(graph.replay, group, device, -(-count // _IN_GRAPH), _ROUNDS)
    graph.reset()
    return sorted(rows)[_ROUNDS // 2] / _IN_GRAPH


def crossovers(found: Found) -> dict[str, int | None]:
    """By way, the bytes from which on it is faster than the library's all-reduce at every size; None: at none."""
    by_way = found.by_way
    plain = by_way.pop(found.library)
    samples = {
        way: [(n, plain[n].seconds, m.seconds) for n, m in sorted(sizes.items())] for way, sizes in by_way.items()
    }
    return {way: Crossover.from_samples(of_way).from_bytes for way, of_way in samples.items()}


def tables(found: Found) -> str:
    """Markdown; times in microseconds, the fastest of a size in bold."""
    by_way, rows, starts = found.by_way, [], crossovers(found)
    for size in sorted({m.num_bytes for m in found.measured}):
        seconds = [sizes[size].seconds for sizes in by_way.values()]
        cells = [f"**{s * 1e6:.1f}**" if s == min(seconds) else f"{s * 1e6:.1f}" for s in seconds]
        rows.append([_size(size), *cells])
    errors = []
    for way, sizes in by_way.items():
        worst = max((m.error for m in sizes.values() if m.error is not None), default=None)
        first = starts.get(way)
        faster = "" if way == found.library else "at no size" if first is None else f"from {_size(first)} up"
        errors.append([way, faster, "" if worst is None else f"{worst:.2e}"])
    left_out = [f"Left out: {name} ({why})." for name, why in found.left_out.items()]
    judged = table(["way", f"faster than {found.library}", "relative error"], errors)
    return "\n\n".join([table(["size", *by_way], rows), judged, *left_out])


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:g} KiB"
