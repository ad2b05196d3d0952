"""`python -m analysis.benchmarks NAME ... --out FILE.json` runs a benchmark.

The module of that name has `add_arguments(parser)`, and `run(arguments)`, which raises ValueError for unusable options.
"""

import argparse
import importlib
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = (
    *("attention", "packed", "planning", "simulation", "all_reduce", "inference", "prefill", "parts", "fit"),
    *("huggingface", "data", "replicas", "trees", "hybrid", "fp8", "speculation", "weights", "serving"),
)


def parse(argv: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    """Return the benchmark's module and its options. Settings may be anywhere among the options.

    Raises:
        SystemExit: wrong usage (2), or after printing help (0).
    """
    first = argparse.ArgumentParser("python -m analysis.benchmarks", description=__doc__)
    first.add_argument("what", choices=BENCHMARKS)
    name = first.parse_args(argv[:1]).what
    module = importlib.import_module(f"analysis.benchmarks.{'attention' if name == 'packed' else name}")
    parser = argparse.ArgumentParser(f"python -m analysis.benchmarks {name}", description=module.__doc__)
    module.add_arguments(parser)
    if name == "packed":
        parser.set_defaults(**module.PACKED)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.json", help="results; a .md is written beside it"
    )
    return module, parser.parse_intermixed_args(argv[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark.

    Returns:
        the exit code: 0, 1 if a rank failed, 2 if the options were refused, or 130 if interrupted.
    """
    from megatron_longctx.core.errors import JobFailed, refuse

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for name in ("megatron_longctx", "analysis.benchmarks"):
        logging.getLogger(name).setLevel(logging.INFO)
    module, arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        out = arguments.out
        if out.suffix != ".json" or not out.parent.is_dir():  # the table beside it would overwrite a .md
            raise refuse("--out", out, "a .json file in a folder that exists", "Give another file name.")
        module.run(arguments)
        logging.getLogger("analysis.benchmarks").info("written to %s and %s", out, out.with_suffix(".md").name)
        return 0
    except (ValueError, JobFailed) as error:
        print(f"benchmarks {module.__name__.split('.')[-1]}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    # `timeout` sends it: servers that a benchmark has started then end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
