"""The `bench` verbs: start the ranks, measure, write what was found."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, ProcessRaisedException

from ..comm import choose_transport, transport_name
from ..comm.local_ranks import run_ranks
from ..config import refuse
from ..metrics.environment import environment
from ..schedules.calibration import Calibration, calibration_path, load_calibration, save_calibration
from ..schedules.cost import GIB, Workload
from ..topology import Cluster, save_cluster
from ..training.launcher import JobFailed
from . import attention
from .calibrate import Effort, calibrate, measured_cluster
from .packages import Found
from .peers import peers

logger = logging.getLogger(__name__)
_TIMEOUT_S = 1800.0
_FEWEST_TOKENS = 64  # below, nothing is left to fit rates to


@dataclass(frozen=True)
class Where:
    """ranks: how many to start here. device: cpu or cuda. kernel, transport: of the attention calls."""

    ranks: int
    device: str
    kernel: str = "auto"
    transport: str = "auto"

    @classmethod
    def of(cls, ranks: int | None, device: str, kernel: str = "auto") -> Where:
        """Checked against this machine; `ranks=None` for one per GPU, `auto` for CUDA where there is any.

        Raises:
            ValueError: fewer than 2 ranks, or more than there are GPUs.
        """
        cuda = torch.cuda.is_available() and device != "cpu"
        if device == "cuda" and not cuda:
            raise refuse("--device", device, "a CUDA device here; torch sees none", "Use --device cpu.")
        gpus = torch.cuda.device_count() if cuda else 0
        count = ranks if ranks is not None else (gpus or 2)
        if count < 2:
            raise refuse("--ranks", count, "2 or more", "Links join two ranks at least.")
        if cuda and count > gpus:
            raise refuse("--ranks", count, f"at most {gpus}, the GPUs here", "Use fewer, or --device cpu.")
        return cls(count, "cuda" if cuda else "cpu", kernel)


@dataclass(frozen=True)
class How:
    """iterations: of each measurement. check: compare results with one device's. peers: also measure other packages.
    keep_received, graph_tokens: as in the configuration's `attention`."""

    iterations: int
    check: bool = False
    peers: bool = False
    keep_received: str = "auto"
    graph_tokens: int = 4096

    def setting(self, where: Where) -> attention.Setting:
        return attention.Setting(where.kernel, where.transport, self.keep_received, self.graph_tokens)


def run_calibrate(
    where: Where,
    workload: Workload,
    max_tokens: int | None = None,
    cluster_file: Path | None = None,
    length: int | None = None,
) -> Path:
    """`bench calibrate`: measure and keep; returns the file.

    Args:
        length: of the sequences at hand, whose passes are measured besides those of usual lengths.
    """
    if max_tokens is not None and max_tokens < _FEWEST_TOKENS:
        raise refuse("--max-tokens", max_tokens, f"{_FEWEST_TOKENS} or more", "Raise it, or leave it out.")
    if cluster_file is not None:
        _check_yaml("--cluster", cluster_file)
    found: Calibration = start(where, _calibrate, workload, where, (max_tokens, length))[0]
    path = calibration_path(found.device, where.ranks, workload, found.transport)
    save_calibration(found, path)
    if cluster_file is not None:
        save_cluster(found.cluster, cluster_file)
        logger.info("cluster written to %s", cluster_file)
    _say(found)
    logger.info("calibration written to %s", path)
    return path


def run_links(where: Where, out: Path) -> None:
    """`bench links`: measure the links between the ranks and write a cluster file."""
    _check_yaml("--out", out)
    cluster: Cluster = start(where, _links)[0]
    save_cluster(cluster, out)
    print(out.read_text(), end="")
    logger.info("written to %s", out)


def _check_yaml(option: str, path: Path) -> None:
    if path.suffix not in (".yaml", ".yml") or not path.parent.is_dir():
        raise refuse(option, path, "a .yaml file in a folder that exists", "Give another file name.")


def cases(lengths: str, heads: str, head_dim: int, dtype: str) -> list[attention.Case]:
    """The cases that `bench attention` is told.

    Raises:
        ValueError: not numbers separated by commas, or heads that do not divide.
    """
    if head_dim < 1:
        raise refuse("--head-dim", head_dim, "1 or more", "Raise it.")
    found = []
    for pair in heads.split(","):
        for length in lengths.split(","):
            try:
                h, g = (int(number) for number in pair.split(":"))
                found.append(attention.Case(int(length), h, g, head_dim, 2 if dtype == "bf16" else 4))
            except ValueError:
                raise refuse(
                    "--heads --lengths", f"{heads} {lengths}", "like 32:8,32:32 and 32768,65536", "Correct them."
                ) from None
            if h < 1 or g < 1 or h % g or int(length) < 1:
                raise refuse("--heads", pair, "query heads that are a multiple of the KV heads", "Correct them.")
    return found


def run_attention(where: Where, cases: Sequence[attention.Case], modes: str, how: How, out: Path) -> None:
    """`bench attention`: measure modes, write JSON and a Markdown table beside it, after every case.

    Args:
        modes: `all`, or names separated by commas.
    """
    names = attention.ALL_MODES if modes == "all" else tuple(modes.split(","))
    for name in names:
        if name not in attention.ALL_MODES:
            raise refuse("--modes", name, f"all, or of {', '.join(attention.ALL_MODES)}", "Separate names by commas.")
    if where.device == "cpu" and where.transport == "peer":
        raise refuse("--transport", "peer", "auto or p2p on CPUs", "Only GPUs read each other's memory.")
    if how.iterations < 1:
        raise refuse("--iterations", how.iterations, "1 or more", "Raise it.")
    if how.graph_tokens < 0:
        raise refuse("--graph-tokens", how.graph_tokens, "0 or more", "Take 0 for no graphs.")
    if out.suffix != ".json" or not out.parent.is_dir():  # the table beside it would overwrite a .md
        raise refuse("--out", out, "a .json file in a folder that exists", "Give another file name.")
    found = start(where, _attention, tuple(cases), names, how, (where, out))[0]
    print("\n".join(_record_attention(where, how, out, found)))
    logger.info("written to %s and %s", out, out.with_suffix(".md"))


class _Attention(NamedTuple):
    """notes, absent: lines about other packages, those that are here and those that are not."""

    found: list[attention.Measurement]
    calibrations: dict[str, Calibration]
    notes: list[str]
    absent: list[str]


def _record_attention(where: Where, how: How, out: Path, measured: _Attention) -> list[str]:
    """Write the JSON and the table, whose lines it returns."""
    found, calibrations, notes, absent = measured
    setting = how.setting(where)
    chosen = attention.choices(found)
    facts = environment()
    data = {
        "what": "context-parallel attention, forward and backward, causal",
        "ranks": where.ranks,
        "iterations": how.iterations,
        "configuration": asdict(setting),
        "environment": facts,
        "calibrations": {
            heads: {"kernel": c.kernel, "transport": c.transport, "merge_gibps": c.costs.merge_gibps,
                    "messages": c.costs.messages, "message_s": c.costs.message_s, "blocking": c.costs.blocking}
            for heads, c in calibrations.items()
        },
        "measurements": attention.as_data(found),
        "auto": chosen,
        "notes": notes,
        "absent": absent,
    }  # fmt: skip
    out.write_text(json.dumps(data, indent=1) + "\n")
    lines = [
        attention.table(found),
        "",
        "| tokens | heads | auto takes | best measured | slower |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {c['length']:,} | {c['heads']} | {c['auto']} | {c['best']} | {c['slower']:.1%} |" for c in chosen]
    for line in (*notes, *absent):
        lines += ["", line]
    head = f"{where.ranks} x {facts['device']}, {facts['date'][:10]}, commit {str(facts['commit'])[:9]}. Times in ms."
    head += f" keep_received={setting.keep_received}, graph_tokens={setting.graph_tokens}."
    out.with_suffix(".md").write_text("\n".join([head, "", *lines]) + "\n")
    return lines


def start(where: Where, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `fn(rank, *args)` in ranks of this host, or as the rank that torchrun has started.

    Raises:
        ValueError: what a rank refused.
        JobFailed: a rank failed otherwise.
    """
    backend = "nccl" if where.device == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if where.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=_TIMEOUT_S))
        result = fn(dist.get_rank(), *args)
        dist.barrier()
        dist.destroy_process_group()
        return [result]
    if where.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        with _ranks_end_with_this_process():
            return run_ranks(fn, where.ranks, *args, timeout=_TIMEOUT_S, backend=backend)
    except ProcessRaisedException as error:
        said = str(error).strip().splitlines()[-1]
        if said.startswith("ValueError: "):
            raise ValueError(said.removeprefix("ValueError: ")) from error
        raise JobFailed(f"rank {error.error_index} failed: {said}") from error
    except (ProcessException, TimeoutError) as error:  # killed; or hanging
        raise JobFailed(str(error)) from error


@contextlib.contextmanager
def _ranks_end_with_this_process() -> Iterator[None]:
    """Ranks started inside the context are killed where it is left by an error or a signal, TERM included."""
    others = set(multiprocessing.active_children())
    in_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)) if in_main else None
    try:
        yield
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        if in_main:
            signal.signal(signal.SIGTERM, previous)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _links(rank: int) -> Cluster:
    return measured_cluster(_group(), _device())


def _calibrate(rank: int, workload: Workload, where: Where, tokens: tuple[int | None, int | None]) -> Calibration:
    device = _device()
    return calibrate(_group(), device, workload, (where.kernel, where.transport), Effort.of(device, *tokens))


def _attention(
    rank: int, cases: tuple[attention.Case, ...], names: tuple[str, ...], how: How, place: tuple[Where, Path]
) -> _Attention:
    device, group = _device(), _group()
    where, out = place
    calibrations = {}
    for case in cases:
        heads = f"{case.num_heads}:{case.num_kv_heads}"
        if heads not in calibrations:
            calibrations[heads] = _kept_or_measured(rank, group, device, case.workload, where)
    bench = attention.Bench(group, device, where.kernel, how.iterations, how.check)
    contenders = attention.modes(group, how.setting(where), names)
    others = peers(group, where.kernel) if how.peers else Found([], [], [])
    contenders += others.contenders

    def keep(found: list[attention.Measurement]) -> None:
        if rank == 0:
            _record_attention(where, how, out, _Attention(found, calibrations, others.notes, others.absent))

    return _Attention(bench.run(cases, contenders, calibrations, keep), calibrations, others.notes, others.absent)


def _kept_or_measured(
    rank: int, group: dist.ProcessGroup, device: torch.device, workload: Workload, where: Where
) -> Calibration:
    """The calibration in the cache if rank 0 has one, else a new one, which it keeps."""
    transport = transport_name(choose_transport(where.transport, group, device))
    path = calibration_path(str(environment()["device"]), dist.get_world_size(group), workload, transport)
    answer: list[Calibration | None] = [load_calibration(path) if rank == 0 and path.is_file() else None]
    dist.broadcast_object_list(answer, src=0, group=group, device=device)
    if answer[0] is not None:
        return answer[0]
    found = calibrate(group, device, workload, (where.kernel, where.transport))
    if rank == 0:
        save_calibration(found, path)
    return found


def _say(found: Calibration) -> None:
    cluster, costs = found.cluster, found.costs
    link = cluster.route(0, 1)
    logger.info(
        "%s, kernel %s: %.3g GiB/s from rank to rank, latency %.1f us",
        found.device, found.kernel, link.gibps, link.latency_s * 1e6,
    )  # fmt: skip
    for sample in costs.messages:
        rate = sample.num_bytes / sample.seconds / GIB
        logger.info("  ring shift of %9d bytes: %9.1f us, %7.2f GiB/s", sample.num_bytes, sample.seconds * 1e6, rate)
    logger.info(
        "  kernel calls up to %.1f TFLOP/s forward, %.1f backward (%d shapes); merging %.0f GiB/s",
        costs.forward_tflops, costs.backward_tflops, len(costs.kernels), costs.merge_gibps,
    )  # fmt: skip
    for mode in costs.modes:
        logger.info(
            "  %s, %d tokens, %s: %.2f times what its parts come to",
            mode.mode, mode.length, "backward" if mode.backward else "forward", mode.ratio,
        )  # fmt: skip
