"""Fixtures that the tests of calibration and of the benchmarks share."""

import functools
from pathlib import Path

import pytest

from megatron_longctx.testing.distributed import run_quickly
from megatron_longctx.training import ranks


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the ranks of verbs as tests start theirs, with one thread each: more would spin while they wait."""
    monkeypatch.setattr(ranks, "run_ranks", functools.partial(run_quickly, threads=1))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder for calibrations that is independent of this user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatron_longctx"
