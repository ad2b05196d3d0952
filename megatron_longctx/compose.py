"""From recipes and command-line words to one validated `Config`, and back to a run's `resolved.yaml`."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .config import Config, validate

RESOLVED = "resolved.yaml"


def bundled(name: str) -> Path:
    """A folder that stands beside the package in a checkout and inside it when installed: recipes, launch, analysis.

    Raises:
        ValueError: it is in neither place.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise ValueError(f"{name}: expected this folder in {package} or beside it. Install the package again.")


def compose_config(overrides: Sequence[str]) -> Config:
    """Compose the recipes with `overrides` (`experiment=demo`, `train.steps=5`, …) and validate the result.

    Raises:
        ValueError: an unknown key or recipe (with the nearest that exist), a value of the wrong type or range.
    """
    _store_schema()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(bundled("recipes")), version_base="1.3"):
            composed = compose("config", overrides=list(overrides))
        config = cast(Config, OmegaConf.to_object(composed))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explain(error)) from None
    validate(config)
    return config


def save_config(config: Config, path: Path) -> None:
    """Write `config` as YAML."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(config.as_dict())))


def load_config(path: Path) -> Config:
    """Read what `save_config` wrote.

    Raises:
        ValueError: the file is missing, is not YAML, or has keys or values that `Config` does not know.
    """
    try:
        loaded = OmegaConf.merge(_schema(), OmegaConf.load(path))
        config = cast(Config, OmegaConf.to_object(loaded))
    except FileNotFoundError:
        raise ValueError(
            f"{path}: expected a run's configuration there. Start the run with `megatron-longctx train`."
        ) from None
    except Exception as error:  # the YAML parser and OmegaConf raise unrelated types
        raise ValueError(
            f"{path}: not a configuration of this version ({_first_line(error)}). Restore or delete it."
        ) from None
    validate(config)
    return config


def _schema() -> DictConfig:
    """The dataclasses as OmegaConf nodes. They are frozen, which OmegaConf takes for read-only: lift that."""
    schema = OmegaConf.structured(Config)
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        OmegaConf.set_readonly(node, None)
        nodes += [child for key in node if isinstance(child := node._get_node(key), DictConfig)]
    return cast(DictConfig, schema)


def _store_schema() -> None:
    ConfigStore.instance().store("schema", _schema())


def _explain(error: Exception) -> str:
    """What was wrong, in the words of this project's errors."""
    text = _first_line(error)
    key = re.search(r"Could not override '([\w.@/]+)'", text) or re.search(r"Key '([\w.]+)' (?:is )?not in", str(error))
    if key:
        full = re.search(r"full_key: ([\w.]+)", str(error))
        name = full.group(1) if full else key.group(1)
        nearest = difflib.get_close_matches(name, _known_keys(), n=3, cutoff=0.5)
        hint = f"Nearest: {', '.join(nearest)}." if nearest else "See recipes/ and docs for what there is."
        return f"{name}: expected a key of the configuration; there is none of this name. {hint}"
    group = re.search(r"Could not find '(\w+)/([\w.-]+)'", str(error))
    if group:
        names = sorted(path.stem for path in (bundled("recipes") / group.group(1)).glob("*.yaml"))
        return (
            f"{group.group(1)}={group.group(2)}: expected one of {', '.join(names) or 'nothing'}. Choose one of these."
        )
    cause = _first_line(error.__cause__) if error.__cause__ else ""
    return " ".join(part for part in (text, cause) if part) + ". Check the value's type in recipes/ and config.py."


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".") or type(error).__name__


def _known_keys() -> list[str]:
    keys: list[str] = []

    def walk(prefix: str, cls: Any) -> None:
        for field in dataclasses.fields(cls):
            child = field.default_factory if field.default_factory is not dataclasses.MISSING else None
            if dataclasses.is_dataclass(child):
                walk(f"{prefix}{field.name}.", child)
            else:
                keys.append(f"{prefix}{field.name}")

    walk("", Config)
    return keys
