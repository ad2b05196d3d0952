"""What the tests of this room share."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_longctx.bench import command
from megatron_longctx.testing.distributed import run_quickly


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of the verbs start as those of tests do."""
    monkeypatch.setattr(command, "run_ranks", run_quickly)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where calibrations are: nothing depends on what this user has measured, or changes it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatron_longctx"
