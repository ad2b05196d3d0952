"""Run an unmodified Megatron-LM script on CPUs: `torchrun … -m megatron_longctx.integrations.cpu pretrain_gpt.py …`.

`mcore.cpu` lets Megatron-Core run without CUDA; here is what Megatron-LM's training loop asks for besides. The script
needs `--distributed-backend gloo`, `--use-cpu-initialization`, `--transformer-impl local` and its fusions switched off.
"""

import contextlib
import importlib
import os
import runpy
import sys
from collections import defaultdict
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import distribution
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ..core.errors import refuse
from ..mcore import cpu

_DEVICE = SimpleNamespace(major=8, minor=0, name="cpu", total_memory=2**34, multi_processor_count=1)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _each(names: tuple[str, ...], result: Any = None) -> dict[str, Any]:
    """Return a function for each name, all with the same result."""
    return {name: lambda *args, **kwargs: result for name in names}


def apply() -> bool:
    """Make `megatron.training` usable without CUDA; return False, and change nothing, where a CUDA device exists."""
    if torch.cuda.is_available():
        return False
    config: Any = importlib.import_module("torch._dynamo.config")
    config.disable = True  # Megatron's experts are compiled, for the device that the functions below pretend
    cpu.apply()
    memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    replaced: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            **_each((*memory, "device_memory_used"), 0),
            **_each(("empty_cache", "ipc_collect", "reset_peak_memory_stats")),
            **_each(("manual_seed", "manual_seed_all")),  # torch.manual_seed seeds this generator
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_capability": lambda device=None: (_DEVICE.major, _DEVICE.minor),
            "get_device_properties": lambda device=None: _DEVICE,
            "memory_stats": lambda device=None: defaultdict(int),
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            **{f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in ("Float", "Half", "BFloat16", "Long")},
        },
        torch.cuda.nvtx: _each(("range_push", "range_pop")),
        torch.optim.Optimizer: _each(("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")),
        torch.nn.Module: {"cuda": lambda self, device=None: self},
        dist: {"barrier": _without(dist.barrier, "device_ids")},
        torch.utils.data.DataLoader: {"__init__": _without(torch.utils.data.DataLoader.__init__, "pin_memory")},
    }
    for owner, values in replaced.items():
        for name, value in values.items():
            setattr(owner, name, value)
    return True


def _without(call: Any, name: str) -> Any:
    """Return a function that ignores a keyword that needs a GPU."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(name, None)
        return call(*args, **kwargs)

    return wrapper


def _use_compiled_helpers() -> None:
    """Let data sets use the compiled functions of the installed Megatron-Core, where Megatron-LM would compile them."""
    name = "megatron.core.datasets.helpers_cpp"
    for file in distribution("megatron-core").files or ():
        if file.name.startswith("helpers_cpp.") and file.name.endswith(tuple(EXTENSION_SUFFIXES)):
            spec = spec_from_file_location(name, file.locate())
            assert spec is not None and spec.loader is not None
            sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
            utils: Any = importlib.import_module("megatron.core.datasets.utils")
            utils.compile_helpers = _nothing


def main() -> None:
    """Run the script that the first argument names, with the remaining ones."""
    script = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else ""
    if not os.path.isfile(script):
        remedy = "Name pretrain_gpt.py of a checkout of Megatron-LM."
        raise refuse("script", script or "none", "a file", remedy)
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(script))
    if apply():
        # It compiles fused functions, and draws random numbers, as many as a rank has tokens.
        initialize: Any = importlib.import_module("megatron.training.initialize")
        initialize._warmup_jit_function = _nothing
        with contextlib.suppress(ImportError):  # gone in 0.19; it compiles for CUDA
            fused: Any = importlib.import_module("megatron.legacy.fused_kernels")
            fused.load = _nothing
        # 0.19 allocates these statistics of packs on the device "cuda:" + current_device().
        training: Any = importlib.import_module("megatron.training.training")
        training._seqlen_stats_in_iteration = torch.zeros(2, dtype=torch.float64)
    _use_compiled_helpers()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
