"""Evaluations side by side: `python -m analysis.evaluations OUT --title TITLE NAME=FOLDER[,FOLDER...] ...`.

Each NAME is a model, each FOLDER one that `megatron-longctx eval` has written: several of other tasks or lengths, where
each was asked on a GPU of its own. OUT.json keeps all but the answers, OUT.md has the tables, OUT.png losses by
position and scores by length.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.report import table
from megatron_longctx.errors import refuse

LOSSES = "loss_by_position"
Tasks = Mapping[str, Mapping[str, Any]]
"""By task, what was found by length, as `eval.json` has it."""


def read(folders: Sequence[Path]) -> dict[str, Any]:
    """One model's evaluations as one.

    Raises:
        ValueError: a folder without an evaluation; one of other weights or settings of the model; a length twice.
    """
    whole: dict[str, Any] = {}
    for folder in folders:
        try:
            found = json.loads((folder / "eval.json").read_text())
        except (OSError, ValueError) as error:
            raise refuse("folder", folder, "one with an eval.json", str(error)) from error
        if not found.get("complete", True):
            raise refuse("folder", folder, "one of an evaluation that came to its end", "Run `eval` again.")
        about = {"run": found["run"], "iteration": found["iteration"], "model": found["config"]["model"]}
        if not whole:
            whole = {**about, "environment": found["environment"], "tasks": {}}
        if other := [key for key, value in about.items() if whole[key] != value]:
            raise refuse("folder", folder, f"the {other[0]} of {folders[0]}", "Give it a name of its own.")
        for task, each in found["tasks"].items():
            mine = whole["tasks"].setdefault(task, {"text": each.get("text"), "lengths": {}})
            if twice := mine["lengths"].keys() & each["lengths"].keys():
                raise refuse("folder", folder, f"{task} of other lengths than {min(twice)}", "Leave one out.")
            mine["lengths"] |= {length: _without_answers(of) for length, of in each["lengths"].items()}
    return whole


def _without_answers(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of every question what was said is in the folder; here their number is enough."""
    return {key: len(value) if key == "questions" else value for key, value in found.items()}


def scores(tasks: Tasks) -> dict[str, dict[int, float]]:
    """In %, by task and length."""
    return {
        task: {int(length): 100 * each["score"] for length, each in found["lengths"].items()}
        for task, found in tasks.items()
        if task != LOSSES
    }


def means(by_task: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
    """Over the tasks, by length, where all of them were asked."""
    lengths = sorted({length for mine in by_task.values() for length in mine})
    return {n: fmean(mine[n] for mine in by_task.values()) for n in lengths if all(n in m for m in by_task.values())}


def tables(title: str, models: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: scores by task and length, then losses by position, models beside each other."""
    environment = next(iter(models.values()))["environment"]
    gpu = environment.get("device") or "CPU"
    parts = [f"# {title}", f"{environment['date']}; {gpu}; commit {environment['commit']}"]
    by_model = {name: scores(model["tasks"]) for name, model in models.items()}
    lengths = sorted({n for found in by_model.values() for mine in found.values() for n in mine})
    if lengths:
        known = dict.fromkeys(task for found in by_model.values() for task in found)
        rows = [
            [task, name, *(_cell(found.get(task, {}).get(n), ".0f") for n in lengths)]
            for task in known
            for name, found in by_model.items()
        ]
        rows += [
            ["mean", name, *(_cell(means(found).get(n), ".1f") for n in lengths)] for name, found in by_model.items()
        ]
        parts.append("Answers that were said, in %, by the length of the text in tokens.")
        parts.append(table(["task", "model", *(f"{n:,}" for n in lengths)], rows))
    for length in sorted({int(n) for model in models.values() for n in _curves(model)}):
        shown = {name: _curves(model).get(str(length)) for name, model in models.items()}
        ranges = dict.fromkeys((r["first"], r["stop"]) for each in shown.values() if each for r in each["positions"])
        loss = {
            name: {(r["first"], r["stop"]): r["loss"] for r in each["positions"]} if each else {}
            for name, each in shown.items()
        }
        rows = [
            [f"{first:,} to {stop - 1:,}", *(_cell(loss[name].get((first, stop)), ".3f") for name in models)]
            for first, stop in ranges
        ]
        text = next(model["tasks"][LOSSES]["text"] for model in models.values() if LOSSES in model["tasks"])
        parts += [
            f"Losses in nats by position, texts of {length:,} tokens ({text}).",
            table(["position", *models], rows),
        ]
    return "\n\n".join(parts) + "\n"


def draw(path: Path, title: str, models: Mapping[str, Mapping[str, Any]]) -> None:
    """Losses by position of the longest texts, and mean scores by length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name, model in models.items():
        if curves := _curves(model):
            longest = curves[max(curves, key=int)]["positions"]
            points = [((r["first"] + r["stop"]) / 2, r["loss"]) for r in longest if r["loss"] is not None]
            left.plot(*zip(*points, strict=True), marker=".", label=name)
        if mine := means(scores(model["tasks"])):
            right.plot(list(mine), list(mine.values()), marker="o", label=name)
    left.set(xlabel="position in the text (tokens)", ylabel="mean loss (nats per token)", title="Losses by position")
    right.set(xlabel="length of the text (tokens)", ylabel="answers found (%, mean of all tasks)", ylim=(0, 105))
    right.set_title("Needles and tasks of RULER")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curves(model: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = model["tasks"].get(LOSSES, {}).get("lengths", {})
    return found


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the three files; 2 on a user's error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="path of the results, without suffix")
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER[,FOLDER...]")
    parser.add_argument("--title", required=True)
    arguments = parser.parse_args(argv)
    try:
        models = {}
        for word in arguments.models:
            name, equals, folders = word.partition("=")
            if not equals or not name or not folders:
                raise refuse("models", word, "NAME=FOLDER[,FOLDER...]", "For example before=runs/a/eval.")
            models[name] = read([Path(folder) for folder in folders.split(",")])
    except ValueError as error:
        print(f"evaluations: {error}", file=sys.stderr)
        return 2
    out: Path = arguments.out
    out.with_suffix(".json").write_text(json.dumps({"title": arguments.title, "models": models}, indent=1) + "\n")
    out.with_suffix(".md").write_text(tables(arguments.title, models))
    draw(out.with_suffix(".png"), arguments.title, models)
    print(f"{out}.json, {out}.md, {out}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
