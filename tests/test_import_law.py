"""The import law of the wings, read from the sources of `megatron_longctx`.

Every import counts, also those inside functions, under TYPE_CHECKING and through `importlib.import_module("…")`.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

PACKAGE = "megatron_longctx"
ROOT = Path(__file__).resolve().parents[1] / PACKAGE
MAX_LINES = 400

# In the order data flows: a wing imports itself and what stands before it.
WINGS = (
    *("core", "config", "planner", "models", "lowbit", "inference", "mcore", "integrations", "training"),
    *("serving", "cli", "__main__", "testing"),
)
# The package's own __init__ is loaded by every import of any wing, so it may know only the core.
INIT = "__init__"
# The only packages that the core may import; those after torch and numpy where they are installed.
CORE_NEEDS = ("torch", "numpy", "triton", "flash_attn")

# What a part may not import, besides what its wing's place says: (part, forbidden module, files excepted).
FORBIDDEN = (
    ("core/layout.py", "torch", ()),
    ("core/plans", "torch", ()),
    ("core/kernels", "torch.distributed", ()),
    ("config", "torch", ("environment.py", "gpus.py")),
    ("planner", "torch", ("measure_links.py",)),
    ("models", "torch.distributed", ()),
    ("inference/loss_ranges.py", "torch", ()),
    ("training/comparison.py", "torch", ()),
    ("training/metrics.py", "torch", ()),
    # The server's packages are optional.
    *((wing, name, ()) for name in ("starlette", "uvicorn") for wing in WINGS if wing != "serving"),
    ("serving", "starlette", ("app.py", "serve.py")),
    ("serving", "prometheus_client", ("metrics.py", "serve.py")),
    ("serving", "xgrammar", ("grammar.py",)),
    ("serving", "uvicorn", ("server.py", "serve.py")),
    *((wing, "megatron", ()) for wing in (INIT, *WINGS) if wing not in ("mcore", "integrations")),
    *(("integrations/trees.py", name, ()) for name in ("megatron", f"{PACKAGE}.mcore", "transformers")),
    # They stand beside the package and are not in its wheel.
    *((wing, name, ()) for name in ("analysis", "tests") for wing in (INIT, *WINGS)),
)


def imported_modules(tree: ast.AST, module: PurePosixPath) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything `module` (its path inside the package) imports.

    `from a import b` gives `a.b`, whether b is a module or not: a prefix of it is the module in either case.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = (PACKAGE, *module.parts)[: -node.level]
                base = ".".join((*above, *([base] if base else [])))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def stands_in(file: str, part: str) -> bool:
    """Whether `file`, inside the package, is `part` or in the folder `part`."""
    return file in (part, f"{part}.py") or file.startswith(f"{part}/")


def broken_laws(name: str, wing: str, file: str) -> Iterator[str]:
    """What is wrong with `wing` importing `name` in `file`."""
    for part, module, excepted in FORBIDDEN:
        if stands_in(file, part) and within(name, module) and file.rsplit("/", 1)[-1] not in excepted:
            yield f"{part} may not import {module}"
    top, _, rest = name.partition(".")
    if top != PACKAGE and wing == "core" and top not in (*CORE_NEEDS, *sys.stdlib_module_names):
        yield f"core may not import {top}: it needs torch and numpy alone"
    target = rest.split(".")[0]
    if top != PACKAGE or not target or (target.startswith("__") and target != "__main__"):
        return  # other packages, megatron_longctx.__version__ and the like
    if target not in WINGS:
        if wing != INIT:
            yield f"{target} is no wing known to this test; give it its place in WINGS"
    elif target != wing and (target != "core" if wing == INIT else WINGS.index(target) > WINGS.index(wing)):
        yield f"{wing} may not import {target}: imports point only up the list"


def violations(root: Path) -> list[str]:
    """Every broken law in the package at `root`, as `file:line: what`."""
    found = []
    for path in sorted(root.rglob("*.py")):
        module = PurePosixPath(path.relative_to(root).as_posix())
        wing = module.parts[0].removesuffix(".py")
        if wing not in (INIT, *WINGS):
            found.append(f"{module}: {wing} is no wing known to this test; give it its place in WINGS")
            continue
        source = path.read_text(encoding="utf-8")
        for line, name in imported_modules(ast.parse(source), module):
            found += [f"{module}:{line}: {law}" for law in broken_laws(name, wing, str(module))]
        if (lines := len(source.splitlines())) > MAX_LINES:
            found.append(f"{module}: {lines} lines, at most {MAX_LINES}; split it")
    return found


def test_the_package_keeps_the_law() -> None:
    files = list(ROOT.rglob("*.py"))
    assert len(files) > 5, f"{ROOT} is not the package"
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "law"),
    [
        ("core/layout.py", "import torch", "core/layout.py may not import torch"),
        ("core/plans/a.py", "def f():\n    from torch.nn import Module", "core/plans may not import torch"),
        ("core/plans/a.py", "from importlib import import_module\nimport_module('torch')", "may not import torch"),
        ("core/kernels/a.py", "from torch import distributed", "core/kernels may not import torch.distributed"),
        ("core/comm/a.py", "from ...config import Config", "core may not import config: imports point only up"),
        ("core/comm/a.py", "from ... import planner", "core may not import planner: imports point only up"),
        ("core/comm/a.py", "import yaml", "core may not import yaml: it needs torch and numpy alone"),
        ("planner/a.py", "from megatron.core import parallel_state", "planner may not import megatron"),
        ("core/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..config import Config", "config"),
        ("planner/links.py", "import torch.distributed as dist", "planner may not import torch"),
        ("training/metrics.py", "import torch", "training/metrics.py may not import torch"),
        ("models/a.py", "import torch.distributed", "models may not import torch.distributed"),
        ("models/a.py", "from ..mcore import model", "models may not import mcore"),
        ("training/a.py", "import megatron.core.models", "training may not import megatron"),
        ("cli/cli.py", "import megatron.core", "cli may not import megatron"),
        ("mcore/a.py", "from ..integrations import megatron_lm", "mcore may not import integrations"),
        ("serving/generate.py", "from uvicorn import Config", "serving may not import uvicorn"),
        ("serving/http_api/parsing.py", "import starlette.requests", "serving may not import starlette"),
        ("integrations/trees.py", "from ..mcore import data", "trees.py may not import megatron_longctx.mcore"),
        ("inference/a.py", f"from {PACKAGE} import training", "inference may not import training"),
        ("training/a.py", "from analysis.benchmarks.peers import parts", "training may not import analysis"),
        ("training/a.py", f"from {PACKAGE}.testing.distributed import start", "training may not import testing"),
        ("testing/a.py", "import megatron.core", "testing may not import megatron"),
        ("__init__.py", "from .config import Config", "__init__ may not import config"),
        ("utils/a.py", "", "utils is no wing known to this test"),
        ("training/a.py", f"from {PACKAGE}.helpers import x", "helpers is no wing known to this test"),
        ("training/names.py", "\n" * (MAX_LINES + 1), f"{MAX_LINES + 1} lines, at most {MAX_LINES}"),
    ],
)
def test_a_broken_law_is_found(tmp_path: Path, file: str, source: str, law: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    found = violations(tmp_path)
    assert len(found) == 1 and law in found[0], found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("planner/measure_links.py", "import torch.distributed as dist"),
        ("config/environment.py", "import torch"),
        ("mcore/a.py", f"from megatron.core import parallel_state\nfrom {PACKAGE}.core.attention import execute"),
        ("core/kernels/a.py", "import torch, numpy, triton\nfrom torch.nn import functional\nfrom .packed import f"),
        ("planner/draw.py", f"from ..core.layout import Layout\nfrom {PACKAGE} import core, __version__"),
        ("training/a.py", f"import {PACKAGE}\nfrom {PACKAGE}.training.metrics import JsonlSink"),
        ("testing/a.py", f"import torch\nfrom {PACKAGE}.cli.cli import main"),
        ("planner/a.py", "import torchvision_like\nimport matplotlib"),
        ("__init__.py", "from .core.attention import ContextParallelAttention"),
    ],
)
def test_what_the_law_allows_is_not_reported(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert violations(tmp_path) == []
