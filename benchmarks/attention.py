"""Context-parallel attention, mode beside mode: whole steps, forward and backward, beside one device's best kernel and
other packages."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch.distributed as dist

from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.calibrate.modes import every_mode
from megatron_longctx.config import TRANSPORTS
from megatron_longctx.errors import refuse
from megatron_longctx.kernels.interface import PROVIDERS
from megatron_longctx.schedules import MODES, Mode
from megatron_longctx.topology import Cluster, Mesh
from megatron_longctx.training.ranks import Ranks, run_on_ranks, world_group

from .cases import Case, cases
from .measure import Bench, Contender, Made, Measurement
from .peers import Found, one_device, peers
from .recorded import Report, table


@dataclass(frozen=True)
class Ask:
    """What was asked for. keep_received, transport, kernel, deterministic, overlap: as in `attention.*` of recipes."""

    cases: tuple[Case, ...]
    modes: tuple[str, ...]
    kernel: str = "auto"
    transport: str = "auto"
    keep_received: str = "auto"
    deterministic: bool = False
    overlap: bool = True
    iterations: int = 10
    peers: bool = False
    check: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="ranks to start on this host (default: one per GPU, 2 on CPU)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--masks", default="causal",
        help="separated by commas, of parts joined by +: causal, full, window=N, documents=COUNT@SEED (drawn), "
        "documents=N:N:... or pack=NAME (see `benchmarks/packs.py`) (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--lengths", help="tokens (default: 32768,65536,131072 on GPUs, 512 on CPU)")
    parser.add_argument("--heads", default="32:8,32:32", help="query:KV heads (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--modes", default="all", help=f"all, or some of {','.join(MODES)}")
    parser.add_argument("--kernel", choices=("auto", *PROVIDERS), default="auto")
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto", help="how blocks travel")
    settings = ("auto", "true", "false")
    parser.add_argument("--keep-received", choices=settings, default="auto", help="as attention.keep_received")
    parser.add_argument("--deterministic", action="store_true", help="as attention.deterministic, for the modes")
    parser.add_argument(
        "--no-overlap", dest="overlap", action="store_false", help="as attention.overlap=false, for the modes"
    )
    parser.add_argument(
        "--iterations", type=int, default=10, help="steps of each of three measurements (default: %(default)s)"
    )
    parser.add_argument("--peers", action="store_true", help="also time other packages' context parallelism")
    parser.add_argument("--check", action="store_true", help="first compare short cases with dense attention in fp64")


def run(arguments: argparse.Namespace) -> None:
    """Measure, and write JSON and a Markdown table after every case.

    Raises:
        ValueError: what cannot be measured.
    """
    names = tuple(MODES) if arguments.modes == "all" else tuple(arguments.modes.split(","))
    for name in names:
        if name not in MODES:
            raise refuse("--modes", name, f"all, or of {', '.join(MODES)}", "Separate names by commas.")
    if arguments.iterations < 1:
        raise refuse("--iterations", arguments.iterations, "1 or more", "Raise it.")
    where = Ranks.of(arguments.ranks, arguments.device, least=1)
    if where.device == "cpu" and arguments.transport == "peer":
        raise refuse("--transport", "peer", "auto or p2p on CPUs", "Only GPUs read each other's memory.")
    lengths = arguments.lengths or ("32768,65536,131072" if where.device == "cuda" else "512")
    asked = cases(arguments.masks, lengths, arguments.heads, arguments.head_dim, arguments.dtype)
    said = {
        name: getattr(arguments, name)
        for name in ("kernel", "transport", "keep_received", "deterministic", "overlap", "iterations")
    }
    ask = Ask(tuple(asked), names, **said, peers=arguments.peers, check=arguments.check)
    what = "context-parallel attention: seconds of a whole step, forward and backward, of the slowest rank"
    unit = f"{where.count} ranks; TFLOP/s per device of visible pairs; " + ", ".join(
        f"{k}={v}" for k, v in said.items()
    )
    report = Report(arguments.out, where.device, what, "attention, forward and backward", unit)
    keep = partial(record, report, where.count, ask)
    print(keep(run_on_ranks(where, measure, where, ask, keep)))


class Measured(NamedTuple):
    """notes, absent: lines about others' packages."""

    found: list[Measurement]
    notes: list[str]
    absent: list[str]


def record(report: Report, ranks: int, ask: Ask, measured: Measured) -> str:
    """Write what has been found so far; returns the tables."""
    found, notes, absent = measured
    data = {
        "ranks": ranks,
        "configuration": {name: value for name, value in asdict(ask).items() if name not in ("cases", "modes")},
        "cases": [asdict(case) | {"pairs": case.mask.pairs} for case in ask.cases],
        "measurements": [asdict(each) | {"seconds": each.seconds} for each in found],
        "notes": notes,
        "absent": absent,
    }
    return report.write(data, "\n\n".join([_table(found), *notes, *absent]))


def measure(rank: int, where: Ranks, ask: Ask, keep: Callable[[Measured], object]) -> Measured:
    """All ranks call this together. keep: told by rank 0 after every case."""
    group, device, n = world_group(), where.local_device, where.count
    bench = Bench(group, device, ask.iterations, ask.check)
    others = peers(group, ask.kernel) if ask.peers else Found([], [], [])
    measured = Measured([], others.notes, others.absent)
    alone = one_device.contenders(n, device.type)
    for case in ask.cases:
        measured.found.extend(bench.run(case, [*alone, *modes(group, case, ask), *others.contenders]))
        if rank == 0:
            keep(measured)
    return measured


def modes(group: dist.ProcessGroup, case: Case, ask: Ask) -> list[Contender]:
    """This package's modes with every option that matters."""
    n = dist.get_world_size(group)
    every = every_mode(n, case.workload, Cluster("here", 1, n, Mesh(1.0)), case.length)
    chosen = [mode for mode in every if mode.name in ask.modes]
    return [Contender(str(mode), partial(_ours, group, mode, ask), ours=True) for mode in chosen]


def _ours(group: dist.ProcessGroup, mode: Mode, ask: Ask, case: Case) -> Made:
    attention = ContextParallelAttention(
        group, schedule=mode, kernel=ask.kernel, transport=ask.transport, keep_received=ask.keep_received,
        deterministic=ask.deterministic, overlap=ask.overlap,
    )  # fmt: skip
    tokens = list(attention.layout(case.mask).tokens(dist.get_rank(group)))
    return Made(partial(attention, mask=case.mask), tokens)


def _table(found: Sequence[Measurement]) -> str:
    """Markdown; times in milliseconds."""
    head = ["mask", "tokens", "heads", "mode", "ms", "x fastest mode", "TFLOP/s", "% of one device", "GiB", "errors"]
    rows = []
    for m in found:
        row = [m.mask, f"{m.length:,}", m.heads, m.name]
        if m.seconds is None:
            rows.append([*row, f"not possible: {m.reason}", *[""] * 5])
            continue
        times = "" if m.times_fastest_mode is None else f"{m.times_fastest_mode:.2f}"
        percent = "" if m.percent_of_one_device is None else f"{m.percent_of_one_device:.1f}"
        gib = "" if m.peak_bytes is None else f"{m.peak_bytes / 2**30:.2f}"
        errors = " ".join(f"{name} {error:.1e}" for name, error in (m.errors or {}).items())
        rows.append([*row, f"{m.seconds * 1e3:.3f}", times, f"{m.tflops:.3g}", percent, gib, errors])
    return table(head, rows)
