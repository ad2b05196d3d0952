"""What the tests of this room share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_longctx.config import Config

# Functions that run in spawned ranks are pickled by module name: the ranks must find `tests` on their path.
ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks spawned by the test see no CUDA device, so that it checks the same thing on every machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run that has learned something, saved with 2 context-parallel ranks."""
    from megatron_longctx.testing.distributed import run_distributed
    from megatron_longctx.testing.training import Job, run_jobs, tiny_config, tiny_corpus

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        root = tmp_path_factory.mktemp("runs")
        tiny_corpus(root / "corpus")
        settings = {"train.save": True, "train.steps": 12, "parallelism.context_parallel_size": 2}
        config = tiny_config(root, "trained", settings)
        run_distributed(run_jobs, 2, [Job(config)])
    return config
