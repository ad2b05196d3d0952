"""Datasets of demos and measurements: those that are missing are made, each of a blend."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_longctx.config import DataConfig
from megatron_longctx.training import text
from megatron_longctx.training.sources import Source
from tests.shared.training import tiny_corpus


def test_every_missing_dataset_of_a_blend_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(text, "prepare", lambda *given: made.append(given))
    tiny_corpus(tmp_path / "a")
    text.prepare_missing(DataConfig(prefix=f"0.7 {tmp_path}/a 0.3 {tmp_path}/b"))
    text.prepare_missing(DataConfig(prefix=f"{tmp_path}/a"))
    assert made == [(Source("stdlib"), tmp_path / "b", "byte-level", None)]
