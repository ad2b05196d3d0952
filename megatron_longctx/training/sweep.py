"""Hydra's features beyond composition: the jobs of a multirun, and the output of `--info`."""

import re
from collections.abc import Sequence
from itertools import product

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from ..core.errors import refuse
from .compose import checked_overrides, compose_config, explain, hydra_initialized, quoted_for_hydra, search_path


def show_info(what: str, overrides: Sequence[str]) -> None:
    """Print what Hydra's `--info` prints: defaults, defaults-tree, config, searchpath, plugins, all."""
    compose_config(overrides)
    words = [*search_path(), *map(quoted_for_hydra, checked_overrides(overrides))]
    with hydra_initialized() as hydra:
        hydra.show_info(what, "config", words)


def sweep(overrides: Sequence[str]) -> tuple[str, list[list[str]]]:
    """Return the name and the jobs of a multirun in Hydra's grammar (`key=a,b`, `key=range(1,4)`, `group=glob(*)`).

    A job is its overrides. A recipe may declare what is swept (`hydra.sweeper.params`); overrides win over it. A job's
    `run.name`, the last one, is the sweep's, followed by the job's values. Its W&B group is the sweep's name unless a
    recipe or an override sets one. Refuse any job as `compose_config` does, and two jobs of the same name.
    """
    try:
        with hydra_initialized() as hydra:
            parser = OverridesParser.create(config_loader=hydra.config_loader)
            fixed = checked_overrides([each for each in overrides if not _parsed(parser, each).is_sweep_override()])
            composed = compose("config", [*search_path(), *map(quoted_for_hydra, fixed)], return_hydra_config=True)
            params = [f"{key}={value}" for key, value in (composed.hydra.sweeper.params or {}).items()]
            given = {each.lstrip("+").split("=", 1)[0]: each.lstrip("+") for each in (*params, *overrides)}
            options = {key: _values(_parsed(parser, each), each) for key, each in given.items()}
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(explain(error, overrides)) from None
    varied = [key for key, values in options.items() if len(values) > 1 and key != "run.name"]
    grouped = "logging.wandb_group" in given or composed.logging.wandb_group is not None
    jobs: dict[str, list[str]] = {}
    for combination in product(*options.values()):
        values = dict(override.split("=", 1) for override in combination)
        base = values.pop("run.name", composed.run.name)
        name = "-".join([base, *(re.sub(r"[^\w.+-]+", "_", values[key]).strip("_") for key in varied)])
        if name in jobs:
            raise refuse("run.name", name, "a different name for every job", "Vary keys whose values differ.")
        group = [] if grouped else [f"logging.wandb_group={base}"]
        jobs[name] = [*group, *(f"{key}={value}" for key, value in values.items()), f"run.name={name}"]
        compose_config(jobs[name])
    return composed.run.name, list(jobs.values())


def _parsed(parser: OverridesParser, override: str) -> Override:
    """Parse an override; text that Hydra's grammar rejects is parsed in quotes."""
    try:
        return parser.parse_override(override)
    except HydraException:
        return parser.parse_override(quoted_for_hydra(override))


def _values(parsed: Override, override: str) -> list[str]:
    """Return an override for every value of a sweep, or the override itself."""
    if not parsed.is_sweep_override():
        return [override]
    return [f"{parsed.key_or_group}={value}" for value in parsed.sweep_string_iterator()]
