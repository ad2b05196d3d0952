"""Triton's kernels without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(file: str) -> None:
    """Run a file's `__main__` with Triton's interpreter: it is switched on by the import of triton."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, file], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
