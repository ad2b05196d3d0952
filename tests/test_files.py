"""Small files survive a full disk: they are written completely or remain unchanged."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_longctx.config import files
from megatron_longctx.training.compose import load_config
from tests.shared.jobs import PATIENCE_S, clean_environment


def test_text_is_written(tmp_path: Path) -> None:
    files.write_text(tmp_path / "note", "first\n")
    files.write_text(tmp_path / "note", "secönd\n")
    assert (tmp_path / "note").read_text(encoding="utf-8") == "secönd\n"
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_a_yaml_file_is_read_again_after_changes_of_it_or_of_its_values(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    for content, expected in (("a: {b: [1]}", {"a": {"b": [1]}}), ("a: 3", {"a": 3})):
        path.write_text(content)
        files.read_yaml(path).clear()
        assert files.read_yaml(path) == expected


def test_what_is_not_a_small_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 6)
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="a device or a pipe, not a file"):
            files.read_bytes(path, 5)
        with pytest.raises(ValueError, match=r"not a configuration of this version \(a device or a pipe"):
            load_config(path)
    with pytest.raises(ValueError, match="more than 5 bytes"):
        files.read_bytes(tmp_path / "large", 5)
    with pytest.raises(IsADirectoryError):
        files.read_bytes(tmp_path, 5)
    assert files.read_bytes(tmp_path / "large", 6) == b"x" * 6


def test_a_link_in_place_of_the_partial_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / f"note.{os.getpid()}.partial").symlink_to("precious")
    with pytest.raises(OSError, match="symbolic links"):
        files.write_text(tmp_path / "note", "text")
    assert (tmp_path / "precious").read_text() == "kept"


# A separate process, because the limit cannot be raised again. Python ignores its signal.
WRITE_TOO_MUCH = """
import resource, sys
from pathlib import Path
from megatron_longctx.config import files

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    files.write_text(Path(sys.argv[1]), "x" * 5000)
except OSError as error:
    sys.exit(error.errno)
"""


@pytest.mark.parametrize("before", [None, "unchanged\n"])
def test_a_failed_write_changes_nothing(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "note"
    if before is not None:
        path.write_text(before)
    done = subprocess.run(
        [sys.executable, "-c", WRITE_TOO_MUCH, str(path)], env=clean_environment(), timeout=PATIENCE_S
    )
    assert done.returncode == errno.EFBIG
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == ([("note", before)] if before else [])
