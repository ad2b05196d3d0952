"""Quantized sums on slow links: `python -m analysis.network.all_reduce [--ranks 4] [--gibps 0.01] [--out FOLDER]`.

Every rank is a host with one NIC of that rate. All-reduces and reduce-scatters of bf16 activations over gloo, as they
are and quantized, in turns; writes `all_reduce_emulated.json`, `.md` (tables) and `.png` (a picture).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.lowbit.reduction import Reducer, ReductionPolicy
from megatron_longctx.metrics.environment import environment
from megatron_longctx.topology import Cluster, Mesh, Network

from .emulate import address, build, isolated, namespace, reason_not_possible

ROOT = Path(__file__).resolve().parents[2]
MODES = ("none", "int8", "int6", "int4")
OPERATIONS = ("all_reduce", "reduce_scatter")
HIDDEN = 4096
GOALS = {"int8": 1.5, "int4": 2.5}
"""Speed over the unquantized all-reduce, from 1 MiB up."""
_PORT = 29500


@dataclass(frozen=True)
class Job:
    cluster: Cluster
    tokens: tuple[int, ...]
    group_size: int
    repeats: int


@dataclass(frozen=True)
class Found:
    """seconds: of the slowest rank, the median. error: relative (Frobenius), against fp64, the largest of all ranks.
    equal: whether all ranks have the same bits (all_reduce only)."""

    operation: str
    mode: str
    num_bytes: int
    seconds: float
    error: float
    equal: bool


def measure(job: Job, timeout: float = 900.0) -> list[Found]:
    """Run `job` on an emulated network.

    Raises:
        PermissionError: this machine cannot emulate a network, with the reason.
        RuntimeError: a rank failed, with the end of what it said.
    """
    reason = reason_not_possible()
    if reason is not None:
        raise PermissionError(f"a limited network cannot be emulated here: {reason}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(job))
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # addresses here have no names, which torch warns of
        command = isolated([sys.executable, "-m", "analysis.network.all_reduce", "--inside", name])
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **quiet, "PYTHONPATH": paths}, timeout=timeout, check=False
        )
        if done.returncode:
            said = "\n".join(path.read_text()[-1500:] for path in sorted(folder.glob("*.log")))
            raise RuntimeError(f"a rank failed.\n{said}")
        return [Found(**each) for each in json.loads((folder / "found").read_text())]


def _inside(folder: Path) -> int:
    """Build the network, start a rank on every host, wait; the first that fails ends all."""
    job: Job = pickle.loads((folder / "job").read_bytes())
    build(job.cluster)
    ranks = []
    for rank in range(job.cluster.n):
        command = ["ip", "netns", "exec", namespace(rank), sys.executable, "-m", "analysis.network.all_reduce"]
        log = (folder / f"rank{rank}.log").open("w")
        command += ["--inside", str(folder), "--rank", str(rank)]
        # Rank 0 says on its standard output how far things are; what any rank complains of goes into its log.
        ranks.append(subprocess.Popen(command, stdout=sys.stderr if rank == 0 else log, stderr=log))
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):
            break  # the rest end with this process
        time.sleep(0.1)
    return int(any(process.poll() for process in ranks))  # a signal's code is negative


def _rank(folder: Path, rank: int) -> int:
    job: Job = pickle.loads((folder / "job").read_bytes())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # where a host's one address is
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=300)
    store = dist.TCPStore(address(0), _PORT, job.cluster.n, rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.cluster.n, timeout=limit)
    found = [each for tokens in job.tokens for operation in OPERATIONS for each in _cases(job, tokens, operation)]
    if rank == 0:
        (folder / "found").write_text(json.dumps([asdict(each) for each in found]))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _cases(job: Job, tokens: int, operation: str) -> list[Found]:
    """All modes of one operation and size, in turns, so that what else the machine does meets all alike."""
    rank, group = dist.get_rank(), dist.group.WORLD
    xs = [_activations(tokens, source) for source in range(job.cluster.n)]
    exact = torch.stack([x.double() for x in xs]).sum(0)
    if operation == "reduce_scatter":
        exact = exact.chunk(job.cluster.n)[rank]
    x = xs[rank]
    del xs
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        mode: getattr(Reducer(group, ReductionPolicy(mode, job.group_size, min_kib=0)), operation) for mode in MODES
    }
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    results = {mode: way(x) for mode, way in ways.items()}  # connections are made on first use
    for _ in range(job.repeats):
        for mode, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way(x)
            seconds[mode].append(_largest(time.perf_counter() - start))
    found = []
    for mode, result in results.items():
        error = _largest(float((result.double() - exact).norm() / exact.norm()))
        copies = [torch.empty_like(result) for _ in range(job.cluster.n)]
        if operation == "all_reduce":
            dist.all_gather(copies, result)
        equal = operation != "all_reduce" or all(torch.equal(copy, result) for copy in copies)
        num_bytes = x.numel() * x.element_size()
        found.append(Found(operation, mode, num_bytes, statistics.median(seconds[mode]), error, equal))
        if rank == 0:
            print(f"  {operation} {num_bytes / 2**20:g} MiB {mode}: {found[-1].seconds:.3f} s", flush=True)
    return found


def _activations(tokens: int, rank: int) -> Tensor:
    """Normal, with a few channels a hundred times as large, as projections of language models have them."""
    gen = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, HIDDEN, generator=gen)
    x[:, torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(99))[: HIDDEN // 256]] *= 20
    return x.bfloat16()


def _largest(value: float) -> float:
    worst = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def speeds(found: Sequence[Found]) -> dict[tuple[str, str, int], float]:
    """By (operation, mode, bytes): how many times as fast as unquantized."""
    plain = {(each.operation, each.num_bytes): each.seconds for each in found if each.mode == "none"}
    return {
        (each.operation, each.mode, each.num_bytes): plain[each.operation, each.num_bytes] / each.seconds
        for each in found
    }


def table(found: Sequence[Found]) -> str:
    """Markdown: seconds, speed over unquantized, and error."""
    faster = speeds(found)
    lines = ["| operation | MiB per rank | mode | ms | times as fast | error |", "|---|---|---|---|---|---|"]
    for each in sorted(found, key=lambda e: (OPERATIONS.index(e.operation), e.num_bytes, MODES.index(e.mode))):
        factor = faster[each.operation, each.mode, each.num_bytes]
        lines.append(
            f"| {each.operation} | {each.num_bytes / 2**20:g} | {each.mode} | {each.seconds * 1e3:.1f} | {factor:.2f} "
            f"| {each.error:.5f} |"
        )
    return "\n".join(lines)


def goals(found: Sequence[Found]) -> str:
    """Whether all-reduces from 1 MiB up reach `GOALS`."""
    faster = speeds(found)
    lines = []
    for mode, goal in GOALS.items():
        reached = [f for (op, m, size), f in faster.items() if (op, m) == ("all_reduce", mode) and size >= 2**20]
        lines.append(f"{mode}: goal {goal}x from 1 MiB up, least measured {min(reached):.2f}x.")
    return "\n".join(lines)


def draw(found: Sequence[Found], title: str, path: Path) -> None:
    """Speed over unquantized by size, an axis for each operation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    faster = speeds(found)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for axis, operation in zip(axes, OPERATIONS, strict=True):
        for mode, color in zip(MODES, ("0.4", "tab:blue", "tab:green", "tab:red"), strict=True):
            points = sorted((size, f) for (op, m, size), f in faster.items() if (op, m) == (operation, mode))
            # int6 lies on int4 where only the first step is taken.
            style = "--" if mode == "int6" else "-"
            axis.plot(
                [s / 2**20 for s, _ in points], [f for _, f in points], style, marker="o", color=color, label=mode
            )
        sizes = sorted({size / 2**20 for _, _, size in faster})
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axis.set_xlabel("MiB of bf16 per rank")
        axis.set_title(operation.replace("_", "-"))
        axis.grid(alpha=0.3)
    axes[0].set_ylim(bottom=0)  # of both, once both are drawn
    axes[0].set_ylabel("times as fast as unquantized")
    axes[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.network.all_reduce", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gibps", type=float, default=0.01, help="of every rank's NIC, each direction")
    parser.add_argument("--group-size", type=int, default=128, choices=(32, 64, 128))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 128, 512, 2048], help="rows of 4096 bf16")
    parser.add_argument("--out", type=Path, default=Path("analysis/results"), help="folder of the results")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.inside is not None:
        return _inside(args.inside) if args.rank is None else _rank(args.inside, args.rank)
    if not args.out.is_dir():
        parser.error(f"--out {args.out}: expected a folder that exists")
    cluster = Cluster(f"{args.ranks} hosts", args.ranks, 1, Mesh(1.0), Network(1, args.gibps))
    job = Job(cluster, tuple(args.tokens), args.group_size, args.repeats)
    try:
        found = measure(job)
    except (PermissionError, RuntimeError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    facts = environment()
    title = f"gloo, {args.ranks} hosts with a NIC of {args.gibps:g} GiB/s each, groups of {args.group_size}"
    note = "gloo's own reduce-scatter takes as long as its all-reduce, twice what its bytes need: "
    note += "half of the gain there is owed to that."
    head = f"{facts['date'][:10]}, commit {str(facts['commit'])[:9]}. {title}. Errors against fp64: activations with "
    head += f"a few channels of 20 times the size. {note}"
    stem = args.out / "all_reduce_emulated"
    stem.with_suffix(".md").write_text(f"{head}\n\n{goals(found)}\n\n{table(found)}\n")
    data = {"what": "quantized sums on emulated slow links", "environment": facts, "job": asdict(job)}
    stem.with_suffix(".json").write_text(json.dumps({**data, "found": [asdict(f) for f in found]}, indent=1) + "\n")
    draw(found, title, stem.with_suffix(".png"))
    print(stem.with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
