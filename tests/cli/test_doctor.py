"""The doctor: what it finds on any machine, and that broken packages become findings instead of failures."""

import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_longctx.cli import cli, compile_kernels, doctor
from megatron_longctx.cli.doctor import Finding, report
from megatron_longctx.core.kernels import PROVIDERS
from megatron_longctx.core.kernels.providers import fa4

ROOT = Path(doctor.__file__).resolve().parents[2]


def findings_by_name() -> dict[str, Finding]:
    findings = [each for section in report().values() for each in section]
    by_name = {each.name: each for each in findings}
    assert len(by_name) == len(findings), "two findings have the same name"
    return by_name


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder at the front of the import path. Modules that tests import from it are removed afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(sys.modules)
    for name in list(sys.modules):
        if name.split(".")[0] in ("apex", "amp_C", "flash_attn"):
            monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [name for name in sys.modules if name not in before]:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def package(folder: Path, name: str, source: str = "") -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / "__init__.py").write_text(source)
    return path


def test_findings_of_any_machine() -> None:
    found = findings_by_name()
    assert platform.python_version() in found["Python"].detail
    assert torch.__version__ in found["torch"].detail
    assert found["CPU"].usable and found["gloo"].usable
    assert found["Megatron-Core"] == Finding("Megatron-Core", True, version("megatron-core"))
    assert found["hydra"] == Finding("hydra", True, version("hydra-core"))
    assert found["CUDA"].usable is torch.cuda.is_available()
    assert found["nccl"].usable is (torch.cuda.is_available() and torch.distributed.is_nccl_available())


@pytest.mark.parametrize(
    ("installed_version", "tested"),
    [("2.11.0", True), ("2.15.1+cu132", True), ("2.16.0", False), ("2.16.0a0+nv26.12", False), ("2.10.2", False)],
)
def test_an_untested_torch_is_named(installed_version: str, tested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The range is the one in pyproject.toml, which pip also uses."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    monkeypatch.setattr(doctor, "requires", lambda _: requirements)
    monkeypatch.setattr(torch, "__version__", installed_version)
    detail = findings_by_name()["torch"].detail
    assert detail.startswith(installed_version) and ("NOT TESTED: torch" in detail) is not tested


def test_a_torch_that_no_gpu_has_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requires", lambda _: ["torch<2.16,>=2.11"])
    for build, installed, named in (("13.0", "2.13.0", True), ("13.0", "2.11.0", False), (None, "2.13.0", False)):
        monkeypatch.setattr(torch, "__version__", installed)
        monkeypatch.setattr(torch.version, "cuda", build)
        monkeypatch.setattr(torch.version, "hip", None)
        detail = findings_by_name()["torch"].detail
        assert ("; tested on CPUs, and with 2.11 on GPUs" in detail) is named


def test_services_memory_and_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine own.example login user password " + "a" * 40 + "\n")
    (tmp_path / "netrc").chmod(0o600)
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho slurm 24.05.1\n")
    (tmp_path / "sbatch").chmod(0o755)
    for name, value in {"NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": "https://own.example:8080"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = findings_by_name()
    assert found["W&B login"].usable and found["W&B login"].detail.startswith("own.example")
    assert found["Slurm"] == Finding("Slurm", True, "slurm 24.05.1")
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho no configuration\nexit 1\n")
    assert Finding("Slurm", False, "no configuration") in doctor._services()
    for name in ("memory", "disk", "TMPDIR", "shared memory"):
        assert re.match(r"[\d.]+ GiB (free|unused) of [\d.]+ GiB", found[name].detail), name
    assert Path(found["documentation"].detail, "training.md").is_file()
    monkeypatch.setenv("NETRC", str(tmp_path / "gone"))
    monkeypatch.setenv("PATH", str(tmp_path / "gone"))
    found = findings_by_name()
    assert found["W&B login"].usable is False and "log in by `wandb login`" in found["W&B login"].detail
    assert found["Slurm"] == Finding("Slurm", False, "sbatch not on PATH")


def test_every_extra_has_a_line() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {f"[{extra}]" for extra in extras} == {each.name for each in report()["extras"]}


def test_every_kernel_provider_is_listed_with_a_reason_if_it_is_not_usable() -> None:
    kernels = {each.name: each for each in report()["kernels"]}
    assert set(PROVIDERS) < set(kernels)
    assert kernels["reference"].usable
    assert all(each.detail and each.detail != "usable" for each in kernels.values() if each.usable is False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the reason for no GPU")
def test_without_a_gpu_it_gives_the_reason() -> None:
    found = findings_by_name()
    assert "CPU build" in found["CUDA"].detail or "no device found" in found["CUDA"].detail
    assert "found 0" in found["peer memory"].detail


@pytest.mark.gpu
def test_every_gpu_is_listed_with_its_memory() -> None:
    found = findings_by_name()
    assert found["CUDA"].usable and found["nccl"].usable and "nvidia-smi" not in found["CUDA"].detail
    for index in range(torch.cuda.device_count()):
        gpu = found[f"CUDA {index}"]
        assert torch.cuda.get_device_name(index) in gpu.detail and "GiB" in gpu.detail


def test_a_package_whose_import_fails_is_reported_in_one_line(installed: Path) -> None:
    package(installed, "transformer_engine", "raise ImportError('undefined symbol:\\n  _ZN3c104cuda')")
    expected = "installed, but its import fails: ImportError: undefined symbol: _ZN3c104cuda"
    assert findings_by_name()["TransformerEngine"] == Finding("TransformerEngine", False, expected)


def test_the_other_apex_is_recognized_and_not_imported(installed: Path) -> None:
    package(installed, "apex", "raise RuntimeError('imported')")
    apex = findings_by_name()["Apex"]
    assert not apex.usable and "it is not NVIDIA Apex" in apex.detail


def test_nvidia_apex_needs_its_extensions(installed: Path) -> None:
    package(package(installed, "apex"), "optimizers")
    apex = findings_by_name()["Apex"]
    assert not apex.usable and "amp_C is missing" in apex.detail
    (installed / "amp_C.py").write_text("")
    assert findings_by_name()["Apex"].usable


def test_a_section_that_fails_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch, "get_num_threads", broken)
    assert report()["devices"] == [Finding("check failed", False, "RuntimeError: driver too old")]
    found = findings_by_name()
    assert found["gloo"].usable and found["hydra"].usable


def test_the_command_prints_every_finding_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == ""
    for area in ("system", "devices", "transports", "kernels", "extras", "packages", "training", "services"):
        assert area in lines
    assert any(line.startswith("  gloo ") and " yes " in line for line in lines)
    assert sum(line.startswith("  ") for line in lines) == sum(map(len, report().values()))


def test_it_does_not_import_megatron() -> None:
    code = "import sys; from megatron_longctx.cli.doctor import report; report(); print('megatron.core' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout.strip()) == (0, "False"), result.stderr


def test_kernels_are_compiled_for_every_kind_of_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With tensors that have no data, so that no GPU is asked."""
    asked: set[tuple[Any, ...]] = set()

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Any) -> tuple[Tensor, ...]:
        assert all(isinstance(x, FakeTensor) for x in (q, k, v, *rest))
        window = options.get("window_size_left"), options.get("window_size_right")
        asked.add((bool(rest), "cu_seqlens_q" in options, options["causal"], window, q.shape[-2:], k.shape[-2:]))
        return (q, k, v) if rest else (q, q.new_empty(q.shape[:-1]).mT)

    if not torch.backends.cuda.is_built():  # which then has not even such tensors on GPUs
        monkeypatch.setattr(compile_kernels, "_DEVICE", torch.device("cpu"))
    monkeypatch.setattr(fa4, "package_problem", lambda: None)
    monkeypatch.setattr(fa4, "_interface", lambda: SimpleNamespace(_flash_attn_fwd=attend, _flash_attn_bwd=attend))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("FLASH_ATTENTION_ARCH", "CUTE_DSL_ARCH", "FLASH_ATTENTION_NUM_SMS"):
        monkeypatch.setenv(name, "of another machine")
    words = ["model=llama3_8b", "model.head_dim=160", "model.window=4096", "parallelism.tensor_parallel_size=2"]
    assert cli.main(["doctor", "--compile", *words]) == 0
    assert "megatron_longctx/fa4 has 0 kernels" in capsys.readouterr().out
    heads = torch.Size((16, 160)), torch.Size((4, 160))
    masks = ((True, (None, None)), (False, (None, None)), (False, (128, 0)), (False, (128, None)))
    both = (False, True)
    assert asked == {(back, packed, *mask, *heads) for back in both for packed in both for mask in masks}


def test_compiling_that_would_help_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FLASH_ATTENTION_ARCH", "CUTE_DSL_ARCH", "FLASH_ATTENTION_NUM_SMS"):
        monkeypatch.setenv(name, "of another machine")
    monkeypatch.setattr(fa4, "package_problem", lambda: "the package flash-attn-4 is not installed")
    assert cli.main(["doctor", "--compile"]) == 2
    asked = "--compile=the default recipe: expected what FlashAttention-4 computes here"
    assert f"{asked}; the package flash-attn-4 is not installed" in capsys.readouterr().err
    monkeypatch.setattr(fa4, "package_problem", lambda: None)
    assert cli.main(["doctor", "--compile", "model=llama3_8b", "model.head_dim=72"]) == 2
    assert "head_dim=72, v_head_dim=72 are not supported, only multiples of 32" in capsys.readouterr().err
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    assert cli.main(["doctor", "--compile", "model=llama3_8b"]) == 2
    assert "CACHE_ENABLED=0: expected 1, so that kernels are kept. Unset it." in capsys.readouterr().err
