"""Where results are kept between processes: calibrations, and kernels that take long to compile."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/megatron_longctx`, or `~/.cache/megatron_longctx`. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_longctx"
