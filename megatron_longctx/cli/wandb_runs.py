"""The `wandb` verb: rebuild W&B runs from their folders, and make the views of `compare` in W&B."""

import argparse
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import LoggingConfig
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
    views = actions.add_parser(
        "views",
        help="make a workspace and a report with the metrics and curves of `compare`, by mode",
        description="Makes a workspace and a report that links to it, and prints the URLs of both.",
    )
    views.add_argument("place", nargs="?", metavar="ENTITY/PROJECT", help="default: as W&B's environment says")
    views.add_argument("--group", metavar="NAME", help="use only runs of this group (a sweep or an experiment)")
    views.add_argument("--dry-run", action="store_true", help="print the specifications; send nothing")


def run(arguments: argparse.Namespace) -> None:
    """Run an action of the verb."""
    if arguments.action == "sync":
        _sync(arguments.runs)
        return
    from ..training.comparison import specification, wandb_views

    place = arguments.place or _default_place()
    workspace, report = wandb_views(place, arguments.group)
    if arguments.dry_run:
        import wandb

        url = f"{wandb.setup().settings.app_url}/{place}"  # the workspace's own is known when it is saved
        views = {"workspace": workspace, "report": report(url)}
        print(json.dumps({kind: specification(view) for kind, view in views.items()}, indent=2))
        return
    try:
        print(f"workspace: {(url := workspace.save().url)}")
        print(f"report: {report(url).save(draft=False).url}")
    except Exception as error:  # the package raises any exception of its HTTP library
        raise JobFailed(f"{place}: W&B: {type(error).__name__}: {error}") from None


def _default_place() -> str:
    """Return W&B's own entity and project, or the default project. Without a login it lacks the entity."""
    import wandb

    settings = wandb.setup().settings
    entity = settings.entity
    if entity is None:
        with contextlib.suppress(Exception):  # no login, no network: the refusal says what to give
            entity = wandb.Api().default_entity
    return f"{entity or ''}/{settings.project or LoggingConfig().wandb_project}"


def _sync(folders: Sequence[Path]) -> None:
    """Rebuild runs. All folders are read before anything is sent."""
    from wandb import Error

    from ..training.comparison import load_run
    from ..training.compose import RESOLVED, load_config
    from ..training.metrics import rebuild_wandb

    loaded = [(folder, load_run(folder), load_config(folder / RESOLVED)) for folder in folders]
    for folder, run, config in loaded:
        try:
            place = rebuild_wandb(folder, config, [run.records[step] for step in sorted(run.records)])
        except Error as error:
            raise JobFailed(f"{folder}: W&B: {error}") from None
        print(f"{folder}: {len(run.records)} steps, to {max(run.records)}: {place}")
