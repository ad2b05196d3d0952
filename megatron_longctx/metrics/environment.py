"""What a run ran on: versions and devices, so that its numbers can be read later."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_longctx import files, gpus

_FILE = "environment.json"
_PACKAGES = (
    "megatron-longctx",
    "megatron-core",
    "torch",
    "triton",
    "transformer-engine",
    "flash-attn-4",
    "flash-attn",
    "ring-flash-attn",
    "apex",
)


def environment() -> dict[str, Any]:
    """Date (UTC), packages, CUDA, cuDNN and NCCL versions, device, and the commit where this is a checkout."""
    import torch  # here, so that the formulas and sinks need no torch

    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "device": "cpu",
        "cpu_threads_per_rank": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        nccl_version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        nccl, sharing = ".".join(map(str, nccl_version)), gpus.ranks_per_gpu()
        facts |= {
            "device": torch.cuda.get_device_name() + (f" shared by {sharing} ranks" if sharing > 1 else ""),
            "devices_per_host": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "nccl": nccl,
        }
    return facts


def write(folder: Path, ranks: int) -> None:
    """Write `environment()` and the number of a run's ranks into its folder."""
    files.write_text(folder / _FILE, json.dumps(environment() | {"ranks": ranks}, indent=2) + "\n")


def read(folder: Path) -> dict[str, Any]:
    """What `write` wrote; empty where there is none, as in runs of earlier versions."""
    try:
        found = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def commit() -> str | None:
    """The checkout's commit, with `+` if files differ from it; LONGCTX_COMMIT where the checkout has no history."""
    root = Path(__file__).resolve().parents[2]
    try:
        if not (root / ".git").exists():
            return os.environ.get("LONGCTX_COMMIT")
        run = {"cwd": root, "capture_output": True, "text": True, "check": True, "timeout": 10}
        head = subprocess.run(["git", "rev-parse", "HEAD"], **run).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain"], **run).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):  # no git: the numbers are worth recording all the same
        return os.environ.get("LONGCTX_COMMIT")
    return str(head) + ("+" if changed else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
