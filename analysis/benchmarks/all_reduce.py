"""All-reduces of the communication library, of torch over symmetric memory, and of this package, by size."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import takewhile

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.core.comm import gather_objects
from megatron_longctx.core.comm.symmetric import symmetric_memory, why_no_peer_memory
from megatron_longctx.core.errors import refuse
from megatron_longctx.lowbit.peer_memory import MAX_BLOCKS, allocate_peer_memory
from megatron_longctx.lowbit.quantized import HALF_BYTES, PeerReduction, all_reduce, peer_reduction
from megatron_longctx.training.measure import mean_seconds, step_seconds
from megatron_longctx.training.ranks import Ranks, run_on_ranks, world_group

from .report import Report, add_ranks, numbers, table

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GROUP_SIZE = 128
_ISSUED = {"cuda": "replayed from CUDA graphs", "cpu": "issued one by one"}
_LARGEST_CHECKED = 16 * 2**20
_ROW_S, _FEWEST_CALLS, _MAX_CALLS = 0.04, 5, 200
"""Calls in a row last this long, but there are at least and at most these numbers of them."""
_IN_GRAPH, _ROUNDS = 20, 5

Call = Callable[[], Tensor]
"""Computes a sum and returns it."""
Way = Callable[[Tensor], Call]
"""Prepares the sum of the ranks' tensors in one way."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(parser)
    parser.add_argument("--smallest-kib", type=int, default=64, help="smallest tensor of a rank (default: %(default)s)")
    parser.add_argument("--largest-mib", type=int, help="largest tensor of a rank (default: 512 on GPUs, 4 on CPU)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument(
        "--blocks",
        help="over peers, measure also these numbers of blocks per kernel, like 16,32,48 (Flash Communication, "
        "figure 11)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure; write JSON and a Markdown table after every size."""
    ranks = Ranks.of(arguments.ranks, arguments.device)
    largest = (arguments.largest_mib or (512 if ranks.device == "cuda" else 4)) * 2**20
    smallest = arguments.smallest_kib * 1024
    if not 0 < smallest <= largest:
        raise refuse("--smallest-kib", arguments.smallest_kib, "1 or more, and not above the largest", "Correct it.")
    blocks = numbers("--blocks", arguments.blocks, 1) if arguments.blocks else ()
    if max(blocks, default=1) > MAX_BLOCKS:
        raise refuse("--blocks", max(blocks), f"1 to {MAX_BLOCKS}", "A kernel has no more.")
    sizes = tuple(takewhile(lambda size: size <= largest, (smallest << i for i in range(64))))
    what, about = "seconds of the slowest rank, by bytes of a rank's tensor", f"all-reduce of {arguments.dtype}"
    unit = f"{ranks.count} ranks; µs, of the slowest rank; calls {_ISSUED[ranks.device]}"
    save = partial(record, Report(arguments.out, ranks.device, what, about, unit), ranks.count, arguments.dtype)
    print(save(run_on_ranks(ranks, measure, ranks, sizes, arguments.dtype, save, blocks)))


@dataclass
class Measured:
    """The time of one way at one size."""

    way: str
    num_bytes: int
    seconds: float  # on the slowest rank
    error: float | None  # relative to the exact sum; None if not checked


@dataclass
class Results:
    """All measurements, the library's first, and the reasons why ways are missing."""

    measured: list[Measured] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def library(self) -> str:
        return self.measured[0].way

    @property
    def by_way(self) -> dict[str, dict[int, Measured]]:
        grouped: dict[str, dict[int, Measured]] = {}
        for m in self.measured:
            grouped.setdefault(m.way, {})[m.num_bytes] = m
        return grouped


def record(report: Report, ranks: int, dtype: str, results: Results) -> str:
    """Write the results so far; return the tables."""
    data = {
        "ranks": ranks,
        "dtype": dtype,
        "group_size": GROUP_SIZE,
        "issued": _ISSUED[report.device],
        "measurements": [asdict(m) for m in results.measured],
        "faster_from_bytes": crossovers(results),
        "left_out": results.left_out,
    }
    return report.write(data, tables(results))


def measure(
    rank: int,
    ranks: Ranks,
    sizes: Sequence[int],
    dtype: str,
    save: Callable[[Results], object],
    blocks: Sequence[int] = (),
) -> Results:
    """Measure every way at every size. All ranks call this; rank 0 calls `save` after every size."""
    group, device, results = world_group(), ranks.local_device, Results()
    ways = all_ways(group, device, DTYPES[dtype], max(sizes), results.left_out)
    if "over peers" not in results.left_out:
        ways |= _with_blocks(group, device, blocks, results.left_out)
    for size in sizes:
        x = _values(size // DTYPES[dtype].itemsize, DTYPES[dtype], device, rank)
        exact = x.to(torch.float32, copy=True) if size <= _LARGEST_CHECKED else None
        if exact is not None:
            dist.all_reduce(exact, group=group)
        for name, prepare in ways.items():
            call = prepare(x)
            error = None if exact is None else float((call().float() - exact).norm() / exact.norm())
            results.measured.append(Measured(name, size, _seconds(call, group, device), error))
        del x, exact
        if rank == 0:
            save(results)
    return results


def all_ways(
    group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, most: int, left_out: dict[str, str]
) -> dict[str, Way]:
    """Return the ways by name, and add the missing ones with their reasons to `left_out`."""
    library = {"nccl": "NCCL", "gloo": "gloo"}[dist.get_backend(group)]
    ways: dict[str, Way] = {library: partial(_library, group)}
    reason = why_no_peer_memory(group, device)
    if reason is None:
        ways |= _torch_ways(group, torch.empty(most // dtype.itemsize, dtype=dtype, device=device), left_out)
    else:
        left_out["torch symmetric memory"] = left_out["over peers"] = reason
    for bits in (8, 6, 4):
        ways[f"int{bits} over {library}"] = partial(_ours, partial(all_reduce, group=group, bits=bits))
    peers = peer_reduction("auto", group, device) if reason is None else None
    if peers is not None:
        for name, bits_or_none in (("unquantized", None), ("int8", 8), ("int6", 6), ("int4", 4)):
            reduce = partial(all_reduce, group=group, bits=bits_or_none, peers=peers)
            ways[f"{name} over peers"] = partial(_ours, reduce)
    elif reason is None:
        left_out["over peers"] = "it could not be set up; the log gives the reason"
    return ways


def _with_blocks(
    group: dist.ProcessGroup, device: torch.device, blocks: Sequence[int], left_out: dict[str, str]
) -> dict[str, Way]:
    """Return ways over peers with other numbers of blocks per kernel; the default is what a GPU can run at once."""
    if not blocks:
        return {}
    ways: dict[str, Way] = {}
    memory = allocate_peer_memory(group, device, HALF_BYTES, "Leave --blocks out.")
    for count in blocks:
        if count > memory.blocks:
            left_out[f"{count} blocks"] = f"a GPU here runs {memory.blocks} at once"
            continue
        reduction = PeerReduction(replace(memory, blocks=count))
        for bits in (8, 4):
            reduce = partial(all_reduce, group=group, bits=bits, peers=reduction)
            ways[f"int{bits} over peers, {count} blocks"] = partial(_ours, reduce)
    return ways


def _library(group: dist.ProcessGroup, x: Tensor) -> Call:
    out = x.clone()

    def call() -> Tensor:
        dist.all_reduce(out, group=group)
        return out

    return call


def _ours(reduce: Callable[..., Tensor], x: Tensor) -> Call:
    return partial(reduce, x, group_size=GROUP_SIZE, out=torch.empty_like(x))


def _torch_ways(group: dist.ProcessGroup, like: Tensor, left_out: dict[str, str]) -> dict[str, Way]:
    symmetric, ops = symmetric_memory(), torch.ops.symm_mem
    buffer = symmetric.empty(like.shape, dtype=like.dtype, device=like.device)
    handle = symmetric.rendezvous(buffer, group)
    operations = {"torch one-shot": ops.one_shot_all_reduce, "torch two-shot": ops.two_shot_all_reduce_}
    if handle.multicast_ptr:
        operations["torch multimem"] = ops.multimem_all_reduce_
    else:
        left_out["torch multimem"] = "NVLink multicast is off or missing"
    ways: dict[str, Way] = {}
    for name, operation in operations.items():
        way = partial(_torch, buffer, group, operation)
        try:
            way(torch.zeros_like(like[:512]))()
            ways[name] = way
        except (RuntimeError, TypeError) as error:  # another version of torch may have other arguments
            left_out[name] = str(error).split("\n", 1)[0]
    return ways


def _torch(buffer: Tensor, group: dist.ProcessGroup, operation: Callable[..., Tensor], x: Tensor) -> Call:
    return partial(operation, buffer[: x.numel()].copy_(x), "sum", group.group_name)


def _values(numel: int, dtype: torch.dtype, device: torch.device, rank: int) -> Tensor:
    """Return normal values with outliers, like activations."""
    gen = torch.Generator(device).manual_seed(rank)
    x = torch.randn(numel, generator=gen, device=device)
    return (x * torch.where(torch.rand(numel, generator=gen, device=device) < 0.01, 20.0, 1.0)).to(dtype)


def _seconds(call: Call, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds of one call in a row; on GPUs, the row is replayed from a CUDA graph."""
    mean_seconds(call, device, 3)
    estimate = max(gather_objects(group, mean_seconds(call, device, 3)))
    count = max(_FEWEST_CALLS, min(_MAX_CALLS, int(_ROW_S / estimate)))
    if device.type != "cuda":
        return sorted(step_seconds(call, group, device, count, _ROUNDS))[_ROUNDS // 2]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    # NCCL's watchdog thread queries its own events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_IN_GRAPH):
            call()
    rounds = step_seconds(graph.replay, group, device, -(-count // _IN_GRAPH), _ROUNDS)
    graph.reset()
    return sorted(rounds)[_ROUNDS // 2] / _IN_GRAPH


def crossovers(results: Results) -> dict[str, int | None]:
    """Return, by way, the bytes from which on it is 5% faster than the library at every size; None if it never is."""
    by_way = results.by_way
    library, found = by_way.pop(results.library), {}
    for way, sizes in by_way.items():
        slower = [size for size, m in sizes.items() if m.seconds >= 0.95 * library[size].seconds]
        found[way] = min((size for size in sizes if size > max(slower, default=0)), default=None)
    return found


def tables(results: Results) -> str:
    """Return Markdown with times in microseconds, the fastest of every size in bold."""
    by_way, rows, starts = results.by_way, [], crossovers(results)
    for size in sorted({m.num_bytes for m in results.measured}):
        seconds = [sizes[size].seconds for sizes in by_way.values()]
        cells = [f"**{s * 1e6:.1f}**" if s == min(seconds) else f"{s * 1e6:.1f}" for s in seconds]
        rows.append([_size(size), *cells])
    comparison = []
    for way, sizes in by_way.items():
        worst = max((m.error for m in sizes.values() if m.error is not None), default=None)
        first = starts.get(way)
        faster = "" if way == results.library else "at no size" if first is None else f"from {_size(first)} up"
        comparison.append([way, faster, "" if worst is None else f"{worst:.2e}"])
    left_out = [f"Left out: {name} ({why})." for name, why in results.left_out.items()]
    compared = table(["way", f"faster than {results.library}", "relative error"], comparison)
    return "\n\n".join([table(["size", *by_way], rows), compared, *left_out])


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:g} KiB"
