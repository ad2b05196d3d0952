"""The extras of this package: which modules they bring, which are missing, and how to install them."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version

EXTRAS = {
    "megatron": ("megatron", "psutil", "packaging", "einops"),
    "train": ("hydra", "omegaconf", "yaml", "wandb", "matplotlib", "jinja2", "argcomplete"),
    "gpu": ("transformer_engine", "flash_attn", "fla"),
    "serve": ("starlette", "uvicorn", "prometheus_client", "xgrammar"),
    "models": ("safetensors", "transformers", "tokenizers", "sentencepiece", "tiktoken"),
    "transformers": ("transformers",),
    "data": ("pyarrow",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb_workspaces",),
    "docs": ("sphinx", "myst_parser", "furo"),
    "dev": (
        *("pytest", "pytest_timeout", "xdist", "playwright", "hypothesis", "ruff", "mypy", "pre_commit", "triton"),
        *("accelerate", "openai", "lm_eval", "gguf"),
    ),
}
"""The modules that each extra of pyproject.toml brings, besides those of the extras that it includes."""


def absent(extra: str) -> list[str]:
    """Return the modules of an extra that are not installed. It imports none."""
    return [module for module in EXTRAS[extra] if importlib.util.find_spec(module) is None]


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'megatron-longctx[{extra}]'"


def without_extra(error: ModuleNotFoundError) -> str | None:
    """Return the line for an import that failed because an extra is missing; None if no extra has the module."""
    module = (error.name or "").split(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    if extra == "megatron":  # the verbs need more than Megatron
        extra = "train"
    return extra and f"the package {module} is not installed. Run {install(extra)}."
