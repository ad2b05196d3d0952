"""Kernels of Triton, torch and FlashAttention-4 are compiled by other processes, into caches on disk, all at once."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

_COMPILE_S = 110
_CONFIGURATIONS = 3  # of a Triton kernel


def use_caches() -> None:
    """Let this process and its children keep what FlashAttention-4 compiles; Triton and torch do by themselves."""
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"


def compile_ahead(jobs: Sequence[str], ranks: int, folder: Path) -> Iterator[Path]:
    """Start a process for each job; yield a file, which exists once the process has ended or is late.

    Args:
        jobs: values of the benchmark's option `--only`.
    """
    for number, job in enumerate(jobs):
        ended, log = folder / f"{number}.ended", folder / f"{number}.log"
        command = [sys.executable, "-m", "analysis.benchmarks", "hybrid", "--only", job, "--ranks", str(ranks)]
        command += ["--out", str(folder / f"{number}.json")]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        threading.Thread(target=_await, args=(process, ended, log, job), daemon=True).start()
        yield ended


def _await(process: subprocess.Popen[bytes], ended: Path, log: Path, job: str) -> None:
    try:
        code = process.wait(_COMPILE_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        code = process.wait()
    if code:
        print(f"compiling {job} ended with {code}: {log.read_text()[-2000:]}", flush=True)
    ended.touch()


def compile_little() -> None:
    """Measure few configurations of each Triton kernel, and compile torch's functions once for all lengths."""
    torch._dynamo.config.assume_static_by_default = False
    torch._dynamo.config.suppress_errors = True
    if not torch.cuda.is_available():
        return
    from triton import testing
    from triton.runtime.autotuner import Autotuner

    measure = testing.do_bench
    testing.do_bench = lambda call, **options: measure(call, **{**options, "warmup": 2, "rep": 8})
    prune = Autotuner.prune_configs

    def few(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        found = prune(self, kwargs)
        count = min(len(found), _CONFIGURATIONS)
        return [found[round(i * (len(found) - 1) / max(1, count - 1))] for i in range(count)]

    Autotuner.prune_configs = few
