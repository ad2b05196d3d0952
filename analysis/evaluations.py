"""Compare evaluations: `python -m analysis.evaluations OUT --title TITLE NAME=FOLDER[,FOLDER...] ...`.

NAME is a model, FOLDER a folder that `megatron-longctx eval` wrote. A model has several folders if its tasks or lengths
were evaluated separately. OUT.json contains everything except the answers, OUT.md the tables, OUT.png losses by
position and scores by length.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from analysis.benchmarks.report import table
from megatron_longctx.core.errors import refuse

LOSSES = "loss_by_position"
Model = Mapping[str, Any]
"""The merged evaluations of one model, as `read` returns them."""


def read(folders: Sequence[Path]) -> dict[str, Any]:
    """Merge the evaluations of one model; refuse incomplete ones, other models, and lengths that occur twice."""
    whole: dict[str, Any] = {}
    for folder in folders:
        try:
            evaluation = json.loads((folder / "eval.json").read_text())
        except (OSError, ValueError) as error:
            raise refuse("folder", folder, "one with an eval.json", str(error)) from error
        if not evaluation.get("complete", True):
            raise refuse("folder", folder, "one of an evaluation that came to its end", "Run `eval` again.")
        about = {"run": evaluation["run"], "iteration": evaluation["iteration"], "model": evaluation["config"]["model"]}
        if not whole:
            whole = {**about, "environment": evaluation["environment"], "tasks": {}}
        if other := [key for key, value in about.items() if whole[key] != value]:
            raise refuse("folder", folder, f"the {other[0]} of {folders[0]}", "Give it a name of its own.")
        for task, each in evaluation["tasks"].items():
            lengths = whole["tasks"].setdefault(task, {"text": each.get("text"), "lengths": {}})["lengths"]
            if twice := lengths.keys() & each["lengths"].keys():
                raise refuse("folder", folder, f"{task} of other lengths than {min(twice)}", "Leave one out.")
            for length, results in each["lengths"].items():  # with the number of questions instead of their answers
                lengths[length] = {key: len(v) if key == "questions" else v for key, v in results.items()}
    return whole


def scores(model: Model) -> dict[str, dict[int, float]]:
    """Return scores in percent by task and length, with the mean over the tasks for lengths that all tasks have."""
    by_task = {
        task: {int(length): 100 * each["score"] for length, each in of_task["lengths"].items()}
        for task, of_task in model["tasks"].items()
        if task != LOSSES
    }
    lengths = sorted({length for of_task in by_task.values() for length in of_task})
    common = [n for n in lengths if all(n in of_task for of_task in by_task.values())]
    return by_task | {"mean": {n: fmean(of_task[n] for of_task in by_task.values()) for n in common}}


def losses(model: Model) -> dict[int, dict[tuple[int, int], float | None]]:
    """Return mean losses by length of the text and range of positions."""
    lengths = model["tasks"].get(LOSSES, {}).get("lengths", {})
    return {
        int(length): {(r["first"], r["stop"]): r["loss"] for r in each["positions"]} for length, each in lengths.items()
    }


def tables(title: str, models: Mapping[str, Model]) -> str:
    """Return Markdown with scores by task and length, then losses by position, for all models."""
    environment = next(iter(models.values()))["environment"]
    gpu = environment.get("device") or "CPU"
    parts = [f"# {title}", f"{environment['date']}; {gpu}; commit {environment['commit']}"]
    score = {name: scores(model) for name, model in models.items()}
    lengths = sorted({n for of_model in score.values() for of_task in of_model.values() for n in of_task})
    if lengths:
        tasks = [
            task for task in dict.fromkeys(task for of_model in score.values() for task in of_model) if task != "mean"
        ]
        rows = [
            [task, name, *(_cell(of_model.get(task, {}).get(n), ".1f" if task == "mean" else ".0f") for n in lengths)]
            for task in (*tasks, "mean")
            for name, of_model in score.items()
        ]
        parts.append("Answers that were said, in %, by the length of the text in tokens.")
        parts.append(table(["task", "model", *(f"{n:,}" for n in lengths)], rows))
    loss = {name: losses(model) for name, model in models.items()}
    for length in sorted({n for of_model in loss.values() for n in of_model}):
        ranges = dict.fromkeys(each for of_model in loss.values() for each in of_model.get(length, ()))
        of_models = [of_model.get(length, {}) for of_model in loss.values()]
        rows = [
            [f"{first:,} to {stop - 1:,}", *(_cell(of_model.get((first, stop)), ".3f") for of_model in of_models)]
            for first, stop in ranges
        ]
        text = next(model["tasks"][LOSSES]["text"] for model in models.values() if LOSSES in model["tasks"])
        parts.append(f"Losses in nats by position, texts of {length:,} tokens ({text}).")
        parts.append(table(["position", *models], rows))
    return "\n\n".join(parts) + "\n"


def draw(path: Path, title: str, models: Mapping[str, Model]) -> None:
    """Draw losses by position of the longest texts, and mean scores by length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name, model in models.items():
        if loss := losses(model):
            ranges = loss[max(loss)].items()
            points = [((first + stop) / 2, each) for (first, stop), each in ranges if each is not None]
            left.plot(*zip(*points, strict=True), marker=".", label=name)
        if means := scores(model)["mean"]:
            right.plot(list(means), list(means.values()), marker="o", label=name)
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


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the three files; return 2 if the arguments are refused."""
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
