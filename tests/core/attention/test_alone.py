"""The core runs in an environment with torch and numpy alone, and loads little."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "megatron_longctx"
MAX_FILES, MAX_LINES = 60, 8000

# torch, what it requires, and numpy: the packages of a new environment after `pip install torch numpy`.
_INSTALLED = (
    "torch functorch torchgen numpy sympy mpmath networkx jinja2 markupsafe fsspec filelock typing_extensions "
    "setuptools pkg_resources _distutils_hack distutils triton nvidia cuda"
)
ALONE = f"""
import sys
from importlib.machinery import PathFinder
installed = set({_INSTALLED!r}.split()) | sys.stdlib_module_names | {{"{PACKAGE}", "__main__"}}

class Installed(PathFinder):
    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.split(".")[0]
        return PathFinder.find_spec(name, path, target) if top in installed or top.startswith("_") else None

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
sys.path.insert(0, {str(ROOT)!r})
"""
"""Lines of Python after which a process has nothing but torch, numpy and this package."""


def is_core(path: Path) -> bool:
    """Whether `path`, inside the package, is a module of the core."""
    return path.parts[0] in ("core", "__init__.py")


def run_alone(code: str, *args: str, timeout: float = 1800) -> str:
    """Run `code` in a new process that has torch, numpy and this package alone; return its output."""
    command = [sys.executable, "-I", "-c", ALONE + code, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_is_small() -> None:
    """At most 60 files and 8,000 lines, and of other packages only torch and numpy."""
    output = run_alone(f"""
from {PACKAGE} import ContextParallelAttention
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "{PACKAGE}":
        print(module.__file__)
""")
    files = [Path(line) for line in output.split()]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert len(files) <= MAX_FILES and lines <= MAX_LINES, f"{len(files)} files, {lines:,} lines"
    assert all(is_core(file.relative_to(ROOT / PACKAGE)) for file in files)


def test_every_module_of_the_core_loads_alone() -> None:
    """The rest of the package is absent, too. Only what needs Triton may be missing with it."""
    paths = (file.relative_to(ROOT / PACKAGE) for file in (ROOT / PACKAGE).rglob("*.py"))
    core = sorted(
        ".".join((PACKAGE, *path.with_suffix("").parts)).removesuffix(".__init__") for path in paths if is_core(path)
    )
    assert len(core) > 40
    run_alone(f"""
import importlib
core = set({core!r})

class OnlyCore:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("{PACKAGE}") and name not in core:
            raise ModuleNotFoundError(f"{{name}} is not core")

sys.meta_path.insert(0, OnlyCore())
for name in sorted(core):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
""")
