"""The `wandb` verb: rebuild W&B runs from their folders, and make the views of `compare` in W&B."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import JobFailed


def add_verb(verbs: Any) -> None:
    """Add the verb to a command line's subparsers."""
    verb = verbs.add_parser("wandb", help="rebuild W&B runs from their folders, or make the views of `compare` in W&B")
    actions = verb.add_subparsers(dest="action", required=True, metavar="action")
    sync = actions.add_parser(
        "sync",
        help="rebuild W&B runs from metrics.jsonl and resolved.yaml",
        description="Rebuilds runs whose W&B files are empty or incomplete, with the same id, name, group, tags, "
        "configuration and steps. It works online, or as W&B's own settings say: WANDB_MODE=offline writes files for "
        "W&B's `wandb sync`. It does not change steps that W&B already has. Times are from the rebuilding.",
    )
    sync.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    for kind in ("workspace", "report"):
        view = actions.add_parser(kind, help=f"make a {kind} with the metrics and curves of `compare`, by mode")
        view.add_argument("place", metavar="ENTITY/PROJECT")
        view.add_argument("--group", metavar="NAME", help="use only runs of this group (a sweep or an experiment)")
        view.add_argument("--dry-run", action="store_true", help="print the specification; send nothing")


def run(arguments: argparse.Namespace) -> None:
    """Run an action of the verb."""
    if arguments.action == "sync":
        _sync(arguments.runs)
        return
    from ..training.compare.views import specification, wandb_view

    view = wandb_view(arguments.action, arguments.place, arguments.group)
    if arguments.dry_run:
        print(specification(view))
        return
    try:
        print(view.save().url)
    except Exception as error:  # the package raises any exception of its HTTP library
        raise JobFailed(f"{arguments.place}: W&B: {type(error).__name__}: {error}") from None


def _sync(folders: Sequence[Path]) -> None:
    """Rebuild runs. All folders are read before anything is sent."""
    from wandb import Error

    from ..training.compare.runs import load_run
    from ..training.compose import RESOLVED, load_config
    from ..training.metrics.sinks import rebuild_wandb

    loaded = [(folder, load_run(folder), load_config(folder / RESOLVED)) for folder in folders]
    for folder, run, config in loaded:
        try:
            place = rebuild_wandb(folder, config, [run.records[step] for step in sorted(run.records)])
        except Error as error:
            raise JobFailed(f"{folder}: W&B: {error}") from None
        print(f"{folder}: {len(run.records)} steps, to {max(run.records)}: {place}")
