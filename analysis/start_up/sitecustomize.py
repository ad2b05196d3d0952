"""Python imports this file by its name: it prints milestones of the launcher and of rank 0, in seconds since $T0.

With $HOW=spawn, ranks start as new processes.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections import Counter
from types import ModuleType
from typing import Any

T0, HOW = float(os.environ.get("T0", time.time())), os.environ.get("HOW", "")
TIMED = {
    "megatron_longctx.training.compose": ["compose_config"],
    "megatron_longctx.training.launcher": ["_accept", "_run_ranks", "run_local", "run"],
    "megatron_longctx.training.forks": ["in_fork"],
    "megatron_longctx.training.preflight": ["check", "check_kernel", "local_world_size", "device_type"],
    "megatron_longctx.training.rendezvous": ["join_group", "use_gpu"],
    "megatron_longctx.training.loop": ["Trainer.__init__", "Trainer._build", "Trainer._resume", "Trainer._one_step"],
    "megatron_longctx.mcore.step": ["TrainStep.run"],
    "megatron_longctx.mcore.groups": ["initialize"],
    "megatron_longctx.core.kernels.interface": ["choose_kernel"],
    "megatron.core.pipeline_parallel.schedules": ["forward_step", "backward_step"],
}
NAMED = {
    *TIMED, "torch", "megatron.core", "flash_attn.cute.interface", "cutlass", "transformers", "triton", "pandas",
    "megatron_longctx.training.auto", "torch._inductor.compile_fx", "torch._dynamo", "matplotlib",
}  # fmt: skip
_seen: Counter[str] = Counter()


def say(what: str) -> None:
    rank = os.environ.get("RANK")
    if rank in (None, "0"):
        os.write(2, f"TL {time.time() - T0:6.2f} {'launcher' if rank is None else 'rank 0':>8} {what}\n".encode())


def _timed(module: ModuleType, path: str) -> None:
    *outer, name = path.split(".")
    owner: Any = functools.reduce(getattr, outer, module)
    fn = getattr(owner, name, None)
    if fn is None:
        return

    @functools.wraps(fn)
    def run(*args: Any, **options: Any) -> Any:
        _seen[path] += 1
        if _seen[path] > 2:
            return fn(*args, **options)
        begin = time.time()
        try:
            return fn(*args, **options)
        finally:
            say(f"{path} {time.time() - begin:.2f} s")

    setattr(owner, name, run)


def _tell(forks: Any) -> None:
    """Print why ranks cannot be forks."""
    obstacle = forks.obstacle

    def told() -> str | None:
        found: str | None = obstacle()
        say(f"obstacle: {found}")
        return "this is what is measured" if HOW == "spawn" else found

    forks.obstacle = told


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name = inner, name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        begin = time.time()
        self._inner.exec_module(module)
        if time.time() - begin > 0.2:
            say(f"imported {self._name}, {time.time() - begin:.2f} s")
        for path in TIMED.get(self._name, ()):
            _timed(module, path)
        if self._name == "megatron_longctx.training.forks":
            _tell(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in NAMED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader, name)
        return spec


if "HOW" in os.environ:
    sys.meta_path.insert(0, _Finder())
    say("python starts")
