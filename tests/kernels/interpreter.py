"""Triton's kernels without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.shared.jobs import PATIENCE_S


def run_interpreted(*words: str) -> None:
    """Run Python with these words (a file, or -m and a module), whose `__main__` gets Triton's interpreter: it is
    switched on by the import of triton."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, *words]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
