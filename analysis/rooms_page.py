"""Write `docs/rooms.md` from the docstrings of packages and the import law: `python -m analysis.rooms_page`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.test_import_law import FORBIDDEN, NEEDED_BY_METRICS, PACKAGE, ROOMS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "rooms.md"
_HEAD = """# Rooms

This page lists the packages and modules ("rooms") of `megatron_longctx` in the order of imports: a room may import only
rooms above it. Only `mcore` imports Megatron, and only `serving` imports Starlette and uvicorn. No room imports
`benchmarks`, `analysis` or `tests`. Files have at most 400 lines.
The core of `layout`, `schedules`, `kernels`, `comm` and `attention` imports nothing but itself, torch and numpy;
[`tests/shared/core.py`](../tests/shared/core.py) lists its modules.
[`tests/test_import_law.py`](../tests/test_import_law.py) enforces all of this.

`python -m analysis.rooms_page` generates this page from the docstrings of the packages; a test compares it with them.
[Architecture](architecture.md) explains how the rooms work together.
"""
# The tests of rooms that have no test folder of the same name.
_TESTS = {
    "names": ("tests/training/metrics", "tests/training"),
    "errors": ("tests/config",),
    "cache": ("tests/planner/test_select.py",),
    "files": ("tests/test_files.py",),
    "gpus": ("tests/config/test_gpus.py",),
    "compose": ("tests/config",),
    "sweep": ("tests/config", "tests/training/jobs"),
    "serving": ("tests/inference",),
    "verbs": ("tests/cli", "tests/cli"),
    "__main__": ("tests/cli",),
}


def source(room: str) -> Path:
    """Return the file with the docstring of a room."""
    package = ROOT / PACKAGE / room
    return package / "__init__.py" if package.is_dir() else package.with_suffix(".py")


def section(room: str) -> Iterator[str]:
    path = source(room).relative_to(ROOT)
    shown = path.parent if path.name == "__init__.py" else path
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{path}: expected a docstring, which is the section of docs/rooms.md. Write one.")
    yield f"## {room.strip('_')}\n"
    yield f"[`{shown.as_posix()}`](../{path.as_posix()})\n"
    yield f"{docstring}\n"
    allowed = ", ".join(f"`{each}`" for each in NEEDED_BY_METRICS) if room == "metrics" else ""
    imports = [f"Imports only {allowed}."] if allowed else []
    for of_room, module, excepted in FORBIDDEN:
        if room == of_room and module.startswith("torch"):
            files = " except in " + " and ".join(f"`{name}`" for name in excepted) if excepted else ""
            imports.append(f"Does not import `{module}`{files}.")
    tests = _TESTS.get(room, (f"tests/{room}",))
    yield " ".join([*imports, f"Tests: {', '.join(f'`{each}`' for each in tests)}."]) + "\n"


def page() -> str:
    """Return the page in Markdown."""
    existing = [room for room in ROOMS if source(room).is_file()]
    return "\n".join([_HEAD, *(line for room in existing for line in section(room))])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
