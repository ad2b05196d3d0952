"""What the tests of all wings share."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import megatron_longctx.config  # noqa: F401 (registers all modes before tests are parametrized by them)

# A busy machine only makes tests slower.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")

# The developer's login to W&B is not for runs of tests.
os.environ["NETRC"] = os.devnull
os.environ.pop("WANDB_API_KEY", None)

# Without a GPU, every rank would compile Megatron's fused functions anew, which takes longer than most tests.
if not Path("/dev/nvidiactl").exists():
    os.environ["TORCH_COMPILE_DISABLE"] = "1"

# Functions that run in ranks of their own are pickled by module name: the ranks must find `tests` on their path.
ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


# Modules and tests stay, and there are a million objects of them: the collector visits none, and looks rarely.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(5_000, 10, 50)
    gc.enable()


# Workers that share the tests begin with these files, so that none is left alone with a long one at the end.
LONGEST = (
    *("training/test_parity.py", "training/jobs/test_job_failures.py", "models/test_parity.py"),
    *("training/jobs/test_job_signals.py", "core/attention/test_masks.py", "inference/test_serve.py"),
    *("planner/memory/test_against_runs.py", "training/test_gated_delta_net.py", "inference/test_clients.py"),
    *("training/test_experts.py", "analysis/test_network.py", "docs/test_extend.py", "docs/test_extending.py"),
    *("mcore/test_trees.py", "mcore/test_delta_ranks.py", "training/jobs/test_job_start.py"),
    *("inference/test_hybrid.py", "core/kernels/test_interpreted.py", "core/attention/test_context_parallel.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(ROOT, "tests", name): i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more CUDA devices than are here."""
    mark = item.get_closest_marker("gpu")
    if mark is not None:
        from megatron_longctx.config.gpus import max_gpu_ranks, ranks_per_gpu

        needed = mark.args[0] if mark.args else 1
        if max_gpu_ranks() < needed:
            pytest.skip(f"needs CUDA devices: {needed}")
        if ranks_per_gpu() > 1 and not mark.kwargs.get("shared", True):
            pytest.skip("measures times, for which every rank needs a GPU of its own")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that the test starts see no CUDA device, so that it checks the same thing on every machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the tests of a module share."""
    return tmp_path_factory.mktemp("module")


@pytest.fixture(autouse=True)
def no_handlers_left() -> Iterator[None]:
    """Commands that run in this process log to its standard error, which is another in every test."""
    yield
    root = logging.getLogger()
    for handler in [each for each in root.handlers if type(each) is logging.StreamHandler]:
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)
