"""The doctor: what it finds here, and that broken packages become findings instead of failures."""

from __future__ import annotations

import platform
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from megatron_longctx.kernels import PROVIDERS
from megatron_longctx.verbs import cli, doctor
from megatron_longctx.verbs.doctor import Row, report

ROOT = Path(doctor.__file__).resolve().parents[2]


def rows_by_name() -> dict[str, Row]:
    rows = report()
    found = {row.name: row for row in rows}
    assert len(found) == len(rows), "two rows of one name"
    return found


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder first on the import path; what tests import from it is forgotten afterwards."""
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


def test_what_is_known_of_every_machine() -> None:
    found = rows_by_name()
    assert platform.python_version() in found["Python"].detail
    assert torch.__version__ in found["torch"].detail
    assert found["CPU"].usable and found["gloo"].usable
    assert found["Megatron-Core"] == Row("packages", "Megatron-Core", True, version("megatron-core"))
    assert found["hydra"] == Row("packages", "hydra", True, version("hydra-core"))
    assert found["CUDA"].usable is torch.cuda.is_available()
    assert found["nccl"].usable is (torch.cuda.is_available() and torch.distributed.is_nccl_available())


@pytest.mark.parametrize(
    ("found", "tested"),
    [("2.11.0", True), ("2.13.1+cu130", True), ("2.14.0", False), ("2.14.0a0+nv26.10", False), ("2.10.2", False)],
)
def test_a_torch_that_is_not_tested_is_named(found: str, tested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the one range that pip goes by."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    monkeypatch.setattr(doctor, "requires", lambda _: wanted)
    monkeypatch.setattr(torch, "__version__", found)
    said = rows_by_name()["torch"].detail
    assert said.startswith(found) and ("NOT TESTED: torch<2.14,>=2.11 is" in said) is not tested


def test_every_kernel_provider_is_listed_with_a_reason_where_it_is_not_usable() -> None:
    kernels = {row.name: row for row in report() if row.area == "kernels"}
    assert set(PROVIDERS) < set(kernels)
    assert kernels["reference"].usable
    assert all(row.detail and row.detail != "usable" for row in kernels.values() if row.usable is False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says why there is no GPU")
def test_without_a_gpu_it_says_why() -> None:
    found = rows_by_name()
    assert "CPU build" in found["CUDA"].detail or "no device found" in found["CUDA"].detail
    assert "found 0" in found["peer memory"].detail


@pytest.mark.gpu
def test_every_gpu_is_listed_with_its_memory() -> None:
    found = rows_by_name()
    assert found["CUDA"].usable and found["nccl"].usable and "nvidia-smi" not in found["CUDA"].detail
    for index in range(torch.cuda.device_count()):
        row = found[f"CUDA {index}"]
        assert torch.cuda.get_device_name(index) in row.detail and "GiB" in row.detail


def test_a_package_whose_import_fails_is_reported_in_one_line(installed: Path) -> None:
    package(installed, "transformer_engine", "raise ImportError('undefined symbol:\\n  _ZN3c104cuda')")
    row = {row.name: row for row in report()}["TransformerEngine"]
    expected = "installed, but its import fails: ImportError: undefined symbol: _ZN3c104cuda"
    assert row == Row("packages", "TransformerEngine", False, expected)


def test_the_other_apex_is_told_apart_and_not_imported(installed: Path) -> None:
    package(installed, "apex", "raise RuntimeError('imported')")
    row = {row.name: row for row in report()}["Apex"]
    assert not row.usable and "it is not NVIDIA Apex" in row.detail


def test_nvidia_apex_needs_its_extensions(installed: Path) -> None:
    package(package(installed, "apex"), "optimizers")
    row = {row.name: row for row in report()}["Apex"]
    assert not row.usable and "amp_C is missing" in row.detail
    (installed / "amp_C.py").write_text("")
    assert {row.name: row for row in report()}["Apex"].usable


def test_a_section_that_breaks_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch, "get_num_threads", broken)
    found = rows_by_name()
    assert found["check failed"] == Row("devices", "check failed", False, "RuntimeError: driver too old")
    assert found["gloo"].usable and found["hydra"].usable


def test_the_command_prints_every_row_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == ""
    for area in ("system", "devices", "transports", "kernels", "packages", "training"):
        assert area in lines
    assert any(line.startswith("  gloo ") and " yes " in line for line in lines)
    assert sum(line.startswith("  ") for line in lines) == len(report())


def test_it_does_not_load_megatron() -> None:
    code = (
        "import sys; from megatron_longctx.verbs.doctor import report; report(); print('megatron.core' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout.strip()) == (0, "False"), result.stderr
