"""Write `docs/packages.md` from the docstrings of the wings and the import law: `python -m analysis.packages_page`."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.test_import_law import FORBIDDEN, PACKAGE, WINGS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "packages.md"
_HEAD = """# Packages

This page lists the wings of `megatron_longctx` in the order of imports: a wing may import only itself and wings above
it. `core` needs torch and numpy alone. Only `mcore` and `integrations` import Megatron, and only `serving`
imports Starlette and uvicorn. No wing imports `analysis` or `tests`. Files have at most 400 lines.
[`tests/test_import_law.py`](../tests/test_import_law.py) enforces all of this, and `python -m analysis.budgets` prints
the size of every wing. The tests of a wing are in the folder of `tests/` that has its name.

Where does a line belong? What knows tokens and ranks only, touches the tensors of one process, or crosses ranks:
`core`. What knows a second or a byte rate: `planner`. A layer of Megatron: `mcore`. What switches a framework
to this attention: `integrations`. A key: `config`. A request: `serving`. A paper or a measurement: `analysis`.

`python -m analysis.packages_page` generates this page from docstrings; a test compares it with them.
[Architecture](architecture.md) explains how the wings work together.
"""


def source(wing: str) -> Path:
    """Return the file with the docstring of a wing."""
    package = ROOT / PACKAGE / wing
    return package / "__init__.py" if package.is_dir() else package.with_suffix(".py")


def parts(wing: str) -> list[str]:
    """Return the packages of a wing that have a docstring: the wing and its folders."""
    folders = sorted(path.parent for path in (ROOT / PACKAGE / wing).rglob("*/__init__.py"))
    return [wing, *(folder.relative_to(ROOT / PACKAGE).as_posix() for folder in folders)]


def section(part: str) -> Iterator[str]:
    path = source(part).relative_to(ROOT)
    shown = path.parent if path.name == "__init__.py" else path
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{path}: expected a docstring, which is a section of docs/packages.md. Write one.")
    yield f"{'###' if '/' in part else '##'} {part.strip('_')}\n"
    yield f"[`{shown.as_posix()}`](../{path.as_posix()})\n"
    yield f"{docstring}\n"
    for of_part, module, excepted in FORBIDDEN:
        if part == of_part and module.startswith("torch"):
            files = " except in " + " and ".join(f"`{name}`" for name in excepted) if excepted else ""
            yield f"Does not import `{module}`{files}.\n"


def page() -> str:
    """Return the page in Markdown."""
    lines = [line for wing in WINGS for part in parts(wing) for line in section(part)]
    return "\n".join([_HEAD, *lines])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
