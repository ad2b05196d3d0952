"""What a run ran on, so that its numbers can be interpreted later, and what distinguishes it from other runs."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from . import Config, files, gpus, layout_of
from .extras import version_of

_FILE = "environment.json"
_PACKAGES = (
    *("megatron-longctx", "megatron-core", "torch", "triton", "transformer-engine"),
    *("flash-attn-4", "flash-attn", "ring-flash-attn", "apex"),
)
_AXES = {"cp": "context", "tp": "tensor", "pp": "pipeline", "dp": "data"}


def environment() -> dict[str, Any]:
    """Return the date (UTC), commit, versions of packages, CUDA, cuDNN and NCCL, and the device."""
    import torch  # here, so that the formulas and sinks need no torch

    described: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: installed for name in _PACKAGES if (installed := version_of(name))},
        "device": "cpu",
        "cpu_threads_per_rank": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        nccl_version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        nccl, sharing = ".".join(map(str, nccl_version)), gpus.ranks_per_gpu()
        described |= {
            "device": torch.cuda.get_device_name() + (f" shared by {sharing} ranks" if sharing > 1 else ""),
            "devices_per_host": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "nccl": nccl,
        }
    return described


def write(folder: Path, ranks: int) -> None:
    """Write `environment()` and the run's number of ranks into its folder."""
    files.write_text(folder / _FILE, json.dumps(environment() | {"ranks": ranks}, indent=2) + "\n")


def read(folder: Path) -> dict[str, Any]:
    """Return what `write` wrote; empty if it is missing, as in runs of earlier versions."""
    try:
        written = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return written if isinstance(written, dict) else {}


def commit() -> str | None:
    """Return the checkout's commit, with `+` if files differ from it; LONGCTX_COMMIT without a git history."""
    root = Path(__file__).resolve().parents[2]
    try:
        if not (root / ".git").exists():
            return os.environ.get("LONGCTX_COMMIT")
        run = {"cwd": root, "capture_output": True, "text": True, "check": True, "timeout": 10}
        head = subprocess.run(["git", "rev-parse", "HEAD"], **run).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain"], **run).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):  # no git: the numbers are still worth recording
        return os.environ.get("LONGCTX_COMMIT")
    return str(head) + ("+" if changed else "")


def facts(config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts by which tables, the dashboard and W&B distinguish, group and filter runs, keyed by name.

    `config` is the content of a `resolved.yaml` of any version, `environment` what `read` returns.
    """
    par, sizes = config.get("parallelism", {}), _sizes(config, environment)
    mode = par.get("schedule", "unknown") if sizes["cp"] > 1 else "one rank"
    train = config.get("train", {})
    fp8 = train.get("fp8", "none")
    return {
        "model": config.get("model", {}).get("name", "unknown"),
        "length": config.get("data", {}).get("seq_length"),
        "mode": mode,
        "parallelism": " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one rank",
        "precision": train.get("precision", "unknown") + ("" if fp8 == "none" else f" FP8 {fp8}"),
        "recompute": config.get("recompute", {}).get("mode", "none"),
        "hardware": environment.get("device", "unknown"),
    }


def labels(config: Config, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's `group`, `job_type` and `tags` in W&B: as in `logging`, or defaults made from its facts.

    With the defaults, runs that differ only in their mode are in one group.
    """
    logging, run = config.logging, facts(config.as_dict(), environment)
    sizes = (f"{axis}{size}" for axis, size in _sizes(config.as_dict(), environment).items())
    tags = (run["model"], run["mode"], f"layout {layout_of(config)}", *sizes, run["hardware"], run["precision"])
    return {
        "group": logging.wandb_group or f"{run['model']}-{run['length']}",
        "job_type": logging.wandb_job_type or run["mode"],
        "tags": logging.wandb_tags.split(",") if logging.wandb_tags else [tag[:64] for tag in dict.fromkeys(tags)],
    }


def _sizes(config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, int]:
    """Return the ranks of every axis. If data parallelism is not set, its ranks are those that the others leave."""
    par = config.get("parallelism", {})
    sizes = {axis: par.get(f"{name}_parallel_size") or 1 for axis, name in _AXES.items()}
    if not par.get("data_parallel_size"):
        sizes["dp"] = max(1, environment.get("ranks", 1) // prod(sizes.values()))
    return sizes
