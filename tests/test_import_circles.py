"""No module of the package imports itself, directly or through others, by imports anywhere in its source."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

from tests.test_import_law import PACKAGE, ROOT, imported_modules


def circle(root: Path) -> list[str]:
    """Return the modules of a circle, from one of them to the same; empty if there is none."""
    names = {}
    for path in root.rglob("*.py"):
        inside = PurePosixPath(path.relative_to(root).as_posix())
        names[".".join((PACKAGE, *inside.with_suffix("").parts)).removesuffix(".__init__")] = path, inside
    sorter = TopologicalSorter[str]()
    for name, (path, inside) in names.items():
        for _, full in imported_modules(ast.parse(path.read_text(encoding="utf-8")), inside):
            of = full if full in names else full.rpartition(".")[0]
            if of in names and of != name:
                sorter.add(name, of)
    try:
        sorter.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_there_is_no_circle() -> None:
    assert circle(ROOT) == []


@pytest.mark.parametrize(
    "source", ["from .b import f", "def g():\n    from . import b", "import megatron_longctx.room.b"]
)
def test_a_circle_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room/a.py").write_text(source)
    (tmp_path / "room/b.py").write_text("from ..room import a")
    names = [f"{PACKAGE}.room.{letter}" for letter in "ab"]
    assert set(circle(tmp_path)) == set(names)
    (tmp_path / "room/b.py").write_text("")
    assert circle(tmp_path) == []
