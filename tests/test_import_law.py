"""The import law of the rooms and the size budget, read from the sources of `megatron_longctx`.

Every import counts, also those inside functions, under TYPE_CHECKING and through `importlib.import_module("…")`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from tests.shared.core import is_core

PACKAGE = "megatron_longctx"
ROOT = Path(__file__).resolve().parents[1] / PACKAGE
MAX_LINES = 400

# In the order data flows: a room imports itself and what stands before it.
ROOMS = (
    *("names", "errors", "cache", "files", "gpus", "layout", "topology", "schedules", "config", "compose", "sweep"),
    *("models", "memory", "kernels", "comm", "attention", "lowbit", "recompute", "metrics", "compare", "evaluation"),
    *("inference", "mcore", "training", "calibrate", "serving", "verbs", "__main__", "testing"),
)
NEEDED_BY_METRICS = ("names", "errors", "files", "gpus", "config")
# The package's own __init__ is loaded by every import of any room, so it may know only the core.
INIT = "__init__"

# What a room may not import, besides what its place says: (room, forbidden module, files excepted).
FORBIDDEN = (
    ("layout", "torch", ()),
    ("topology", "torch", ("measure.py",)),
    ("schedules", "torch", ()),
    ("memory", "torch", ()),
    ("evaluation", "torch", ()),
    ("compare", "torch", ()),
    ("metrics", "torch", ("environment.py",)),
    ("kernels", "torch.distributed", ()),
    ("models", "torch.distributed", ()),
    *(("metrics", f"{PACKAGE}.{room}", ()) for room in ROOMS if room not in ("metrics", *NEEDED_BY_METRICS)),
    # The server's packages are optional.
    *((room, name, ()) for name in ("starlette", "uvicorn") for room in ROOMS if room != "serving"),
    ("serving", "starlette", ("app.py", "serve.py")),
    ("serving", "uvicorn", ("server.py", "serve.py")),
    *((room, "megatron", ()) for room in (INIT, *ROOMS) if room != "mcore"),
    # They stand beside the package and are not in its wheel.
    *((room, name, ()) for name in ("benchmarks", "analysis", "tests") for room in (INIT, *ROOMS)),
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


def is_core_module(name: str) -> bool:
    """Whether `name` is a module of the core, or a name in one."""
    parts = name.split(".")[1:]
    paths = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
    found = next((path for path in paths if (ROOT / f"{path}.py").is_file()), None)
    packages = (path for path in paths if (ROOT / path).is_dir())
    return is_core(found if found is not None else f"{next(packages, '?')}/__init__")


def broken_laws(name: str, room: str, file_name: str, from_core: bool = False) -> Iterator[str]:
    """What is wrong with `room`, or the core, importing `name` in `file_name`."""
    for of_room, module, excepted in FORBIDDEN:
        if room == of_room and within(name, module) and file_name not in excepted:
            yield f"{room} may not import {module}"
    if not within(name, PACKAGE) or name == PACKAGE:
        return
    if from_core and not is_core_module(name):
        yield f"{room} may not import {name.removeprefix(PACKAGE + '.')}: the core imports nothing but itself"
        return
    if room in (INIT, "topology") and is_core_module(name):
        return
    target = name.split(".")[1]
    if target.startswith("__") and target != "__main__":
        return  # megatron_longctx.__version__ and the like
    if target not in ROOMS:
        yield f"{target} is no room known to this test; give it its place in ROOMS"
    elif target != room and (room == INIT or ROOMS.index(target) > ROOMS.index(room)):
        yield f"{room} may not import {target}: imports point only up the list"


def violations(root: Path) -> list[str]:
    """Every broken law in the package at `root`, as `file:line: what`."""
    found = []
    for path in sorted(root.rglob("*.py")):
        module = PurePosixPath(path.relative_to(root).as_posix())
        room = module.parts[0].removesuffix(".py")
        if room not in (INIT, *ROOMS):
            found.append(f"{module}: {room} is no room known to this test; give it its place in ROOMS")
            continue
        source, from_core = path.read_text(encoding="utf-8"), is_core(str(module.with_suffix("")))
        for line, name in imported_modules(ast.parse(source), module):
            found += [f"{module}:{line}: {law}" for law in broken_laws(name, room, path.name, from_core)]
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
        ("layout/a.py", "import torch", "layout may not import torch"),
        ("layout/a.py", "def f():\n    from torch.nn import Module", "layout may not import torch"),
        ("schedules/a.py", "from importlib import import_module\nimport_module('torch')", "may not import torch"),
        ("topology/links.py", "import torch.distributed as dist", "topology may not import torch"),
        ("metrics/sinks.py", "import torch", "metrics may not import torch"),
        ("kernels/a.py", "from torch import distributed", "kernels may not import torch.distributed"),
        ("kernels/a.py", "from ..comm import p2p", "kernels may not import comm: imports point only up"),
        ("kernels/a.py", "from .. import comm", "kernels may not import comm: imports point only up"),
        ("models/a.py", "import torch.distributed", "models may not import torch.distributed"),
        ("models/a.py", "from ..mcore import model", "models may not import mcore"),
        ("comm/a.py", f"from {PACKAGE}.attention.run import Run", "comm may not import attention"),
        ("attention/a.py", "from megatron.core import parallel_state", "attention may not import megatron"),
        ("training/a.py", "import megatron.core.models", "training may not import megatron"),
        ("verbs/cli.py", "import megatron.core", "verbs may not import megatron"),
        ("serving/generate.py", "from uvicorn import Config", "serving may not import uvicorn"),
        ("serving/http_api/parsing.py", "import starlette.requests", "serving may not import starlette"),
        ("inference/a.py", f"from {PACKAGE} import training", "inference may not import training"),
        ("calibrate/a.py", "from analysis.benchmarks.peers import parts", "calibrate may not import benchmarks"),
        ("metrics/a.py", f"from {PACKAGE} import layout", "metrics may not import megatron_longctx.core.layout"),
        ("training/a.py", f"from {PACKAGE}.testing.distributed import start", "training may not import testing"),
        ("testing/a.py", "import megatron.core", "testing may not import megatron"),
        ("layout.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .config import Config", "config"),
        ("__init__.py", "from .config import Config", "__init__ may not import config"),
        ("schedules/verify.py", "from .simulate import simulate", "schedules may not import schedules.simulate"),
        ("comm/p2p.py", "def f():\n    from .rendezvous import x", "comm may not import comm.rendezvous.x: the core"),
        ("names.py", "import megatron_longctx.config", "names may not import config"),
        ("utils/a.py", "", "utils is no room known to this test"),
        ("training/a.py", f"from {PACKAGE}.helpers import x", "helpers is no room known to this test"),
        ("names.py", "\n" * (MAX_LINES + 1), f"{MAX_LINES + 1} lines, at most {MAX_LINES}"),
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
        ("topology/measure.py", "import torch.distributed as dist"),
        ("metrics/environment.py", "import torch"),
        ("mcore/a.py", f"from megatron.core import parallel_state\nfrom {PACKAGE}.attention import bind"),
        ("kernels/a.py", "import torch\nfrom torch.nn import functional\nfrom . import packed\nfrom .packed import f"),
        ("schedules/draw.py", f"from ..layout import Layout\nfrom {PACKAGE} import errors, __version__"),
        ("training/a.py", f"import {PACKAGE}\nfrom {PACKAGE}.metrics.sinks import JsonlSink"),
        ("testing/a.py", f"import torch\nfrom {PACKAGE}.verbs.cli import main"),
        ("layout/a.py", "import torchvision_like\nimport numpy"),
        ("topology/a.py", "from ..schedules.links import Rings"),
        ("comm/p2p.py", "from .collectives import gather_objects\nfrom ..schedules.plan import Plan"),
    ],
)
def test_what_the_law_allows_is_not_reported(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert violations(tmp_path) == []
