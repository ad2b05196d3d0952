"""The `megatron-longctx` command: each verb is one job."""

import argparse
import logging
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, TypeAlias

from .. import __version__
from ..config import TOKENIZERS, check_datasets
from ..core.errors import JobFailed, is_line, refuse
from ..training.signals import SAVE_SIGNAL, interrupts_not_swallowed
from . import hydra_options, wandb_runs

_END = """\
Settings are arguments of the form group=NAME or key.subkey=value, for example:
  megatron-longctx train experiment=demo parallelism=cp4 train.steps=50
  megatron-longctx plan parallelism.schedule=zigzag parallelism.context_parallel_size=8 --draw plan.png
`megatron-longctx VERB --help` lists the groups and their recipes, `megatron-longctx keys` the keys.
In bash, `eval "$(register-python-argcomplete megatron-longctx)"` completes verbs, keys and recipes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Return 0; 1 if a rank of a job or a check failed; 2 if the job was refused; 130 if interrupted."""
    arguments = parse(argv)
    # `generate` writes nothing but the text to standard output, and `submit` nothing but Slurm's answer and its own.
    stream = sys.stderr if arguments.verb in ("generate", "submit") else sys.stdout
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=stream)
    logging.getLogger("megatron_longctx").setLevel(logging.INFO)
    try:
        with interrupts_not_swallowed():
            code = hydra_options.run(arguments, _run)
        sys.stdout.flush()  # inside `try`, which handles a closed pipe
        return code
    except (ValueError, JobFailed) as error:
        code, message = 1 if isinstance(error, JobFailed) else 2, str(error)
    except BrokenPipeError:  # the reader has ended, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        code, message = 2, f"{place}{error.strerror or error}. Check the path and the disk."
    except KeyboardInterrupt:
        code, message = 128 + signal.SIGINT, "interrupted"
    print(_printable(f"megatron-longctx {arguments.verb}: {message}"), file=sys.stderr)
    return code


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Settings may be anywhere among options; argparse alone allows one group of them.

    Raises SystemExit: 2 for wrong usage, 0 after help or the version.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell requests completions
        import argcomplete

        argcomplete.autocomplete(parser)
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        if "settings" not in arguments or any(word.startswith("-") for word in rest):
            arguments.reject(f"unrecognized arguments: {' '.join(rest)}")
        arguments.settings += rest
    return arguments


class _VerbParser(argparse.ArgumentParser):
    """The parser of a verb: errors print the verb's usage, and help lists the recipes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.set_defaults(reject=self.error)

    def add_settings(self, meaning: str = "group=NAME and key=value") -> None:
        settings = self.add_argument("settings", nargs="*", metavar="setting", help=meaning)
        settings.completer = hydra_options.complete_settings  # type: ignore[attr-defined]

    def format_help(self) -> str:
        if any(action.dest == "settings" for action in self._actions):
            self.epilog = _settings_help()
        return super().format_help()


_Verbs: TypeAlias = "argparse._SubParsersAction[_VerbParser]"


def _settings_help() -> str:
    from ..training.compose import recipes

    lines = ["settings (keys override recipes):"]
    for group, names in recipes().items():
        lines += textwrap.wrap(", ".join(names), 100, initial_indent=f"  {group + '=':<18}", subsequent_indent=" " * 20)
    return "\n".join([*lines, "  key.subkey=VALUE  `megatron-longctx keys` explains every key"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-longctx", description=__doc__, epilog=_END, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb", parser_class=_VerbParser)
    for add in (_add_jobs, _add_plan, _add_measurements, _add_models, _add_files):
        add(verbs)
    return parser


def _add_jobs(verbs: _Verbs) -> None:
    train = verbs.add_parser("train", help="train or resume on this host's devices, or under torchrun or Slurm")
    train.add_settings()
    hydra_options.add_options(train)
    train.add_argument("--resolved", type=Path, metavar="FILE", help="use this resolved.yaml instead of the recipes")
    train.add_argument(
        "--preflight", type=int, metavar="RANKS",
        help="check the settings for this number of ranks, on any host, and print the run's folder; start nothing",
    )  # fmt: skip

    submit = verbs.add_parser("submit", help="submit a Slurm job with the configuration and code of now, if it can run")
    _add_submit_options(submit)
    submit.add_argument("kind", choices=("train", "sweep", "serve", "run"), help="submit launch/KIND.sbatch")
    submit.add_argument(
        "words", nargs=argparse.REMAINDER,
        help="options of sbatch (--nodes=4, -p gpu) and settings; of `run`, options of sbatch, VERB and its words",
    )  # fmt: skip

    demo = verbs.add_parser("demo", help="train on real text with 4 context-parallel ranks and with 1, and compare")
    demo.add_settings("key=value settings for both runs, for example train.steps=10")


def _add_submit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="check the job and print it; write and submit nothing")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="your own recipes, laid out as recipes/")


def _add_plan(verbs: _Verbs) -> None:
    plan = verbs.add_parser("plan", help="print what each rank holds, sends and attends to, step by step")
    plan.add_settings()
    hydra_options.add_options(plan)
    plan.add_argument("--backward", action="store_true", help="show the backward plan instead")
    plan.add_argument("--full-mask", action="store_true", help="every token sees every token (default: causal)")
    plan.add_argument("--draw", type=Path, metavar="FILE.png", help="also draw the plan")
    plan.add_argument(
        "--documents", nargs="?", const="batch", metavar="N,N,…",
        help="plan a pack of documents of these lengths, not the dataset's first pack; show where they lie. Without "
        "lengths, instead of a plan: what each data-parallel replica computes in the first step",
    )  # fmt: skip
    plan.add_argument("--timeline", type=Path, metavar="FILE.png", help="also draw ranks over time (needs a cluster)")
    plan.add_argument(
        "--compare", nargs="?", type=Path, const=Path(), metavar="FILE.png",
        help="instead of the plan: rank all modes by simulated time (needs a cluster), and draw them into the file",
    )  # fmt: skip
    plan.add_argument(
        "--memory", nargs="?", type=Path, const=Path(), metavar="FILE.png",
        help="instead of the plan: the memory of a training step on a rank; draw all recompute modes into the file",
    )  # fmt: skip
    plan.add_argument("--max-length", action="store_true", help="instead of the plan: the longest sequences that fit")
    plan.add_argument("--device-gib", type=float, help="memory of a device (default: that of the cluster)")


def _add_measurements(verbs: _Verbs) -> None:
    calibrate = verbs.add_parser(
        "calibrate", help="measure links, kernels and modes for a model on these ranks, and store them for `auto`"
    )
    calibrate.add_settings()
    hydra_options.add_options(calibrate)
    calibrate.add_argument("--max-tokens", type=int, help="longest kernel call (default: 32768 on GPUs, 1024 on CPU)")
    calibrate.add_argument(
        "--links", type=Path, metavar="FILE.yaml", help="measure only the links and write them as a cluster file"
    )

    check = verbs.add_parser(
        "check",
        help="check that a recipe trains the same with parallelism as without",
        description="Trains the recipe for a few steps at its parallel sizes, and with data parallelism alone. If no "
        "rank can hold the whole model, the second run differs in its context-parallel size alone, which is 1. "
        "Compares every loss and gradient norm (before clipping), and the gradients of the first and the last step. "
        "The exit code is 0 if all agree, otherwise 1. A rank of the second run holds a whole sequence, and the "
        "temporary folder (TMPDIR) holds the weights, and two copies of the gradients of two steps: reduce large "
        "models with model.num_layers=2.",
    )
    check.add_settings()
    hydra_options.add_options(check)
    check.add_argument("--steps", type=int, default=3, help="steps of each run (default: %(default)s)")
    check.add_argument("--tolerance", type=float, help="largest relative difference (default: fp32 1e-5, bf16 2e-2)")

    keys = verbs.add_parser("keys", help="print keys of the configuration: default, allowed values and meaning")
    keys.add_argument("patterns", nargs="*", metavar="PATTERN", help="part of a name, or word of a meaning")

    doctor = verbs.add_parser("doctor", help="list what is installed and usable on this machine, or compile kernels")
    doctor.add_argument(
        "--compile", nargs="*", metavar="group=NAME, key=value",
        help="instead: compile the attention kernels of this recipe (model=llama3_8b), also without a GPU",
    )  # fmt: skip


def _add_models(verbs: _Verbs) -> None:
    generate = verbs.add_parser("generate", help="continue a prompt, or chat, with a run's checkpoint")
    generate.add_settings("[checkpoint=]RUN, prompt=TEXT or prompt_file=FILE, iteration=N, and settings over the run's")
    generate.add_argument("--chat", action="store_true", help="chat: each line of standard input is a turn")

    serve = verbs.add_parser("serve", help="serve a run's checkpoint with an OpenAI-compatible API")
    serve.add_settings("[checkpoint=]RUN, iteration=N, and settings over the run's")

    importing = verbs.add_parser("import", help="import a published model (a folder of Hugging Face) as a run")
    importing.add_argument("source", metavar="SOURCE", help="a folder with config.json and safetensors")
    importing.add_settings("out=RUN (a new folder), and settings of the run")

    export = verbs.add_parser("export", help="export a run's checkpoint as a folder for Hugging Face's libraries")
    export.add_argument("words", nargs="+", help="[checkpoint=]RUN, out=FOLDER, iteration=N, shard_gb=X")

    evaluate = verbs.add_parser(
        "eval",
        help="compute a run's losses of long texts by position",
        description="Writes eval.json, eval.md and a picture. docs/evaluation.md explains the arguments.",
    )
    evaluate.add_settings(
        "[checkpoint=]RUN, iteration=N, lengths=N,…, samples=N, data=PREFIX, out=FOLDER, and settings over the run's"
    )

    logprobs = verbs.add_parser(
        "logprobs",
        help="write log-probabilities and entropies of rollouts' tokens under a run's checkpoint",
        description="Writes a line of tokens with their values for every branch. docs/training.md explains it.",
    )
    logprobs.add_settings("[checkpoint=]RUN, data=PREFIX, out=FILE.jsonl, iteration=N, and settings over the run's")


def _add_files(verbs: _Verbs) -> None:
    data = verbs.add_parser("data", help="convert text to Megatron's indexed dataset")
    data.add_argument(
        "--source", required=True, nargs="+", metavar="SOURCE",
        help="files (text, .jsonl, also .gz or .zst; .parquet), folders, patterns in quotes; or stdlib",
    )  # fmt: skip
    data.add_argument("--out", type=Path, required=True, help="path without suffix: .bin, .idx and .json are written")
    data.add_argument("--glob", help="pattern of the files of a folder (default: text files)")
    data.add_argument("--text-key", metavar="KEY", help="key or column of the text (default: text)")
    data.add_argument("--workers", type=int, metavar="N", help="processes that tokenize (default: the cores, up to 16)")
    data.add_argument("--join", action="store_true", help="make one document of each folder in the folder")
    data.add_argument(
        "--tokenizer", default="byte-level", choices=TOKENIZERS, help="library of the tokenizer (default: %(default)s)"
    )
    data.add_argument("--tokenizer-path", help="files of the tokenizer, for all but byte-level")
    data.add_argument("--chat-template", help="a file with a Jinja template (default: the tokenizer's own)")
    data.add_argument(
        "--share-prefixes", type=int, metavar="TOKENS",
        help="store equal beginnings of conversations once, in trees of at most this many tokens",
    )  # fmt: skip

    compare = verbs.add_parser(
        "compare",
        help="compare runs: tables, a picture and a dashboard in one HTML file",
        description="Shows speed, waiting, imbalance, memory and losses of each run, compared with the first.",
    )
    compare.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, compared with the first")
    compare.add_argument("--out", type=Path, metavar="FILE", help="picture (default: compare.png beside the first run)")
    compare.add_argument("--html", type=Path, metavar="FILE", help="also write the dashboard: table, filters, curves")
    compare.add_argument("--rows", type=int, default=50, help="most steps to print (default: %(default)s)")

    wandb_runs.add_verb(verbs)


def _train(arguments: argparse.Namespace) -> None:
    from ..training import compose

    signal.signal(SAVE_SIGNAL, signal.SIG_IGN)  # until the run handles it: what starts has nothing to save
    if (ranks := arguments.preflight) is not None and ranks < 1:
        raise refuse("--preflight", ranks, "1 or more", "Give the job's number of ranks.")
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))  # of torchrun or Slurm
    try:
        settings, resolved = arguments.settings, arguments.resolved
        config = (
            compose.compose_config(settings)
            if resolved is None
            else compose.override_config(compose.load_config(resolved), settings)
        )
        if rank is None:  # otherwise rank 0 looks, for all
            check_datasets(config.data)
    except ValueError:
        if rank in (None, "0"):
            raise
        from ..training.launcher import exit_after_rank_0

        exit_after_rank_0()
    from ..training import launcher  # imports torch, and what is refused above need not wait for it

    if ranks is None:
        launcher.train(config)
    else:
        launcher.preflight_only(config, ranks)
        print(f"run folder: {Path(config.run.root, config.run.name)}")


def _submit(arguments: argparse.Namespace) -> None:
    from ..training.compose import use_recipes
    from .submit import submit

    words = arguments.words
    if arguments.kind != "run":  # whose words are another verb's
        own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        _add_submit_options(own)
        arguments, words = own.parse_known_args(words, arguments)
    use_recipes(arguments.config_dir)
    submit(arguments.kind, words, arguments.dry_run, parse)


def _data(arguments: argparse.Namespace) -> None:
    from ..training.text_files import Source

    source = Source.of(arguments.source, arguments.glob, arguments.join, arguments.text_key)
    _ = source.kind  # refuses what is missing, before imports that take seconds
    from ..training.text import prepare

    template, shared, library = arguments.chat_template, arguments.share_prefixes, arguments.tokenizer
    prepare(source, arguments.out, library, arguments.tokenizer_path, template, shared, arguments.workers)


_HERE = {"train": _train, "submit": _submit, "data": _data, "wandb": wandb_runs.run}
_ELSEWHERE: dict[str, tuple[str, str, tuple[str, ...] | None]] = {
    "plan": (".plan", "run", None),
    "calibrate": ("..training.calibration", "run", ("settings", "max_tokens", "links")),
    "check": (".check", "check", ("settings", "steps", "tolerance")),
    "demo": (".check", "demo", ("settings",)),
    "generate": ("..serving.generate", "generate", ("settings", "chat")),
    "serve": ("..serving.serve", "serve", ("settings",)),
    "eval": (".evaluate", "evaluate", ("settings",)),
    "logprobs": (".evaluate", "logprobs", ("settings",)),
    "import": (".conversion", "import_model", ("source", "settings")),
    "export": (".conversion", "export_model", ("words",)),
    "compare": ("..training.comparison", "compare", ("runs", "out", "rows", "html")),
    "keys": (".hydra_options", "show_keys", ("patterns",)),
    "doctor": (".doctor", "main", ("compile",)),
}
"""The module, the function and its arguments, by their names in the namespace; None: the namespace itself."""
_FIRST = {**dict.fromkeys(("generate", "serve", "eval", "logprobs", "export"), "check_run"), "import": "check_source"}
"""What `compose` checks of verbs' first argument, before their modules are imported, which takes seconds."""


def _run(arguments: argparse.Namespace) -> int | None:
    """Run the parsed verb. Imports only its module, because Megatron takes seconds to import."""
    if arguments.verb in _HERE:
        return _HERE[arguments.verb](arguments)
    module, function, names = _ELSEWHERE[arguments.verb]
    given: list[Any] = [arguments] if names is None else [getattr(arguments, name) for name in names]
    if check := _FIRST.get(arguments.verb):
        getattr(import_module("..training.compose", __package__), check)(given[0])
    if arguments.verb in ("generate", "serve", "eval", "logprobs"):  # whose ranks are forks of this process
        import_module("..training.forks", __package__).import_megatron(resolve_name(module, __package__))
    result: object = getattr(import_module(module, __package__), function)(*given)
    return result if isinstance(result, int) else None  # exit codes; other functions return what they have written


def _printable(text: str) -> str:
    """Return `text` for a terminal: control characters, which files may have, are escaped, except line breaks."""
    return "".join(letter if letter == "\n" or is_line(letter) else ascii(letter)[1:-1] for letter in text)


if __name__ == "__main__":
    sys.exit(main())
