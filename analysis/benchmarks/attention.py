"""Context-parallel attention by mode: whole steps, forward and backward, compared with one device and other packages.

`packed` measures packs of documents and one window, with TransformerEngine and ring-flash-attn on the same packs.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch.distributed as dist

from megatron_longctx.config import SWITCHES, TRANSPORTS
from megatron_longctx.config.cluster import Cluster, Mesh
from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.errors import refuse
from megatron_longctx.core.kernels import auto_order
from megatron_longctx.core.kernels.interface import PROVIDERS
from megatron_longctx.core.plans import MODES, Mode
from megatron_longctx.core.plans.modes import SearchContext
from megatron_longctx.training.ranks import Ranks, run_on_ranks, world_group

from .cases import Case, cases, packs
from .measure import Bench, Contender, Measurement, Prepared
from .peers import Peers, peers
from .report import Report, add_ranks, check_least, table

PACKED = {
    "masks": ",".join([*(f"pack={name}" for name in packs()), "window=4096"]),
    "lengths": "65536",
    "heads": "32:8",
    "peers": True,
}
"""The defaults of `python -m analysis.benchmarks packed`."""


@dataclass(frozen=True)
class Options:
    """What to measure; names of fields that recipes have as `attention.*` mean the same here."""

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
    add_ranks(parser)
    parser.add_argument(
        "--masks", default="causal",
        help="separated by commas, of parts joined by +: causal, full, window=N, documents=COUNT@SEED (drawn), "
        "documents=N:N:... or pack=NAME (see `analysis/benchmarks/cases.py`) (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--lengths", help="tokens (default: 32768,65536,131072 on GPUs, 512 on CPU)")
    parser.add_argument("--heads", default="32:8,32:32", help="query:KV heads (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--modes", default="all", help=f"all, or some of {','.join(MODES)}")
    parser.add_argument("--kernel", choices=("auto", *PROVIDERS), default="auto")
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto", help="how blocks travel")
    parser.add_argument("--keep-received", choices=SWITCHES, default="auto", help="as attention.keep_received")
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
    """Measure, and write JSON and a Markdown table after every case."""
    names = tuple(MODES) if arguments.modes == "all" else tuple(arguments.modes.split(","))
    for name in names:
        if name not in MODES:
            raise refuse("--modes", name, f"all, or of {', '.join(MODES)}", "Separate names by commas.")
    check_least("--iterations", arguments.iterations)
    ranks = Ranks.of(arguments.ranks, arguments.device, least=1)
    if ranks.device == "cpu" and arguments.transport == "peer":
        raise refuse("--transport", "peer", "auto or p2p on CPUs", "Only GPUs read each other's memory.")
    lengths = arguments.lengths or ("32768,65536,131072" if ranks.device == "cuda" else "512")
    chosen = cases(arguments.masks, lengths, arguments.heads, arguments.head_dim, arguments.dtype)
    settings = {
        name: getattr(arguments, name)
        for name in ("kernel", "transport", "keep_received", "deterministic", "overlap", "iterations")
    }
    options = Options(tuple(chosen), names, **settings, peers=arguments.peers, check=arguments.check)
    what = "context-parallel attention: seconds of a whole step, forward and backward, of the slowest rank"
    listed = ", ".join(f"{k}={v}" for k, v in settings.items())
    unit = f"{ranks.count} ranks; TFLOP/s per device of visible pairs; {listed}"
    report = Report(arguments.out, ranks.device, what, "attention, forward and backward", unit)
    save = partial(record, report, ranks.count, options)
    print(save(run_on_ranks(ranks, measure, ranks, options, save)))


class Results(NamedTuple):
    """The measurements, and lines about other packages that are measured or absent."""

    measured: list[Measurement]
    notes: list[str]
    absent: list[str]


def record(report: Report, ranks: int, options: Options, results: Results) -> str:
    """Write the results so far; return the tables."""
    measured, notes, absent = results
    data = {
        "ranks": ranks,
        "configuration": {name: value for name, value in asdict(options).items() if name not in ("cases", "modes")},
        "cases": [asdict(case) | {"pairs": case.mask.pairs} for case in options.cases],
        "measurements": [asdict(each) | {"seconds": each.seconds} for each in measured],
        "notes": notes,
        "absent": absent,
    }
    return report.write(data, "\n\n".join([_table(measured), *notes, *absent]))


def measure(rank: int, ranks: Ranks, options: Options, save: Callable[[Results], object]) -> Results:
    """Measure all cases. All ranks call this together; rank 0 calls `save` after every case."""
    group, device, n = world_group(), ranks.local_device, ranks.count
    bench = Bench(group, device, options.iterations, options.check)
    others = peers(group, options.kernel) if options.peers else Peers([], [], [])
    results = Results([], others.notes, others.absent)
    for case in options.cases:
        contenders = [*_one_device(n, device.type), *_modes(group, case, options), *others.contenders]
        results.measured.extend(bench.run(case, contenders))
        if rank == 0:
            save(results)
    return results


def _one_device(n: int, device_type: str) -> list[Contender]:
    """Return every fast kernel of `auto` on one device, which computes as many FLOPs as each of `n` devices."""

    def prepare(kernel: str, case: Case) -> Prepared:
        share, attention = case.share(n), ContextParallelAttention(kernel=kernel)
        return Prepared(lambda q, k, v: attention(q, k, v, mask=share.mask), range(share.length), share)

    name = "one GPU" if device_type == "cuda" else "one CPU"
    kernels = [kernel for kernel in auto_order(device_type) if kernel != "reference"]
    return [Contender(f"{name}, {kernel}", partial(prepare, kernel), ours=True) for kernel in kernels]


def _modes(group: dist.ProcessGroup, case: Case, options: Options) -> list[Contender]:
    """Return this package's modes, each with its relevant options."""
    n = dist.get_world_size(group)
    context = SearchContext(n, case.length, Cluster("here", 1, n, Mesh(1.0)))
    chosen: list[Mode] = []
    for name, mode in MODES.items():
        with suppress(ValueError):  # it cannot run on `n` ranks
            chosen += mode.candidates(context) if name in options.modes else ()
    return [Contender(str(mode), partial(_ours, group, mode, options), ours=True) for mode in chosen]


def _ours(group: dist.ProcessGroup, mode: Mode, options: Options, case: Case) -> Prepared:
    attention = ContextParallelAttention(
        group, schedule=mode, kernel=options.kernel, transport=options.transport, 
        keep_received=SWITCHES[options.keep_received],
        deterministic=options.deterministic, overlap=options.overlap,
    )  # fmt: skip
    tokens = list(attention.layout(case.mask).tokens(dist.get_rank(group)))
    return Prepared(partial(attention, mask=case.mask), tokens)


def _table(measured: Sequence[Measurement]) -> str:
    """Return Markdown with times in milliseconds."""
    head = ["mask", "tokens", "heads", "mode", "ms", "x fastest mode", "TFLOP/s", "% of one device", "GiB", "errors"]
    rows = []
    for m in measured:
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
