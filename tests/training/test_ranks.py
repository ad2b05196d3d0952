"""Functions on several ranks: the number of ranks, errors, and the result under torchrun."""

import functools
import os
import sys
from pathlib import Path

import pytest

from megatron_longctx.core.errors import JobFailed
from megatron_longctx.testing.distributed import run_quickly
from megatron_longctx.training import ranks
from megatron_longctx.training.ranks import Ranks, run_on_ranks
from tests.shared.jobs import TORCHRUN, finished


def _refuses(rank: int) -> None:
    raise ValueError("size=0: expected 1 or more. Raise it.")


def _fails(rank: int) -> None:
    raise RuntimeError("out of luck")


def test_a_refusal_of_a_rank_differs_from_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "run_ranks", functools.partial(run_quickly, threads=1))
    with pytest.raises(ValueError, match=r"^size=0: expected 1 or more. Raise it.$"):
        run_on_ranks(Ranks(2, "cpu"), _refuses)
    with pytest.raises(JobFailed, match=r"^rank \d failed: RuntimeError: out of luck$"):
        run_on_ranks(Ranks(2, "cpu"), _fails)


def test_ranks_are_forks_that_log_warnings_alone(tmp_path: Path) -> None:
    """A new process could not get the function, and would have no handler for its lines."""
    script = tmp_path / "job.py"
    script.write_text(
        "import logging\n"
        "from megatron_longctx.training.ranks import Ranks, run_on_ranks\n"
        "log = logging.getLogger('megatron_longctx')\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "log.setLevel(logging.INFO)\n"
        "log.info('the command')\n"
        "print('found', run_on_ranks(Ranks(2, 'cpu'), lambda rank: log.info('a rank') or 10 + rank))\n"
    )
    job = finished(tmp_path, [sys.executable, str(script)], {**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert job.process.returncode == 0 and "found 10" in job.out.read_text(), job.output()
    assert "the command" in job.err.read_text() and "a rank" not in job.err.read_text()


def test_torchrun_or_the_argument_sets_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks.of(None, "cpu") == Ranks(2, "cpu") and Ranks.of(3, "cpu") == Ranks(3, "cpu")
    assert Ranks.of(1, "cpu", least=1) == Ranks(1, "cpu")
    with pytest.raises(ValueError, match="ranks=1: expected 2 or more"):
        Ranks.of(1, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("RANK", "0")
    assert Ranks.of(3, "cpu") == Ranks(16, "cpu")


def test_under_torchrun_rank_0_returns_the_result(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "from megatron_longctx.training.ranks import Ranks, run_on_ranks\n"
        "print('found', run_on_ranks(Ranks.of(None, 'cpu'), lambda rank: 10 + rank))\n"
    )
    job = finished(tmp_path, [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(script)], quick=True)
    assert job.process.returncode == 0 and job.out.read_text().split() == ["found", "10"], job.output()
