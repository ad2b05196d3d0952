"""The `megatron-longctx` command: one verb a job."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .config import TOKENIZERS

_EPILOG = """\
Settings are words of the form group=NAME or key.subkey=value, e.g.
  megatron-longctx train experiment=demo parallelism=cp4 train.steps=50
  megatron-longctx plan parallelism.schedule=zigzag parallelism.context_parallel_size=8 --draw plan.png
Groups and their recipes lie in recipes/; every key is explained in megatron_longctx/config.py."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        0; 1 when a rank of a job failed; 2 when the job was refused; 130 when interrupted.
    """
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("megatron_longctx").setLevel(logging.INFO)
    try:
        code = int(arguments.run(arguments) or 0)
        sys.stdout.flush()  # here, where a closed pipe is expected
        return code
    except ValueError as error:
        print(f"megatron-longctx {arguments.verb}: {error}", file=sys.stderr)
        return 2
    except _job_failed() as error:
        print(f"megatron-longctx {arguments.verb}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        reason = error.strerror or error
        print(f"megatron-longctx {arguments.verb}: {place}{reason}. Check the path and the disk.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"megatron-longctx {arguments.verb}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-longctx",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")

    train = verbs.add_parser("train", help="train, or resume, on this host's devices or under torchrun or Slurm")
    train.add_argument("settings", nargs="*", help="group=NAME and key=value words")
    train.set_defaults(run=_train)

    plan = verbs.add_parser("plan", help="print who holds, sends and attends what, per step")
    plan.add_argument("settings", nargs="*", help="group=NAME and key=value words")
    plan.add_argument("--backward", action="store_true", help="the backward plan instead")
    plan.add_argument("--full-mask", action="store_true", help="every token sees every token, instead of causal")
    plan.add_argument("--draw", type=Path, metavar="FILE.png", help="also draw it")
    plan.set_defaults(run=_plan)

    data = verbs.add_parser("data", help="turn text into Megatron's indexed dataset")
    data.add_argument("--source", required=True, help="stdlib, a folder, or a .jsonl file with a `text` in each line")
    data.add_argument("--out", type=Path, required=True, help="path without suffix: .bin, .idx and .json are written")
    data.add_argument("--glob", default="**/*.py", help="which files of a folder (default: %(default)s)")
    data.add_argument(
        "--tokenizer", default="byte-level", choices=TOKENIZERS, help="of Megatron-Core (default: %(default)s)"
    )
    data.add_argument("--tokenizer-path", help="its files, for all but byte-level")
    data.set_defaults(run=_data)

    doctor = verbs.add_parser("doctor", help="what is installed and usable here")
    doctor.set_defaults(run=_doctor)

    demo = verbs.add_parser("demo", help="train on real text with 4 context-parallel ranks and with 1, and compare")
    demo.add_argument("settings", nargs="*", help="key=value words for both runs, e.g. train.steps=10")
    demo.set_defaults(run=_demo)
    return parser


def _train(arguments: argparse.Namespace) -> None:
    from .training.launcher import train

    train(arguments.settings)


def _plan(arguments: argparse.Namespace) -> None:
    from .compose import compose_config
    from .config import refuse
    from .schedules import Kind, PlanOptions, build_plan, describe, seal, transpose
    from .schedules.draw import draw

    picture: Path | None = arguments.draw
    if picture and (picture.suffix != ".png" or not picture.parent.is_dir()):
        raise refuse("--draw", picture, "a .png file in a folder that exists", "Give another file name.")
    config = compose_config(arguments.settings)
    par, model = config.parallelism, config.model
    length, options = config.data.seq_length, PlanOptions.of(par)
    plan = build_plan(par.schedule, par.context_parallel_size, length, not arguments.full_mask, options)
    if arguments.backward:
        plan = seal(transpose(plan))
    element = 2 if config.train.precision == "bf16" else 4
    kv = 2 * model.num_kv_heads * model.kv_channels * element // par.tensor_parallel_size
    print(describe(plan, {Kind.KV: kv, Kind.DKV: kv}))
    if picture:
        draw(plan, picture)
        print(f"\ndrawn to {picture}")


def _data(arguments: argparse.Namespace) -> None:
    from .training.text import prepare

    prepare(arguments.source, arguments.out, arguments.glob, arguments.tokenizer, arguments.tokenizer_path)


def _doctor(arguments: argparse.Namespace) -> int:
    from . import doctor

    return doctor.main()


def _demo(arguments: argparse.Namespace) -> None:
    from .demo import demo

    demo(arguments.settings)


def _job_failed() -> type[Exception]:
    """JobFailed, or nothing to catch where its module was never loaded."""
    launcher = sys.modules.get("megatron_longctx.training.launcher")
    return launcher.JobFailed if launcher else _NeverRaised


class _NeverRaised(Exception):
    pass


if __name__ == "__main__":
    sys.exit(main())
