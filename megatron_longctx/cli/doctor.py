"""The `doctor` verb: a table of what is installed and usable on this machine.

A missing or broken package is a finding: the report shows its error in one line and continues.
"""

import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires
from itertools import combinations
from netrc import NetrcParseError, netrc
from pathlib import Path
from tempfile import gettempdir
from types import ModuleType
from typing import NamedTuple
from urllib.parse import urlparse

from ..config.extras import EXTRAS, absent, install, version_of
from ..config.files import bundled

_ON_GPUS = (2, 11)  # the release of torch that is tested on GPUs
_HEAD_DIM, _HEADS, _KV_HEADS = 128, 32, 8  # of llama3_8b: the report has the kernels that support these


class Finding(NamedTuple):
    """Whether something is usable (None: for information), with its version or the reason why it is not."""

    name: str
    usable: bool | None
    detail: str


def report() -> dict[str, list[Finding]]:
    """Return all findings, keyed by section of the table. Missing or broken packages raise no error."""
    findings: dict[str, list[Finding]] = {}
    for section in (_system, _devices, _transports, _kernels, _extras, _packages, _training, _services):
        found = findings.setdefault(section.__name__[1:], [])
        try:
            found.extend(section())
        except Exception as error:  # a broken torch or driver may raise any exception; other sections still count
            found.append(Finding("check failed", False, _one_line(error)))
    return findings


def main(compile: Sequence[str] | None = None) -> int:
    """Print the table, or compile the kernels of these settings. Return 0, also if something is missing."""
    if compile is not None:
        from .compile_kernels import compile_kernels

        compile_kernels(compile)
        return 0
    findings = report()
    marks = {True: "yes", False: "no", None: ""}
    width = max(len(each.name) for section in findings.values() for each in section)
    for number, (area, section) in enumerate(findings.items()):
        print(f"\n{area}" if number else area)
        for each in section:
            print(f"  {each.name:<{width}}  {marks[each.usable]:<3}  {each.detail}")
    return 0


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}"


def _system() -> Iterator[Finding]:
    yield Finding("Python", None, f"{platform.python_version()} ({platform.platform(terse=True)})")
    yield Finding("megatron-longctx", None, version_of("megatron-longctx") or "not installed, run from a checkout")
    import torch

    build = torch.version.cuda or torch.version.hip
    torch_build = f"{torch.__version__} ({f'built for CUDA {build}' if build else 'CPU build'})"
    untested = _untested("torch", torch.__version__)
    if not untested and build and _release(torch.__version__) != _ON_GPUS:
        untested = f"; tested on CPUs, and with {'.'.join(map(str, _ON_GPUS))} on GPUs"
    yield Finding("torch", None, torch_build + untested)
    yield Finding("documentation", None, str(bundled("docs")))


def _untested(name: str, installed: str) -> str:
    """Return a warning if this package does not allow the installed version, which pip does not always prevent."""
    try:
        tested = next(each for each in requires("megatron-longctx") or () if re.match(rf"{name}\b", each))
    except PackageNotFoundError:  # a checkout
        return ""
    low, high = sorted(_release(bound) for bound in re.findall(r"[\d.]+", tested))
    # A development version of the next release counts as that release, which is not tested either.
    return "" if low <= _release(installed) < high else f"; NOT TESTED: {tested} is, others may fail anywhere"


def _release(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version: without the package `packaging`, which an extra brings."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _devices() -> Iterator[Finding]:
    import torch

    yield Finding("CPU", True, f"{os.cpu_count()} threads, torch uses {torch.get_num_threads()}")
    page = os.sysconf("SC_PAGE_SIZE")
    free, total = (page * os.sysconf(f"SC_{name}PHYS_PAGES") / 2**30 for name in ("AV", ""))
    yield Finding("memory", None, f"{free:.1f} GiB unused of {total:.1f} GiB")
    for name, folder in {"disk": Path.cwd(), "TMPDIR": Path(gettempdir()), "shared memory": Path("/dev/shm")}.items():
        if folder.is_dir():
            disk = shutil.disk_usage(folder)
            yield Finding(name, None, f"{disk.free / 2**30:.1f} GiB free of {disk.total / 2**30:.1f} GiB in {folder}")
    if not torch.cuda.is_available():
        reason = "no device found" if torch.version.cuda else "torch is a CPU build"
        yield Finding("CUDA", False, f"{reason}; driver: {_driver()}")
        return
    yield Finding("CUDA", True, f"{torch.cuda.device_count()} device(s); driver: {_driver()}")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.1f} GiB"
        yield Finding(f"CUDA {index}", True, f"{gpu.name}, {memory}, compute capability {gpu.major}.{gpu.minor}")


def _driver() -> str:
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _first_line(*command: str) -> str:
    """Return the first line of a command's output, or why there is none."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        return f"{command[0]} not found"
    except (OSError, subprocess.TimeoutExpired) as error:
        return _one_line(error)
    lines = (result.stdout if result.returncode == 0 else result.stdout + result.stderr).split("\n")
    return lines[0].strip() or f"{command[0]} ended with exit code {result.returncode}"


def _transports() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    gloo = dist.is_gloo_available()
    yield Finding("gloo", gloo, "between CPU ranks" if gloo else "torch was built without it")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not dist.is_nccl_available():
        yield Finding("nccl", False, "torch was built without it")
    elif devices == 0:
        yield Finding("nccl", False, "no CUDA device")
    else:
        yield Finding("nccl", True, ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    reason = _why_no_peer_memory(devices)
    yield Finding("peer memory", reason is None, reason or f"every pair of {devices} devices has access")


def _why_no_peer_memory(devices: int) -> str | None:
    """Return why symmetric (peer) memory cannot be used on this host; None if it can."""
    import torch

    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except Exception as error:  # builds without it fail in different ways
        return f"torch's symmetric memory: {_one_line(error)}"
    if devices < 2:
        return f"needs at least 2 CUDA devices on one host, found {devices}"
    access = torch.cuda.can_device_access_peer
    apart = [f"{a} and {b}" for a, b in combinations(range(devices), 2) if not access(a, b)]
    return f"no peer access between devices {', '.join(apart)}" if apart else None


def _kernels() -> Iterator[Finding]:
    import torch

    from megatron_longctx.core.kernels import KernelRequest, available

    device = "cuda" if torch.cuda.is_available() else "cpu"
    request = KernelRequest(device, torch.bfloat16, _HEAD_DIM, _HEADS, _KV_HEADS)
    heads = f"{_HEADS} query and {_KV_HEADS} KV heads of {_HEAD_DIM}"
    yield Finding("asked for", None, f"{device}, bf16, {heads}")
    for name, reason in available(request):
        yield Finding(name, reason is None, reason or "usable")


def _extras() -> Iterator[Finding]:
    """Yield for every extra of this package whether what it brings is installed."""
    for extra in EXTRAS:
        missing = absent(extra)
        detail = f"without {', '.join(missing)}: {install(extra)}" if missing else "installed"
        yield Finding(f"[{extra}]", not missing, detail)


def _packages() -> Iterator[Finding]:
    from ..core.kernels.providers.fa4 import VERSION, package_problem

    # Only its version: importing megatron.core takes seconds, and only the wing mcore may.
    megatron = version_of("megatron-core")
    yield Finding("Megatron-Core", megatron is not None, megatron or "not installed")
    yield _transformer_engine()
    problem = package_problem()
    yield Finding("flash-attn-4", problem is None, problem or VERSION)
    yield _apex()
    for name in ("triton", "wandb", "starlette", "uvicorn"):
        yield _package(name, name, name)
    yield _package("TensorBoard", "tensorboard", "tensorboard")
    yield _package("hydra", "hydra", "hydra-core")


def _training() -> Iterator[Finding]:
    """Yield which fused parts of a training step are available."""
    engine, apex = _transformer_engine(), _apex()
    adam = next((each.name for each in (engine, apex) if each.usable), None)  # Megatron's order
    missing = "torch's Adam instead; TransformerEngine or NVIDIA Apex has a fused one"
    yield Finding("fused Adam", adam is not None, f"{adam}'s" if adam else missing)
    layers = {"TransformerEngine's layers": engine.usable}
    layers["Apex"] = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    fused = ", ".join(name for name, usable in layers.items() if usable)
    missing = (
        "computed, then added up; TransformerEngine's layers, and NVIDIA Apex built with "
        "fused_weight_gradient_mlp_cuda, do both at once"
    )
    yield Finding("weight gradients", bool(fused), f"added up by the product itself ({fused})" if fused else missing)


def _services() -> Iterator[Finding]:
    """Yield whether W&B and Slurm can be used from here; nothing is sent."""
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        known = "WANDB_API_KEY" in os.environ or netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        known = False
    login = "" if known else "; log in by `wandb login`: until then, figures go to files (logging.wandb=offline)"
    yield Finding("W&B login", known, f"{host}, WANDB_MODE={os.environ.get('WANDB_MODE', '')}{login}")
    slurm = _first_line("sbatch", "--version") if shutil.which("sbatch") else "sbatch not on PATH"
    yield Finding("Slurm", slurm.startswith("slurm"), slurm)  # installed, it fails without its configuration
    if job := os.environ.get("SLURM_JOB_ID"):
        yield Finding("Slurm job", None, f"{job} on {os.environ.get('SLURM_JOB_NUM_NODES', '?')} nodes")


def _transformer_engine() -> Finding:
    return _package("TransformerEngine", "transformer_engine.pytorch", "transformer-engine")


def _package(name: str, module: str, distribution: str) -> Finding:
    """Import `module`: an installed package may still be broken."""
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return Finding(name, False, "not installed")
    try:
        imported: ModuleType = importlib.import_module(module)
    except Exception as error:  # compiled packages raise anything from ImportError to undefined symbols
        return Finding(name, False, f"installed, but its import fails: {_one_line(error)}")
    return Finding(name, True, version_of(distribution) or str(getattr(imported, "__version__", "unknown version")))


def _apex() -> Finding:
    """Find NVIDIA Apex without importing the unrelated package called apex on PyPI."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding("Apex", False, "not installed")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    if not any((folder / "optimizers").is_dir() for folder in folders):
        return Finding("Apex", False, "the package called apex on PyPI is installed; it is not NVIDIA Apex")
    if importlib.util.find_spec("amp_C") is None:
        return Finding("Apex", False, "NVIDIA Apex without its CUDA extensions (amp_C is missing)")
    return _package("Apex", "apex.optimizers", "apex")
