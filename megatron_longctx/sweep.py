"""Hydra's features beyond composition: the jobs of a multirun, and the output of `--info`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from .compose import compose_config, explain, for_hydra, hydra_ready, plain_words, search_path
from .errors import refuse


def show_info(what: str, overrides: Sequence[str]) -> None:
    """Print what Hydra's `--info` prints of a composition: defaults, defaults-tree, config, searchpath, plugins, all.

    Raises:
        ValueError: as `compose_config`.
    """
    compose_config(overrides)
    words = [*search_path(), *map(for_hydra, plain_words(overrides))]
    with hydra_ready() as hydra:
        hydra.show_info(what, "config", words)


@dataclass(frozen=True)
class Sweep:
    """name: its own `run.name`. jobs: the words of each, which end with the job's `run.name`."""

    name: str
    jobs: list[list[str]]


def sweep(overrides: Sequence[str]) -> Sweep:
    """The jobs of a multirun, by Hydra's grammar (`key=a,b`, `key=range(1,4)`, `group=glob(*)`).

    A recipe may say what is swept (`hydra.sweeper.params`); words win over it. A job's `run.name` is the sweep's, with
    the job's own values behind it; its W&B group is the sweep's, too, where nothing else is said.

    Raises:
        ValueError: as `compose_config`, of any job; two jobs of one name.
    """
    try:
        with hydra_ready() as hydra:
            parser = OverridesParser.create(config_loader=hydra.config_loader)
            fixed = plain_words([word for word in overrides if not _parsed(parser, word).is_sweep_override()])
            composed = compose("config", [*search_path(), *map(for_hydra, fixed)], return_hydra_config=True)
            params = [f"{key}={value}" for key, value in (composed.hydra.sweeper.params or {}).items()]
            said = {word.lstrip("+").split("=", 1)[0]: word.lstrip("+") for word in (*params, *overrides)}
            options = {key: _values(_parsed(parser, word), word) for key, word in said.items()}
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(explain(error, overrides)) from None
    varied = [key for key, words in options.items() if len(words) > 1 and key != "run.name"]
    grouped = "logging.wandb_group" in said or composed.logging.wandb_group is not None
    jobs: dict[str, list[str]] = {}
    for words in product(*options.values()):
        values = {word.split("=", 1)[0]: word.split("=", 1)[1] for word in words}
        base = values.get("run.name", composed.run.name)
        group = [] if grouped else [f"logging.wandb_group={base}"]
        parts = [re.sub(r"[^\w.+-]+", "_", values[key]).strip("_") for key in varied]
        name = "-".join([base, *parts])
        if name in jobs:
            raise refuse("run.name", name, "a name of its own for every job", "Vary keys whose values differ.")
        jobs[name] = [*group, *(word for word in words if not word.startswith("run.name=")), f"run.name={name}"]
        compose_config(jobs[name])
    return Sweep(composed.run.name, list(jobs.values()))


def _parsed(parser: OverridesParser, word: str) -> Override:
    """A word as Hydra reads it; text that its grammar does not take, in quotes."""
    try:
        return parser.parse_override(word)
    except HydraException:
        return parser.parse_override(for_hydra(word))


def _values(override: Override, word: str) -> list[str]:
    if not override.is_sweep_override():
        return [word]
    return [f"{override.key_or_group}={value}" for value in override.sweep_string_iterator()]
