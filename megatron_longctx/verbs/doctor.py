"""What is installed and usable on this machine, as a table; nothing here needs a run, a rank or a configuration.

A broken optional package is a finding, not a failure: its error is shown in one line and the report goes on.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

# The heads of llama3_8b: what the kernels are asked about.
_HEAD_DIM, _HEADS, _KV_HEADS = 128, 32, 8


@dataclass(frozen=True)
class Row:
    """One finding. `usable`: yes, no, or None where it is information only; `detail`: version or the reason why not."""

    area: str
    name: str
    usable: bool | None
    detail: str


def report() -> list[Row]:
    """All findings, in the order they are printed. Never raises for what is missing or broken."""
    sections: tuple[tuple[str, Callable[[], Iterator[Row]]], ...] = (
        ("system", _system),
        ("devices", _devices),
        ("transports", _transports),
        ("kernels", _kernels),
        ("packages", _packages),
        ("training", _training),
    )
    rows: list[Row] = []
    for area, section in sections:
        try:
            rows.extend(section())
        except Exception as error:  # a broken torch or driver may raise anything; the other sections still count
            rows.append(Row(area, "check failed", False, _one_line(error)))
    return rows


def main() -> int:
    """Print the table. Returns the exit code, which is always 0: this describes, it does not judge."""
    rows = report()
    marks = {True: "yes", False: "no", None: ""}
    names = max(len(row.name) for row in rows)
    area = None
    for row in rows:
        if row.area != area:
            area = row.area
            print(f"{'' if row is rows[0] else chr(10)}{area}")
        print(f"  {row.name:<{names}}  {marks[row.usable]:<3}  {row.detail}")
    return 0


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}"


def _system() -> Iterator[Row]:
    yield Row("system", "Python", None, f"{platform.python_version()} ({platform.platform(terse=True)})")
    yield Row("system", "megatron-longctx", None, _version("megatron-longctx") or "not installed, run from a checkout")
    import torch

    build = torch.version.cuda or torch.version.hip
    found = f"{torch.__version__} ({f'built for CUDA {build}' if build else 'CPU build'})"
    yield Row("system", "torch", None, found + _untested("torch", torch.__version__))


def _untested(name: str, found: str) -> str:
    """What to say of a version that this package does not ask for: pip does not stop one that was there before, or
    that was installed later."""
    try:
        wanted = [Requirement(each) for each in requires("megatron-longctx") or ()]
    except PackageNotFoundError:  # a checkout
        return ""
    tested = next((each.specifier for each in wanted if each.name == name), SpecifierSet())
    # A development version of the next release is one of its own, and is not tested either.
    fits = tested.contains(Version(found).base_version, prereleases=True)
    return "" if fits else f"; NOT TESTED: {name}{tested} is, others may fail anywhere"


def _devices() -> Iterator[Row]:
    import torch

    yield Row("devices", "CPU", True, f"{os.cpu_count()} threads, torch uses {torch.get_num_threads()}")
    if not torch.cuda.is_available():
        reason = "no device found" if torch.version.cuda else "torch is a CPU build"
        yield Row("devices", "CUDA", False, f"{reason}; driver: {_driver()}")
        return
    yield Row("devices", "CUDA", True, f"{torch.cuda.device_count()} device(s); driver: {_driver()}")
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        detail = f"{found.name}, {found.total_memory / 2**30:.1f} GiB, compute capability {found.major}.{found.minor}"
        yield Row("devices", f"CUDA {index}", True, detail)


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        return "nvidia-smi not found"
    except (OSError, subprocess.TimeoutExpired) as error:
        return _one_line(error)
    lines = (result.stdout if result.returncode == 0 else result.stdout + result.stderr).split("\n")
    return lines[0].strip() or f"nvidia-smi ended with exit code {result.returncode}"


def _transports() -> Iterator[Row]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield Row("transports", "all", False, "torch was built without torch.distributed")
        return
    gloo = dist.is_gloo_available()
    yield Row("transports", "gloo", gloo, "between CPU ranks" if gloo else "torch was built without it")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not dist.is_nccl_available():
        yield Row("transports", "nccl", False, "torch was built without it")
    elif devices == 0:
        yield Row("transports", "nccl", False, "no CUDA device")
    else:
        yield Row("transports", "nccl", True, ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    reason = _why_no_peer_memory(devices)
    yield Row("transports", "peer memory", reason is None, reason or f"every pair of {devices} devices has access")


def _why_no_peer_memory(devices: int) -> str | None:
    """Why symmetric (peer) memory cannot be used on this host; None where it can."""
    import torch

    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except Exception as error:  # builds without it fail in different ways
        return f"torch's symmetric memory: {_one_line(error)}"
    if devices < 2:
        return f"needs at least 2 CUDA devices on one host, found {devices}"
    apart = [
        f"{a} and {b}"
        for a in range(devices)
        for b in range(a + 1, devices)
        if not torch.cuda.can_device_access_peer(a, b)
    ]
    return f"no peer access between devices {', '.join(apart)}" if apart else None


def _kernels() -> Iterator[Row]:
    import torch

    from megatron_longctx.kernels import KernelRequest, available

    device = "cuda" if torch.cuda.is_available() else "cpu"
    request = KernelRequest(device, torch.bfloat16, _HEAD_DIM, _HEADS, _KV_HEADS)
    asked = f"{device}, bf16, {_HEADS} query and {_KV_HEADS} KV heads of {_HEAD_DIM}"
    yield Row("kernels", "asked for", None, asked)
    for name, reason in available(request):
        yield Row("kernels", name, reason is None, reason or "usable")


def _packages() -> Iterator[Row]:
    # Its version only: megatron.core belongs to mcore/, and importing it takes seconds.
    megatron = _version("megatron-core")
    yield Row("packages", "Megatron-Core", megatron is not None, megatron or "not installed")
    yield _package("TransformerEngine", "transformer_engine.pytorch", "transformer-engine")
    yield _flash_attention()
    yield _apex()
    yield _package("triton", "triton", "triton")
    yield _package("wandb", "wandb", "wandb")
    yield _package("TensorBoard", "tensorboard", "tensorboard")
    yield _package("hydra", "hydra", "hydra-core")
    yield _package("starlette", "starlette", "starlette")
    yield _package("uvicorn", "uvicorn", "uvicorn")


def _training() -> Iterator[Row]:
    """Which fused parts of a training step there are. Megatron's optimizer takes the first Adam of these two."""
    engine, apex = _package("TransformerEngine", "transformer_engine.pytorch", "transformer-engine"), _apex()
    adam = next((row.name for row in (engine, apex) if row.usable), None)
    missing = "torch's Adam instead; TransformerEngine or NVIDIA Apex has a fused one"
    yield Row("training", "fused Adam", adam is not None, f"{adam}'s" if adam else missing)
    makers = {"TransformerEngine's layers": engine.usable}
    makers["Apex"] = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    found = ", ".join(name for name, usable in makers.items() if usable)
    missing = "computed, then added up; TransformerEngine's layers, and NVIDIA Apex built with "
    missing += "fused_weight_gradient_mlp_cuda, do both at once"
    yield Row(
        "training", "weight gradients", bool(found), f"added up by the product itself ({found})" if found else missing
    )


def _flash_attention() -> Row:
    from ..kernels.providers.fa4 import VERSION, package_problem

    problem = package_problem()
    return Row("packages", "flash-attn-4", problem is None, problem or VERSION)


def _package(name: str, module: str, distribution: str) -> Row:
    """Whether `module` can be imported, which a version alone does not tell."""
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return Row("packages", name, False, "not installed")
    try:
        found: ModuleType = importlib.import_module(module)
    except Exception as error:  # compiled packages fail with anything from ImportError to undefined symbols
        return Row("packages", name, False, f"installed, but its import fails: {_one_line(error)}")
    return Row("packages", name, True, _version(distribution) or str(getattr(found, "__version__", "unknown version")))


def _apex() -> Row:
    """NVIDIA Apex, told apart from the package called apex on PyPI without importing that one."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Row("packages", "Apex", False, "not installed")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    if not any((folder / "optimizers").is_dir() for folder in folders):
        return Row("packages", "Apex", False, "the package called apex on PyPI is installed; it is not NVIDIA Apex")
    if importlib.util.find_spec("amp_C") is None:
        return Row("packages", "Apex", False, "NVIDIA Apex without its CUDA extensions (amp_C is missing)")
    return _package("Apex", "apex.optimizers", "apex")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
