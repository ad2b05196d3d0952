"""The command: `megatron-longctx`, or `python -m megatron_longctx`."""

import os
import signal
import sys

# Before numpy is imported: its threads would keep `train` from forking itself, which starts ranks in no time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Triton's default. torch.compile sets another when it compiles, where a process that finds all compiled does not look.
os.environ.setdefault(
    "TRITON_CACHE_DIR", os.path.join(os.environ.get("TRITON_HOME", os.path.expanduser("~")), ".triton", "cache")
)

from .config.extras import without_extra


def main() -> int:
    """Run the command. Without an extra that it needs, it prints one line that says which, and returns 2."""
    try:
        return _main()
    except ModuleNotFoundError as error:
        line = without_extra(error)
        if line is None:
            raise
        print(f"megatron-longctx: {line}", file=sys.stderr)
        return 2


def _main() -> int:
    """Run the command. While its modules are imported, Ctrl-C ends the process; Python would print a traceback."""
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import cli

    if default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
