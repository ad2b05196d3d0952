"""Seconds from `megatron-longctx train` to the end of the first step: `python -m analysis.start_up --out FILE.json`.

It prints what asking for GPUs opens in a process, in three ways, and then the milestones of `train` with ranks as forks
and as new processes. The first run fills the caches of kernels, if they are empty.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN = time.time()
PROBE = """
import ctypes, os, sys, time
from pathlib import Path
begin = time.time()
def state(what):
    opened = (os.readlink(f) for f in Path("/proc/self/fd").iterdir() if os.path.islink(f))
    opened = sorted({name for name in opened if name.startswith("/dev/nv")})
    names = [(p / "comm").read_text().strip() for p in Path("/proc/self/task").iterdir()]
    found = f"{len(names)} threads {sorted(set(names))} {opened}"
    print(f"{time.time() - begin:6.2f} {sys.argv[1]:>6} {what}: {found}", flush=True)
def library(name):
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        print("   ", error, flush=True)
        sys.exit()
if sys.argv[1] == "nvml":
    nvml, count = library("libnvidia-ml.so.1"), ctypes.c_int(-1)
    state(f"nvmlInit {nvml.nvmlInit_v2()}")
    state(f"nvmlDeviceGetCount {nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))}: {count.value}")
    state(f"nvmlShutdown {nvml.nvmlShutdown()}")
    sys.exit()
import torch
state("torch")
if sys.argv[1] == "torch":
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    print("    _device_count_nvml", torch.cuda._device_count_nvml(), flush=True)
    state(f"is_available by NVML {torch.cuda.is_available()}")
    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    state(f"is_available {torch.cuda.is_available()}")
    sys.exit()
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import importlib.util
spec = importlib.util.spec_from_file_location("milestones", os.environ["START_UP"])  # a system may have its own
milestones = importlib.util.module_from_spec(spec)
spec.loader.exec_module(milestones)
from megatron_longctx.training import forks
state("forks")
count, capability = forks.in_fork(milestones.ask)
state(f"asked in a fork: {count}, {capability}")
torch.cuda._cached_device_count = count
if capability:
    os.environ["QUACK_ARCH"] = capability
print("    sees_gpu", forks.sees_gpu(), "obstacle", forks.obstacle(), flush=True)
with forks.without_cuda():
    for name in sys.argv[2:]:
        at = time.time()
        try:
            importlib.import_module(name)
        except Exception as error:
            print("   ", name, type(error).__name__, error, flush=True)
        state(f"{name} {time.time() - at:.2f} s, obstacle {forks.obstacle()}")
pid = os.fork()
if pid == 0:
    at = time.time()
    try:
        x = torch.ones(8, 8, device="cuda" if count else "cpu")
        print(f"    a fork computes {float((x @ x).sum())} after {time.time() - at:.2f} s", flush=True)
    except Exception as error:
        print("    a fork FAILS", type(error).__name__, error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
IMPORTS = (
    *("pandas", "pyarrow", "flash_attn.cute.interface", "megatron.core", "megatron_longctx.training.preflight"),
    *("megatron_longctx.training.auto", "megatron_longctx.training.loop"),
)


def left(seconds: float) -> float:
    return seconds - (time.time() - BEGIN)


def probe(how: str, *modules: str) -> None:
    """Print what asking for GPUs opens."""
    environment = os.environ | {"START_UP": str(Path(__file__).parent / "sitecustomize.py"), "PYTHONPATH": _path()}
    words = [sys.executable, "-W", "ignore", "-c", PROBE, how, *modules]
    run = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    print(run.stdout + "".join(run.stderr.splitlines(keepends=True)[-2:]), end="", flush=True)


def train(how: str, folder: Path, device: str, ranks: int, words: Sequence[str], limit: float) -> dict[str, Any]:
    """Train three steps; return the milestones."""
    settings = [
        *("experiment=demo", "model=llama3_8b", "model.num_layers=4", "model.hidden_size=1024"),
        *("model.num_attention_heads=8", "model.num_kv_heads=2", "model.ffn_hidden_size=4096"),
        *("data.seq_length=16384", "data.prefix=data/stdlib", "parallelism=single", "train.save=false"),
        *("train.precision=bf16", f"train.device={device}", "train.steps=3", "optim.warmup_steps=1"),
        *(f"train.global_batch_size={ranks}", f"parallelism.context_parallel_size={ranks}"),
        *(f"train.num_processes={ranks}", f"run.name={how}_{time.time():.0f}", "logging.wandb=disabled", *words),
    ]
    begin = time.time()
    path = f"{Path(__file__).parent}{os.pathsep}{_path()}"
    environment = os.environ | {"T0": str(begin), "HOW": how, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "megatron_longctx", "train", *settings]
    with (folder / f"{how}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    whole, lines = time.time() - begin, (folder / f"{how}.log").read_text().splitlines()
    told = [
        line for line in lines if line.startswith("TL ") or re.search("rror|not forks|first step|step +[123]/", line)
    ]
    print("\n".join(line[:200] for line in told), flush=True)
    first = next((float(line.split()[1]) for line in lines if re.search("^TL .*_one_step", line)), None)
    print(f"== {how}: exit code {code}, the first step ends after {first} s, the job after {whole:.1f} s", flush=True)
    return {"how": how, "exit_code": code, "first_step_s": first, "job_s": whole, "milestones": told}


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def main(argv: Sequence[str] | None = None) -> int:
    """Probe, train in several ways, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="group=NAME and key=value words of the job")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=150, help="no part begins later (default: %(default)s)")
    parser.add_argument("--how", default="asked,spawn,forced,as_is", help="how ranks start (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one job")
    arguments = parser.parse_args(argv)
    folder = arguments.out.resolve().parent / "start_up"
    (folder / "data").mkdir(parents=True, exist_ok=True)
    from megatron_longctx.training.text import Source, prepare

    if not (folder / "data" / "stdlib.bin").exists():
        prepare(Source("stdlib"), folder / "data" / "stdlib", "byte-level")
    for how in () if arguments.quick else ("nvml", "torch"):
        probe(how)
    if not arguments.quick:
        probe("asked", *IMPORTS)
    found = []
    hows = arguments.how.split(",")[: 1 if arguments.quick else None]
    filled = arguments.device == "cpu" or any((Path.home() / ".cache/megatron_longctx/fa4").glob("*"))
    for how in hows if filled or arguments.quick else [hows[0], *hows]:
        if (rest := left(arguments.seconds)) > 15:
            print(f"== {time.time() - BEGIN:.0f} s: {how}", flush=True)
            found.append(train(how, folder, arguments.device, arguments.ranks, arguments.settings, rest + 20))
            arguments.out.write_text(json.dumps({"what": "seconds to the first step", "runs": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
