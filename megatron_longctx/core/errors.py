"""Errors of users and failed jobs: the value that was given, what is expected, and the remedy; missing packages."""

from __future__ import annotations

import importlib.util
import sys
import unicodedata

_MAX_SHOWN = 300  # characters of a value, which may be a path

EXTRAS = {
    "megatron": ("megatron", "psutil", "packaging", "einops"),
    "train": ("hydra", "omegaconf", "yaml", "wandb", "matplotlib", "jinja2", "tqdm", "argcomplete"),
    "gpu": ("transformer_engine", "flash_attn"),
    "serve": ("starlette", "uvicorn"),
    "models": ("safetensors", "gguf", "transformers", "tokenizers", "sentencepiece", "tiktoken"),
    "data": ("backports.zstd",) if sys.version_info < (3, 14) else (),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb_workspaces",),
    "docs": ("sphinx", "myst_parser", "furo"),
    "dev": ("pytest", "pytest_timeout", "xdist", "playwright", "hypothesis", "ruff", "mypy", "pre_commit", "triton"),
}
"""The modules that each extra of pyproject.toml brings, besides those of the extras that it includes."""


class JobFailed(RuntimeError):
    """A rank failed; the message is that rank's."""


def refuse(name: str, value: object, expected: str, remedy: str) -> ValueError:
    """Return an error in its only form: one line with the value, what is expected and the remedy.

    name: the argument or key that has the value; the message begins with it, and the error has it as `argument`.
    """
    error = ValueError(f"{shown(name)}={shown(value)}: expected {expected}. {remedy}")
    error.argument = name  # type: ignore[attr-defined]
    return error


def absent(extra: str) -> list[str]:
    """Return the modules of an extra that are not installed. It imports none."""
    return [module for module in EXTRAS[extra] if not _installed(module)]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'megatron-longctx[{extra}]'"


def without_extra(error: ModuleNotFoundError) -> str | None:
    """Return the line for an import that failed because an extra is missing; None if no extra has the module."""
    module = (error.name or "").split(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in (m.split(".")[0] for m in modules)), None)
    if extra == "megatron":  # the verbs need more than Megatron
        extra = "train"
    return extra and f"the package {module} is not installed. Run {install(extra)}."


def shown(value: object) -> str:
    """Return `value` as it appears in an error: always one line, and truncated if it is long."""
    text = str(value)
    if not is_line(text):
        text = ascii(text)[1:-1]
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}… ({len(text):,} characters)"


def printable(text: str) -> str:
    """Return `text` for a terminal: control characters, which files may have, are escaped, except line breaks."""
    return "".join(letter if letter == "\n" or is_line(letter) else ascii(letter)[1:-1] for letter in text)


def is_line(value: str) -> bool:
    """Whether text is one line that UTF-8 can encode: no control characters, surrogates or line separators."""
    return not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in value)
