"""What the tests of this room and of the benchmarks share."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from megatron_longctx.testing.distributed import run_quickly
from megatron_longctx.training import ranks


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of the verbs start as those of tests do, with one thread each: more would wait for each other, spinning."""
    monkeypatch.setattr(ranks, "run_ranks", functools.partial(run_quickly, threads=1))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where calibrations are: nothing depends on what this user has measured, or changes it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatron_longctx"
