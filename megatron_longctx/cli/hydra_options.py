"""Hydra's options of the verbs that compose a configuration, shell completion, and the verb `keys`.

The options are sweeps, printing, and own recipes.
"""

import argparse
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from pathlib import Path

from ..config import Config, keys_of
from ..config.bounds import Choice, meanings
from ..core.errors import JobFailed, refuse

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
Verb = Callable[[argparse.Namespace], int | None]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hydra.main` that apply here, under the same names."""
    parser.add_argument(
        "-m", "--multirun", action="store_true",
        help="run jobs one by one for key=a,b and for the recipe's sweep; run.name gets the values",
    )  # fmt: skip
    parser.add_argument("--cfg", choices=("job",), help="print the configuration and run nothing")
    parser.add_argument("--info", nargs="?", const="all", choices=_INFO, help="print how Hydra composes; run nothing")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="your own recipes, laid out as recipes/")


def run(arguments: argparse.Namespace, verb: Verb) -> int:
    """Run the verb, or the option that replaces it. Return the exit code. A sweep runs all jobs even if some fail."""
    if "multirun" in arguments:
        from ..training.compose import compose_config, config_yaml, use_recipes
        from ..training.sweep import show_info, sweep

        use_recipes(arguments.config_dir)
        if getattr(arguments, "resolved", None) and (arguments.multirun or arguments.cfg or arguments.info):
            expected = "none beside --multirun, --cfg and --info, which compose recipes"
            raise refuse("--resolved", arguments.resolved, expected, "Leave one out.")
        if arguments.cfg:
            print(config_yaml(compose_config(arguments.settings)), end="")
            return 0
        if arguments.info:
            show_info(arguments.info, arguments.settings)
            return 0
        if arguments.multirun:
            if "WORLD_SIZE" in os.environ:
                remedy = "Sweep on one host, or submit a job for each: see launch/README.md."
                raise refuse("--multirun", "under torchrun", "to start the ranks itself", remedy)
            for option in ("draw", "timeline", "compare", "memory", "links"):
                if (file := getattr(arguments, option, None)) not in (None, Path()):
                    expected = "none beside --multirun, whose jobs would all write this file"
                    raise refuse(f"--{option}", file, expected, "Leave one out.")
            return _sweep(arguments, verb, sweep(arguments.settings)[1])
    return verb(arguments) or 0


def _sweep(arguments: argparse.Namespace, verb: Verb, jobs: list[list[str]]) -> int:
    failed, worst = [], 0
    for number, settings in enumerate(jobs, start=1):
        print(f"\n== job {number} of {len(jobs)}: {' '.join(settings)} ==", flush=True)
        job = copy(arguments)
        job.settings = settings
        try:
            worst = max(worst, verb(job) or 0)
        except (JobFailed, ValueError, OSError) as error:
            print(f"megatron-longctx {arguments.verb}: {error}", file=sys.stderr)
            failed.append(settings[-1].removeprefix("run.name="))
    if failed:
        raise JobFailed(f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(failed)}. Their errors are above.")
    if arguments.verb == "train":
        from ..training.compose import compose_config

        configs = [compose_config(settings) for settings in jobs]
        html, group = f"{configs[0].run.root}/compare.html", configs[0].logging.wandb_group
        folders = [f"{each.run.root}/{each.run.name}" for each in configs]
        print("\nto compare them:", shlex.join(["megatron-longctx", "compare", *folders, "--html", html]))
        print("in W&B:", shlex.join(["megatron-longctx", "wandb", "views", "--group", str(group)]))
    return worst


def complete_settings(prefix: str, **_: object) -> Iterator[str]:
    """Yield the completions of a setting: groups and keys, and after `=` their recipes and values."""
    from ..training.compose import recipes

    keys = keys_of(Config)
    name, equals, _value = prefix.partition("=")
    if not equals:
        yield from (f"{each}=" for each in (*recipes(), *keys))
        return
    bare = name.lstrip("+")
    values: tuple[object, ...] = tuple(recipes().get(bare, ()))
    if bare in keys:
        bounds = keys[bare].bounds
        values = bounds.all if isinstance(bounds, Choice) else ("true", "false") if bounds is None else ()
    yield from (f"{name}={value}" for value in values)


def show_keys(patterns: Sequence[str]) -> None:
    """Print the keys with a pattern in their name, or at the beginning of a word of their meaning; or all."""
    meaning = meanings(Config)
    found = [
        key for key in keys_of(Config).values()
        if not patterns or any(each in key.name or f" {each}" in f" {meaning[key.name]}" for each in patterns)
    ]  # fmt: skip
    if not found:
        from ..training.compose import nearest_names  # takes a second to import

        near = nearest_names(patterns[0], list(meaning))
        hint = f"Nearest: {near}." if near else "`megatron-longctx keys` prints all keys."
        raise refuse("keys", " ".join(patterns), "a part of a key's name, or a word of its meaning", hint)
    for key in found:
        kind = {int: "an integer, ", float: "a number, "}.get(key.kind, "")
        print(f"{key.name}={key.default_text}   ({kind}{key.may_be})")
        for line in textwrap.wrap(meaning[key.name], 110):
            print(f"    {line}")
