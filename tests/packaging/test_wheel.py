"""The wheel: its content, and that it works without the checkout; an editable installation reads the checkout."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from megatron_longctx.config.extras import EXTRAS
from tests.core.attention.test_alone import run_alone
from tests.shared.jobs import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def ran(command: list[str], cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a command that must succeed. Return its standard output."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")} | {
        "OMP_NUM_THREADS": "1"
    }
    result = subprocess.run(
        command, cwd=cwd, env=clean | dict(environment or {}), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from the checkout (in isolation only if its build tool is not installed)."""
    folder = tmp_path_factory.mktemp("wheel")
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    ran([*pip, *isolation, "--wheel-dir", str(folder), str(ROOT)], folder)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the wheel."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    ran([*pip, "--target", str(target), str(wheel)], target)
    return target


def tracked(folder: str, *suffixes: str) -> Iterator[str]:
    """Yield the files of a folder of the checkout, relative to the checkout."""
    for path in sorted((ROOT / folder).rglob("*")):
        if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts:
            yield path.relative_to(ROOT).as_posix()


def test_the_package_is_the_only_top_level_name(members: set[str]) -> None:
    tops = {name.split("/")[0] for name in members}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"megatron_longctx"}


def test_the_wheel_has_code_recipes_and_launch_scripts(members: set[str]) -> None:
    expected = set(tracked("megatron_longctx", ".py"))
    expected |= {f"megatron_longctx/{name}" for name in tracked("recipes", ".yaml")}
    expected |= {f"megatron_longctx/{name}" for name in tracked("launch", ".sh", ".sbatch", ".md")}
    expected |= {f"megatron_longctx/{name}" for name in tracked("docs", ".md")}
    expected.add("megatron_longctx/training/dashboard.html")
    assert len(expected) > 60
    assert expected <= members, f"missing: {sorted(expected - members)}"


def test_the_wheel_has_nothing_else(members: set[str]) -> None:
    assert not [name for name in members if "__pycache__" in name or name.endswith((".pyc", ".so", ".bin"))]
    assert not [name for name in members if name.startswith(("megatron_longctx/tests", "megatron_longctx/analysis"))]


def test_the_metadata(wheel: Path, members: set[str]) -> None:
    from megatron_longctx import __version__

    assert wheel.name.startswith(f"megatron_longctx-{__version__}-py3-none-any")
    info = f"megatron_longctx-{__version__}.dist-info"
    assert f"{info}/licenses/LICENSE" in members
    with zipfile.ZipFile(wheel) as archive:
        entry, metadata = (archive.read(f"{info}/{name}").decode() for name in ("entry_points.txt", "METADATA"))
    assert "[console_scripts]\nmegatron-longctx = megatron_longctx.__main__:main" in entry
    plain = metadata.replace('"', "'")
    assert "Requires-Dist: megatron-core==0.16.1; (python_version < '3.12') and extra == 'megatron'" in plain
    assert "Requires-Dist: megatron-core==0.19.2; (python_version >= '3.12') and extra == 'megatron'" in plain
    assert "Requires-Dist: starlette>=1.0; extra == 'serve'" in plain
    required = re.findall(r"^Requires-Dist: (.+)$", plain, re.MULTILINE)
    base = {re.split(r"[<>= ;]", each)[0] for each in required if "extra ==" not in each}
    assert base == {"torch", "numpy"}
    assert re.findall(r"^Provides-Extra: (.+)$", plain, re.MULTILINE) == sorted(EXTRAS)


def test_the_wheel_works_with_torch_and_numpy_alone(installed: Path) -> None:
    """The attention can be imported, and the command and Megatron's layers say which extra they need."""
    output = run_alone(f"""
sys.path.insert(0, {str(installed)!r})
from megatron_longctx import ContextParallelAttention, Layout, Mask
from megatron_longctx.__main__ import main
print(sys.modules["megatron_longctx"].__file__)
ContextParallelAttention()
sys.stderr = sys.stdout
for words in ("plan experiment=demo", "train --help", "data --source stdlib --out x", "compare x", "serve", "doctor"):
    sys.argv[1:] = words.split()
    print(main())
try:
    import megatron_longctx.mcore.spec
except ImportError as error:
    print(error)
""").splitlines()
    remedy = "is not installed. Run pip install 'megatron-longctx[train]'."
    assert output[0] == str(installed / "megatron_longctx/__init__.py")
    packages = ("hydra", "hydra", "megatron", "matplotlib", "hydra")
    assert output[1:11] == [w for name in packages for w in (f"megatron-longctx: the package {name} {remedy}", "2")]
    for extra in EXTRAS:
        (line,) = (line for line in output if line.split()[:1] == [f"[{extra}]"])
        assert line.split()[1] == "no" and line.endswith(f": pip install 'megatron-longctx[{extra}]'")
    assert output[-2] == "0"
    assert output[-1] == (
        "megatron_longctx.mcore: the package megatron is not installed. Run pip install 'megatron-longctx[megatron]'."
    )


def test_launch_scripts_stay_executable(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        mode = archive.getinfo("megatron_longctx/launch/local.sh").external_attr >> 16
    assert mode & 0o111


def test_the_installed_command_finds_its_recipes(installed: Path, tmp_path: Path) -> None:
    for name in ("recipes", "launch"):  # of another project; they must not be found
        (installed / name).mkdir(exist_ok=True)
        (tmp_path / name).mkdir()
    (tmp_path / "recipes/config.yaml").write_text("not: ours\n")
    words = ["plan", "experiment=demo", "data.seq_length=64"]
    environment = {"PYTHONPATH": str(installed)}
    out = ran([sys.executable, "-m", "megatron_longctx.cli.cli", *words], tmp_path, environment)
    assert out.startswith("zigzag forward: 4 ranks, 64 tokens (zigzag), causal mask")
    script = ran([str(installed / "bin/megatron-longctx"), *words], tmp_path, environment)
    assert script == out


WHERE = """
import megatron_longctx
from megatron_longctx.config.files import bundled
from megatron_longctx.training.compose import compose_config
print(megatron_longctx.__file__)
for name in ("recipes", "launch"):
    print(bundled(name))
print(compose_config(["experiment=demo"]).optim.lr)
"""


def test_the_installed_package_uses_its_own_folders(installed: Path, tmp_path: Path) -> None:
    package = installed / "megatron_longctx"
    found = ran([sys.executable, "-c", WHERE], tmp_path, {"PYTHONPATH": str(installed)}).split()
    assert found == [str(package / "__init__.py"), *(str(package / name) for name in ("recipes", "launch")), "0.003"]


def test_an_editable_installation_reads_the_checkout(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs the build tool")
    build = "import hatchling.build, sys; print(hatchling.build.build_editable(sys.argv[1]))"
    name = ran([sys.executable, "-c", build, str(tmp_path)], ROOT).split()[-1]
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / name) as archive:
        archive.extractall(site)
    # Copies in the installation become outdated.
    for copy in site.rglob("*.yaml"):
        copy.write_text("stale")
    # Another editable installation in this environment must not be found instead.
    editable = f"import site, sys; sys.path.remove({str(ROOT)!r}) if {str(ROOT)!r} in sys.path else None\n"
    editable += f"site.addsitedir({str(site)!r})\n{WHERE}"
    found = ran([sys.executable, "-c", editable], tmp_path).split()
    assert found == [
        str(ROOT / "megatron_longctx/__init__.py"),
        *(str(ROOT / part) for part in ("recipes", "launch")),
        "0.003",
    ]


def test_copies_inside_the_package_of_a_checkout_are_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_longctx.config import files

    for folder in ("recipes", "megatron_longctx/recipes"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(files, "__file__", str(tmp_path / "megatron_longctx/config/files.py"))
    assert files.bundled("recipes") == tmp_path / "megatron_longctx/recipes", "installed: others are foreign"
    (tmp_path / "pyproject.toml").write_text("")
    assert files.bundled("recipes") == tmp_path / "recipes"


def requirements() -> dict[str, set[str]]:
    """The names of what every extra requires, besides other extras; the base's under the key ``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = project["optional-dependencies"] | {"": project["dependencies"]}
    names = {extra: {re.split(r"[<>=;\[ ]", word)[0] for word in words} for extra, words in required.items()}
    return {extra: words - {"megatron-longctx"} for extra, words in names.items()}


def test_every_requirement_is_pinned() -> None:
    """`make setup` installs the tested version of every dependency of the project and of its extras except gpu."""
    required = set().union(*(words for extra, words in requirements().items() if extra != "gpu"))
    pins = [line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = [(name, version.partition(";")[2]) for name, _, version in pins if version and not name.startswith("#")]
    assert required <= {name for name, _ in pinned} and len(pinned) == len(set(pinned)), "one pin per Python"


def test_the_modules_of_an_extra_are_of_what_it_requires() -> None:
    """What `doctor` and the messages about missing packages say of the extras is what pyproject.toml says."""
    required, distributions = requirements(), packages_distributions()
    assert set(EXTRAS) == set(required) - {""}
    for extra, modules in EXTRAS.items():
        for module in modules:
            names = distributions.get(module, [module.replace(".", "-")] if "." in module else [])
            found = {re.sub(r"[-_.]+", "-", name).lower() for name in names}
            # Packages of extras that the tests do not need may be missing here.
            assert not found or found & {re.sub(r"[-_.]+", "-", name) for name in required[extra]}, (extra, module)
