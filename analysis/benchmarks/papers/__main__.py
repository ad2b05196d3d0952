"""`python -m analysis.benchmarks.papers PAPER [--model FILE --text WHEEL]` makes the page of a paper."""

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from . import PAPERS, __doc__, page


def main(argv: Sequence[str] | None = None) -> int:
    """Make one paper's numbers and page, or with `--page` only the page from the recorded numbers.

    Returns:
        the exit code: 0, or 2 if the options were refused.
    """
    parser = argparse.ArgumentParser("python -m analysis.benchmarks.papers", description=__doc__)
    parser.add_argument("paper", choices=PAPERS)
    parser.add_argument("--page", action="store_true", help="only write the page again from the recorded numbers")
    of_model = "flash_communication: SmolLM2's wheel or Qwen's GGUF file, for perplexities; may be repeated"
    parser.add_argument("--model", type=Path, action="append", default=[], help=of_model)
    parser.add_argument("--text", type=Path, help="flash_communication: the wheel of the essays")
    of_device = "flash_communication: where perplexities are computed (default: %(default)s)"
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help=of_device)
    parser.add_argument("--windows", type=int, default=4, help="texts to take perplexities on (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of each (default: %(default)s)")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if arguments.page:
        page.paths(arguments.paper)[1].write_text(page.render(arguments.paper), encoding="utf-8")
        return 0
    try:
        results = importlib.import_module(f"analysis.benchmarks.papers.{arguments.paper}").make(arguments)
        print(page.write(arguments.paper, results))
    except ValueError as error:
        print(f"analysis.benchmarks.papers {arguments.paper}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
