"""Composes recipes and command-line settings into one validated `Config`, and reads and writes `resolved.yaml`."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from . import files
from .config import Config, keys_of, validate
from .errors import is_line, refuse, shown
from .files import bundled, read_yaml

RESOLVED = "resolved.yaml"
_LONGEST_TEXT, _LONGEST_FIGURE = 10_000, 200  # characters of a word's value


def compose_config(overrides: Sequence[str]) -> Config:
    """Compose the recipes with `overrides` (`experiment=demo`, `train.steps=5`, …) and validate the result.

    Raises:
        ValueError: a word that is not a setting, an unknown key or recipe (with the nearest that exist), a value of the
            wrong type or range.
    """
    overrides = plain_words(overrides)
    overrides = [*_of_first_run(overrides), *overrides]
    try:
        with hydra_ready():
            composed = compose("config", overrides=[*search_path(), *map(for_hydra, overrides)])
        config = cast(Config, OmegaConf.to_object(composed))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(explain(error, overrides)) from None
    config = _grouped(config, overrides)
    validate(config)
    return config


@contextmanager
def hydra_ready() -> Iterator[Hydra]:
    """Hydra over our recipes, the schema stored."""
    _store_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(bundled("recipes")), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        yield hydra


def _grouped(config: Config, words: Sequence[str]) -> Config:
    """`logging.wandb_group` is the experiment where nothing else is said."""
    name = dict(word.split("=", 1) for word in words).get("experiment", "null")
    if name == "null" or config.logging.wandb_group is not None:
        return config
    return replace(config, logging=replace(config.logging, wandb_group=name))


_own_recipes: list[Path] = []


def use_recipes(folder: Path | None) -> None:
    """Find recipes in `folder`, too, behind ours; None: in ours alone. Of this process, as Hydra's `--config-dir`.

    Raises:
        ValueError: it is no folder.
    """
    if folder is not None and not folder.is_dir():
        raise refuse("--config-dir", folder, "a folder with recipes/<group>/NAME.yaml's form", "Check the path.")
    _own_recipes[:] = [] if folder is None else [folder.resolve()]


def search_path() -> list[str]:
    """The word that has Hydra look there, too."""
    return [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in _own_recipes)}]"] if _own_recipes else []


def plain_words(overrides: Sequence[str]) -> list[str]:
    """Checked words, without Hydra's `+` and `++`: every key and group exists, so that adding is setting.

    Raises:
        ValueError: a word that is not a setting.
    """
    for word in overrides:
        _check_word(word)
    return [word.lstrip("+") for word in overrides]


def _of_first_run(words: Sequence[str]) -> list[str]:
    """The model and the tokenizer of the run that `train.init_from` names, as words, but for what `words` say
    themselves. They say the model also by a recipe that may have one.

    Raises:
        ValueError: there is no such run.
    """
    said = dict(word.split("=", 1) for word in words)
    run = _plain("train.init_from", said.get("train.init_from", "null"))
    if run in (None, "???"):  # the latter OmegaConf's for a missing value, which is refused as for any key
        return []
    config = load_config(Path(run, RESOLVED))
    names: list[str] = []
    if not said.keys() & {"data.tokenizer", "data.tokenizer_path"}:
        names += ["data.tokenizer", "data.tokenizer_path"]
    if not said.keys() & {"model", "experiment"}:
        names += [key.name for key in keys_of(Config)["model"]]
    values = {name: attrgetter(name)(config) for name in names if name not in said}
    return [f"{name}={'null' if value is None else value}" for name, value in values.items()]


def override_config(config: Config, overrides: Sequence[str]) -> Config:
    """`config`, of a run say, with some settings of its own; words as for `compose_config`, `experiment` excepted.

    Raises:
        ValueError: as `compose_config`.
    """
    layers = [OmegaConf.create(config.as_dict())]
    overrides = plain_words(overrides)
    for word in overrides:
        name, _, value = word.partition("=")
        if name == "experiment":
            raise refuse(name, value, "settings of a run that exists already", "Set single keys instead.")
        if name in recipes():
            layers.append(OmegaConf.create({name: read_yaml(_recipe(name, value))}))
    keys: dict[str, Any] = {}
    for word in overrides:
        name, _, value = word.partition("=")
        if name in _fields():
            *sections, key = name.split(".")
            part = keys
            for section in sections:
                part = part.setdefault(section, {})
            part[key] = _plain(name, value)
    try:
        result = cast(Config, OmegaConf.to_object(OmegaConf.merge(_schema(), *layers, OmegaConf.create(keys))))
    except OmegaConfBaseException as error:
        raise ValueError(explain(error, overrides)) from None
    validate(result)
    return result


def save_config(config: Config, path: Path) -> None:
    """Write `config` as YAML."""
    files.write_text(path, config_yaml(config))


def config_yaml(config: Config) -> str:
    """All keys of `config`."""
    return OmegaConf.to_yaml(OmegaConf.create(config.as_dict()))


def load_config(path: Path) -> Config:
    """Read what `save_config` wrote.

    Raises:
        ValueError: the file is missing, is cut short, is not YAML, or has keys or values that `Config` does not know.
    """
    try:
        loaded = OmegaConf.create(read_yaml(path))
        # The last line that is written. Without this check a shorter file would mean the defaults of what it lacks.
        if OmegaConf.select(loaded, "run.root") is None or not path.read_bytes().endswith(b"\n"):
            raise ValueError("it is empty or cut short")
        config = config_of(loaded)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{path}: expected a run's configuration there. Start the run with `megatron-longctx train`."
        ) from None
    except Exception as error:  # the YAML parser and OmegaConf raise unrelated types
        raise ValueError(
            f"{path}: not a configuration of this version ({_first_line(error)}). Restore or delete it."
        ) from None
    validate(config)
    return config


def config_of(values: Any) -> Config:
    """What `Config.as_dict` gave, as a configuration again; its ranges are not checked."""
    return cast(Config, OmegaConf.to_object(OmegaConf.merge(_schema(), values)))


def _recipe(group: str, name: str) -> Path:
    paths = [folder / group / f"{name}.yaml" for folder in _folders()]
    return next((path for path in paths if path.is_file()), paths[0])


def _folders() -> list[Path]:
    return [bundled("recipes"), *_own_recipes]


@functools.cache  # merging copies it
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


def _check_word(word: str) -> None:
    """Refuse a word that sets nothing, before Hydra answers it in terms of its own grammar."""
    left, equals, value = word.partition("=")
    name = left.lstrip("+~")
    prefix = left.removesuffix(name)
    fields, groups = _fields(), recipes()
    if not is_line(left):
        raise _unknown_key(left)
    if prefix.startswith("~"):
        raise ValueError(
            f"{shown(word)}: expected key=value; keys cannot be removed. Leave {name or 'it'} out to have its default."
        )
    if not equals or not name:
        names = [*groups, *fields]
        hint = f"Did you mean {near}=…?" if (near := _nearest(name, names, 1)) else "For example train.steps=100."
        raise ValueError(f"{shown(word)}: expected a setting of the form group=NAME or key.subkey=value. {hint}")
    if name in groups:
        if value not in groups[name]:
            hint = f"Nearest: {near}." if (near := _nearest(value, groups[name])) else "Choose one of these."
            raise refuse(name, value, "one of " + ", ".join(groups[name]), hint)
        try:
            read_yaml(_recipe(name, value))
        except ValueError as error:
            raise ValueError(f"recipes/{name}/{value}.yaml: expected a recipe ({error}). Mend the file.") from None
    elif name not in fields:
        inside = [key for key in fields if key.startswith(name + ".")]
        if inside:
            raise ValueError(
                f"{shown(word)}: expected one of the keys inside {name}, which has no recipes to choose from. "
                f"Set {', '.join(inside[:3])}{', …' if len(inside) > 3 else ''}."
            )
        raise _unknown_key(name)
    elif len(value) > (most := _LONGEST_TEXT if fields[name][0].startswith("text") else _LONGEST_FIGURE):
        raise refuse(name, value, f"at most {most:,} characters", "Shorten it.")


def _plain(name: str, value: str) -> str | None:
    """A word's value as Hydra would take it, for OmegaConf to make a number or truth value of."""
    if _is_null(name, value):
        return None
    quoted = _QUOTED.fullmatch(value) if _fields()[name][0].startswith("text") else None
    return value[1:-1] if quoted else value


def _is_null(name: str, value: str) -> bool:
    return value == "null" and _fields()[name][0].endswith("or null")


_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def for_hydra(word: str) -> str:
    """`word`, with text in the quotes that Hydra's grammar wants around commas, spaces, brackets and the like."""
    name, _, value = word.partition("=")
    if not _fields().get(name, ("", None))[0].startswith("text"):
        return word
    if _is_null(name, value) or "${" in value or _QUOTED.fullmatch(value):
        return word
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"{name}='{escaped}'"


def _unknown_key(name: str) -> ValueError:
    near = _nearest(name, [*_fields(), *recipes()])
    hint = f"Nearest: {near}." if near else "The keys are in megatron_longctx/config/tree.py, the recipes in recipes/."
    return ValueError(f"{shown(name)}: expected a key of the configuration; there is none of this name. {hint}")


def explain(error: Exception, overrides: Sequence[str] = ()) -> str:
    """What was wrong, in the words of this project's errors."""
    whole = str(error)
    if unknown := re.search(r"Key '([\w.]+)' (?:is )?not in", whole):  # in a recipe: words have been checked
        full = re.search(r"full_key: ([\w.]+)", whole)
        return _where(whole) + str(_unknown_key(full.group(1) if full else unknown.group(1)))
    words = {word.split("=", 1)[0]: word for word in overrides}
    fields = _fields()
    for cause in (error, error.__cause__):
        unread = getattr(cause, "override", None) or ""  # the word that Hydra's grammar does not take
        key = unread.partition("=")[0] or getattr(cause, "full_key", None) or _named_key(str(cause), words)
        if key in fields:
            expected, example = fields[key]
            given = shown(words.get(key) or f"{_where(whole)}{key}{_given_value(str(cause))}")
            return f"{given}: expected {expected}. For example {key}={example}."
    return f"{_first_line(error)}: expected settings and recipes that Hydra can read. Check them one by one."


def _where(text: str) -> str:
    """Which recipe Hydra speaks of, if it names one."""
    found = re.match(r"In '([\w/.-]+)'", text)
    return f"recipes/{found.group(1)}.yaml: " if found else ""


def _given_value(text: str) -> str:
    found = re.search(r"Value '(.*?)'", text)
    return f"={found.group(1)}" if found else ""


def _named_key(text: str, words: Mapping[str, str]) -> str | None:
    """The key of the word, or else of the recipe, that an error's text is about."""
    named = [key for key, word in words.items() if word in text]
    full = re.search(r"full_key: ([\w.]+)", text)
    return named[-1] if named else full.group(1) if full else None


def _nearest(name: str, known: Sequence[str], count: int = 3) -> str:
    """The names most like `name`, of all of it or of its last part (`step` finds `train.steps`)."""
    found = difflib.get_close_matches(name, known, n=count, cutoff=0.5)
    last = {key: key.rsplit(".", 1)[-1] for key in known}
    close = difflib.get_close_matches(name.rsplit(".", 1)[-1], list(last.values()), n=count, cutoff=0.75)
    found += [key for key in known if last[key] in close and key not in found]
    return ", ".join(found[:count])


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".") or type(error).__name__


def recipes() -> dict[str, list[str]]:
    """The recipes of every group, by name."""
    # Cluster descriptions lie there too; they are read by `topology`, not composed.
    groups = sorted(path.name for path in bundled("recipes").iterdir() if path.is_dir() and path.name != "cluster")
    return {
        group: sorted({path.stem for folder in _folders() for path in (folder / group).glob("*.yaml")})
        for group in groups
    }


@functools.cache
def _fields() -> dict[str, tuple[str, object]]:
    """Every key of the configuration: what its value must be, in words, and an example."""
    return {key.name: (key.type_in_words, key.example) for keys in keys_of(Config).values() for key in keys}
