"""What runs are told apart, grouped and filtered by: in tables, in the dashboard and in W&B."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ..config import Config, layout_of

_AXES = {"cp": "context", "tp": "tensor", "pp": "pipeline", "dp": "data"}


def facts(config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """By name.

    Args:
        config: of a `resolved.yaml` of any version.
        environment: see `environment.read`.
    """
    par, sizes = config.get("parallelism", {}), _sizes(config, environment)
    mode = par.get("schedule", "unknown") if sizes["cp"] > 1 else "one rank"
    return {
        "model": config.get("model", {}).get("name", "unknown"),
        "length": config.get("data", {}).get("seq_length"),
        "mode": config.get("attention", {}).get("baseline") or mode,
        "parallelism": " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one rank",
        "precision": config.get("train", {}).get("precision", "unknown"),
        "recompute": config.get("recompute", {}).get("mode", "none"),
        "hardware": environment.get("device", "unknown"),
    }


def labels(config: Config, environment: Mapping[str, Any]) -> dict[str, Any]:
    """`group`, `job_type` and `tags` of a run in W&B, by which modes line up: as `logging` says, or made of its
    facts."""
    told, said = config.logging, facts(config.as_dict(), environment)
    sizes = (f"{axis}{size}" for axis, size in _sizes(config.as_dict(), environment).items())
    made = (said["model"], said["mode"], f"layout {layout_of(config)}", *sizes, said["hardware"], said["precision"])
    return {
        "group": told.wandb_group or f"{said['model']}-{said['length']}",
        "job_type": told.wandb_job_type or said["mode"],
        "tags": told.wandb_tags.split(",") if told.wandb_tags else [tag[:64] for tag in dict.fromkeys(made)],
    }


def _sizes(config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, int]:
    """Ranks of every axis; data parallel are those that remain of the run's, where that is not set."""
    par = config.get("parallelism", {})
    sizes = {axis: par.get(f"{name}_parallel_size") or 1 for axis, name in _AXES.items()}
    if not par.get("data_parallel_size"):
        sizes["dp"] = max(1, environment.get("ranks", 1) // prod(sizes.values()))
    return sizes
