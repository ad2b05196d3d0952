"""What the tests of all rooms share."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None)  # a busy machine only makes tests slower
settings.load_profile("default")

# Functions that run in ranks of their own are pickled by module name: the ranks must find `tests` on their path.
ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that the test starts see no CUDA device, so that it checks the same thing on every machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
