"""Composes recipes and command-line overrides into one validated `Config`, and reads and writes `resolved.yaml`."""

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

from ..config import Config, files, keys_of, validate
from ..config.files import bundled, read_yaml
from ..core.errors import is_line, refuse, shown

RESOLVED = "resolved.yaml"
_KEYS = keys_of(Config)
_REMOVED = {
    "attention.baseline": None,
    "parallelism.head_chunks": 1,
    "train.upload_command": None,
    "inference.evict": False,
    "inference.rule": "auto",
    "inference.rule_alpha": -1.059,
    "inference.rule_beta": 1.145,
    "inference.rule_gamma": 12.112,
    "serve.keep_sessions": 16,
}
"""Keys that earlier versions had, with the values by which they changed nothing. Other values are refused."""
_MAX_TEXT, _MAX_FIGURE = 10_000, 200  # characters of an override's value
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_own_recipes: list[Path] = []


def compose_config(overrides: Sequence[str]) -> Config:
    """Compose the recipes with `overrides` (`experiment=demo`, `train.steps=5`, …) and validate the result.

    Refuse what is malformed or unknown, with the nearest names that exist, and values of another type or range.
    """
    overrides = checked_overrides(overrides)
    overrides = [*_init_from_overrides(overrides), *overrides]
    try:
        with hydra_initialized():
            composed = compose("config", overrides=[*search_path(), *map(quoted_for_hydra, overrides)])
        config = cast(Config, OmegaConf.to_object(composed))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(explain(error, overrides)) from None
    experiment = _by_key(overrides).get("experiment", "null")
    if experiment != "null" and config.logging.wandb_group is None:
        config = replace(config, logging=replace(config.logging, wandb_group=experiment))
    validate(config)
    return config


def override_config(config: Config, overrides: Sequence[str], training: bool = True) -> Config:
    """Return `config`, for example that of a run, with overrides as for `compose_config`, except `experiment`.

    For `training`, see `config.validate`. Without it, a run that was trained in FP8 computes in bf16.
    """
    if not training:
        plain = replace(config.train, fp8="none", fp8_param=False, bf16_layers_at_start=0, bf16_layers_at_end=0)
        config = replace(config, train=plain)
    overrides = checked_overrides(overrides)
    settings = [(name, value) for name, _, value in (override.partition("=") for override in overrides)]
    layers = [OmegaConf.create(config.as_dict())]
    for name, value in settings:
        if name == "experiment":
            raise refuse(name, value, "settings of a run that exists already", "Set single keys instead.")
        if name not in _KEYS:
            layers.append(OmegaConf.create({name: read_yaml(_recipe(name, value))}))
    try:
        merged = OmegaConf.merge(_schema(), *layers)
        for name, value in settings:
            if name in _KEYS:
                OmegaConf.update(merged, name, _unquoted(name, value))
        result = cast(Config, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ValueError(explain(error, overrides)) from None
    validate(result, training)
    return result


def save_config(config: Config, path: Path) -> None:
    """Write `config` as YAML."""
    files.write_text(path, config_yaml(config))


def config_yaml(config: Config) -> str:
    """Return all keys of `config` as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(config.as_dict()))


def load_config(path: Path) -> Config:
    """Read and validate a file that `save_config` wrote. Refuse one that is missing, cut short or of another form."""
    try:
        loaded = OmegaConf.create(read_yaml(path))
        # run.root is written last. Without this check, a file that is cut short would leave other keys at defaults.
        if OmegaConf.select(loaded, "run.root") is None or not path.read_bytes().endswith(b"\n"):
            raise ValueError("it is empty or cut short")
        for key, unused in _REMOVED.items():  # of runs of earlier versions
            section, _, name = key.partition(".")
            if OmegaConf.select(loaded, key, default=...) == unused:
                del loaded[section][name]
        config = config_from_dict(loaded)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        remedy = f"Name its {RESOLVED}." if path.is_dir() else "Start the run with `megatron-longctx train`."
        raise ValueError(f"{path}: expected a run's configuration there. {remedy}") from None
    except Exception as error:  # the YAML parser and OmegaConf raise unrelated types
        reason = _first_line(error)
        raise ValueError(f"{path}: not a configuration of this version ({reason}). Restore or delete it.") from None
    validate(config)
    return config


def config_from_dict(values: Any) -> Config:
    """Convert the result of `Config.as_dict` back to a configuration, without validation."""
    return cast(Config, OmegaConf.to_object(OmegaConf.merge(_schema(), values)))


def check_run(words: Sequence[str]) -> None:
    """Refuse the `RUN` or `checkpoint=RUN` among a verb's words if its configuration cannot be read."""
    runs = [word.removeprefix("checkpoint=") for word in words if "=" not in word or word.startswith("checkpoint=")]
    for run in filter(None, runs[:1]):
        load_config(Path(run, RESOLVED))


def check_source(source: str) -> None:
    """Refuse what cannot be imported because it is no folder of a published model."""
    if not Path(source, "config.json").is_file():
        remedy = "Fetch it first: nothing is downloaded here."
        if source.endswith(".gguf"):
            remedy = "Take its safetensors, or convert it in a checkout: `python -m analysis.gguf_file FILE FOLDER`."
        raise refuse("SOURCE", source, "a folder with config.json and safetensors files", remedy)


def recipes() -> dict[str, list[str]]:
    """Return the names of the recipes of every group."""
    # `cluster` holds descriptions for `topology`, which are not composed.
    groups = sorted(path.name for path in bundled("recipes").iterdir() if path.is_dir() and path.name != "cluster")
    return {
        group: sorted({path.stem for folder in _folders() for path in (folder / group).glob("*.yaml")})
        for group in groups
    }


def use_recipes(folder: Path | None) -> None:
    """Find recipes also in `folder`, after ours; None: only in ours. It applies to this process (`--config-dir`)."""
    if folder is not None and not folder.is_dir():
        raise refuse("--config-dir", folder, "a folder laid out as recipes/: GROUP/NAME.yaml", "Check the path.")
    _own_recipes[:] = [] if folder is None else [folder.resolve()]


def search_path() -> list[str]:
    """Return the override that makes Hydra search the folder of `use_recipes`, if there is one."""
    return [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in _own_recipes)}]"] if _own_recipes else []


@contextmanager
def hydra_initialized() -> Iterator[Hydra]:
    """Provide Hydra with our recipes and the schema of `Config`."""
    ConfigStore.instance().store("schema", _schema())
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(bundled("recipes")), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        yield hydra


def checked_overrides(overrides: Sequence[str]) -> list[str]:
    """Refuse malformed and unknown overrides, and remove Hydra's `+` and `++`.

    Every key and group exists, so adding one is setting it.
    """
    for override in overrides:
        _check_override(override)
    return [override.lstrip("+") for override in overrides]


def quoted_for_hydra(override: str) -> str:
    """Return an override with its text in quotes: Hydra's grammar gives commas, spaces and brackets a meaning."""
    name, _, value = override.partition("=")
    if name not in _KEYS or _KEYS[name].kind is not str:
        return override
    if _is_null(name, value) or "${" in value or _QUOTED.fullmatch(value):
        return override
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"{name}='{escaped}'"


def explain(error: Exception, overrides: Sequence[str] = ()) -> str:
    """Return an error of Hydra or OmegaConf in the form of this project's errors."""
    text = str(error)
    # An unknown key is in a recipe: overrides have been checked.
    if unknown := re.search(r"Key '([\w.]+)' (?:is )?not in", text):
        full = re.search(r"full_key: ([\w.]+)", text)
        return _recipe_in(text) + str(_unknown_key(full.group(1) if full else unknown.group(1)))
    by_key = {override.split("=", 1)[0]: override for override in overrides}
    for cause in (error, error.__cause__):
        rejected = getattr(cause, "override", None) or ""  # by Hydra's grammar
        name = rejected.partition("=")[0] or getattr(cause, "full_key", None) or _key_in(str(cause), by_key)
        if name in _KEYS:
            value = re.search(r"Value '(.*?)'", str(cause))
            given = by_key.get(name) or f"{_recipe_in(text)}{name}{f'={value.group(1)}' if value else ''}"
            return f"{shown(given)}: expected {_KEYS[name].type_name}. For example {name}={_KEYS[name].example}."
    return f"{_first_line(error)}: expected settings and recipes that Hydra can read. Check them one by one."


def _recipe_in(text: str) -> str:
    """Return the recipe that an error's text names, as the beginning of a message."""
    recipe = re.match(r"In '([\w/.-]+)'", text)
    return f"{_named(*recipe.group(1).rsplit('/', 1))}: " if recipe else ""


def _key_in(text: str, by_key: Mapping[str, str]) -> str | None:
    """Return the key of the override, or of the recipe, that an error's text quotes."""
    quoted = [key for key, override in by_key.items() if override in text]
    full = re.search(r"full_key: ([\w.]+)", text)
    return quoted[-1] if quoted else full.group(1) if full else None


def _init_from_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the model and the tokenizer of the run in `train.init_from` as overrides, unless `overrides` set them.

    A recipe with a model, or an experiment, also sets the model.
    """
    given = _by_key(overrides)
    run = _unquoted("train.init_from", given.get("train.init_from", "null"))
    if run in (None, "???"):  # OmegaConf's missing value, which is refused as for any key
        return []
    config = load_config(Path(run, RESOLVED))
    names: list[str] = []
    if not given.keys() & {"data.tokenizer", "data.tokenizer_path"}:
        names += ["data.tokenizer", "data.tokenizer_path"]
    if not given.keys() & {"model", "experiment"}:
        names += [name for name in _KEYS if name.startswith("model.")]
    values = {name: attrgetter(name)(config) for name in names if name not in given}
    return [f"{name}={'null' if value is None else value}" for name, value in values.items()]


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    return dict(override.split("=", 1) for override in overrides)


def _recipe(group: str, name: str) -> Path:
    paths = [folder / group / f"{name}.yaml" for folder in _folders()]
    return next((path for path in paths if path.is_file()), paths[0])


def _named(group: str, name: str) -> str:
    """Return how messages name a recipe: ours as in a checkout, a user's own by its path."""
    path = _recipe(group, name)
    return f"recipes/{group}/{name}.yaml" if path.is_relative_to(bundled("recipes")) else str(path)


def _folders() -> list[Path]:
    return [bundled("recipes"), *_own_recipes]


@functools.cache  # merging copies it
def _schema() -> DictConfig:
    """Return `Config` as OmegaConf nodes, without the read-only flags that OmegaConf sets for frozen dataclasses."""
    schema = OmegaConf.structured(Config)
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        OmegaConf.set_readonly(node, None)
        nodes += [child for key in node if isinstance(child := node._get_node(key), DictConfig)]
    return cast(DictConfig, schema)


def _check_override(override: str) -> None:
    """Refuse an override that sets nothing, before Hydra's parser reports it in terms of its grammar."""
    left, equals, value = override.partition("=")
    name = left.lstrip("+~")
    groups = recipes()
    if not is_line(left):
        raise _unknown_key(left)
    if left.removesuffix(name).startswith("~"):
        remedy = f"Leave {name or 'it'} out to have its default."
        raise ValueError(f"{shown(override)}: expected key=value; keys cannot be removed. {remedy}")
    if not equals or not name:
        near = nearest_names(name, [*groups, *_KEYS], 1)
        hint = f"Did you mean {near}=…?" if near else "For example train.steps=100."
        raise ValueError(f"{shown(override)}: expected a setting of the form group=NAME or key.subkey=value. {hint}")
    if name in groups:
        if value not in groups[name]:
            hint = f"Nearest: {near}." if (near := nearest_names(value, groups[name])) else "Choose one of these."
            raise refuse(name, value, "one of " + ", ".join(groups[name]), hint)
        try:
            read_yaml(_recipe(name, value))
        except ValueError as error:
            raise ValueError(f"{_named(name, value)}: expected a recipe ({error}). Correct the file.") from None
    elif name not in _KEYS:
        inside = [key for key in _KEYS if key.startswith(name + ".")]
        if not inside:
            raise _unknown_key(name)
        expected = f"one of the keys inside {name}, which has no recipes to choose from"
        examples = ", ".join(inside[:3]) + (", …" if len(inside) > 3 else "")
        raise ValueError(f"{shown(override)}: expected {expected}. Set {examples}.")
    elif len(value) > (longest := _MAX_TEXT if _KEYS[name].kind is str else _MAX_FIGURE):
        raise refuse(name, value, f"at most {longest:,} characters", "Shorten it.")


def _unquoted(name: str, value: str) -> str | None:
    """Return the value of an override as Hydra parses it, for OmegaConf to convert to the key's type."""
    if _is_null(name, value):
        return None
    return value[1:-1] if _KEYS[name].kind is str and _QUOTED.fullmatch(value) else value


def _is_null(name: str, value: str) -> bool:
    return value == "null" and _KEYS[name].nullable


def check_names(settings: Sequence[str], words: Sequence[str]) -> None:
    """Refuse settings that are neither keys nor groups, where a verb has words of its own, which are suggested too."""
    for name in (setting.partition("=")[0].lstrip("+~") for setting in settings if "=" in setting):
        if name not in recipes() and not any(f"{key}.".startswith(f"{name}.") for key in _KEYS):
            raise _unknown_key(name, words)


def _unknown_key(name: str, words: Sequence[str] = ()) -> ValueError:
    near = nearest_names(name, [*words, *_KEYS, *recipes()])
    hint = f"Nearest: {near}." if near else "`megatron-longctx keys` prints all keys."
    also = f", or one of {', '.join(words)}" if words else ""
    expected = f"a key of the configuration{also}; there is none of this name"
    return ValueError(f"{shown(name)}: expected {expected}. {hint}")


def nearest_names(name: str, known: Sequence[str], count: int = 3) -> str:
    """Return the names most like `name`, as a whole or in their last part (`step` finds `train.steps`)."""
    last, part = {key: key.rsplit(".", 1)[-1] for key in known}, name.rsplit(".", 1)[-1]
    close = difflib.get_close_matches(part, list(last.values()), n=count, cutoff=0.75)
    nearest = [key for key in known if last[key] == part]
    nearest += difflib.get_close_matches(name, known, n=count, cutoff=0.5)
    nearest += [key for key in known if last[key] in close or (len(name) > 2 and key.startswith(name))]
    return ", ".join(list(dict.fromkeys(nearest))[:count])


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".") or type(error).__name__
