"""Shared fixtures of the inference tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_longctx.config import Config


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A trained run, saved with 2 context-parallel ranks. Its sequences have 96 tokens, but inference may use more."""
    from megatron_longctx.testing.distributed import run_distributed
    from tests.shared.training import Job, run_jobs, tiny_config, tiny_corpus

    root = tmp_path_factory.mktemp("runs")
    tiny_corpus(root / "corpus")
    settings = {"train.save": True, "train.steps": 12, "parallelism.context_parallel_size": 2}
    settings["inference.max_model_len"] = 100_000
    config = tiny_config(root, "trained", settings)
    run_distributed(run_jobs, 2, [Job(config)])
    return config


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    """A running HTTP server, `tests.inference.http_server.Served`."""
    from tests.inference.http_server import serving

    with serving() as running:
        yield running
