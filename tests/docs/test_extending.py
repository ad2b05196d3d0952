"""docs/extending.md: each of its examples is one file in a copy of the package, and does what the page says."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.test_docs import FENCED, PACKAGE, ROOT
from tests.shared.jobs import clean_environment, finished

EXAMPLES = [code for kind, code in FENCED.findall((ROOT / "docs/extending.md").read_text()) if kind == "python"]
# Tests over all modes and kernels: the new ones turn up in them by their names.
OF_ALL = (
    "tests/core/attention/test_masks.py",
    "tests/core/plans/test_modes.py",
    "tests/core/kernels/test_kernel_providers.py",
)


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package, to which every example is added under the path that it begins with."""
    root = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / PACKAGE, root / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    (root / PACKAGE / "recipes").symlink_to(ROOT / "recipes")
    for code in EXAMPLES:
        path = root / code.splitlines()[0].removeprefix("# ")
        assert path.suffix == ".py" and path.parent.is_dir() and not path.exists(), f"{path}: one new file"
        path.write_text(code)
    return root


def test_every_example_does_what_it_is_for_and_is_taken_up_by_the_tests_of_its_kind(extended: Path) -> None:
    assert len(EXAMPLES) == 5
    tests = [str(ROOT / path) for path in ("tests/docs/extending_checks.py", *OF_ALL)]
    new = "extending_checks or broadcast or einsum or Einsum"
    command = [sys.executable, "-P", "-m", "pytest", *tests, "-k", new, "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    job = finished(extended, command, clean_environment(PYTHONPATH=f"{extended}:{ROOT}", CUDA_VISIBLE_DEVICES=""))
    found = re.search(r"^(\d+) passed, (\d+) deselected", job.out.read_text(), re.MULTILINE)
    assert job.process.returncode == 0 and found is not None, job.output()
    assert int(found[1]) > 60 and int(found[2]) > 200
