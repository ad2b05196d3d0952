"""Record training runs as a result: a JSON file with configuration, environment and steps, and a Markdown table.

    python -m analysis.record --out analysis/results/NAME --title "what was measured" runs/a runs/b

Medians exclude the first steps, which choose kernels and allocate memory, and a profiled step.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from analysis.benchmarks.report import table as markdown

WARM_UP_STEPS = 3
COLUMNS = (
    ("tokens/s", "perf/tokens_per_s", ",.0f"),
    ("tokens/s over all steps after the first 3", "mean_tokens_per_s", ",.0f"),
    ("tokens/s/GPU", "perf/tokens_per_s_per_gpu", ",.0f"),
    ("TFLOP/s/GPU (causal)", "perf/tflops_per_gpu", ".1f"),
    ("MFU causal %", "perf/mfu_causal_pct", ".1f"),
    ("MFU dense %", "perf/mfu_dense_pct", ".1f"),
    ("MFU of FP8's peak, causal %", "perf/mfu_fp8_pct", ".1f"),
    ("step s", "perf/step_s", ".3f"),
    ("peak GiB active", "mem/peak_active_gib", ".1f"),
    ("peak GiB reserved", "mem/peak_reserved_gib", ".1f"),
    ("predicted GiB", "predicted_peak_gib", ".1f"),
    ("waiting for messages s", "cp/exposed_comm_s", ".4f"),
    ("waiting for data s", "perf/data_wait_s", ".4f"),
    ("predicted imbalance %", "cp/imbalance_pct", ".2f"),
    ("measured imbalance %", "cp/measured_imbalance_pct", ".2f"),
)


def read_run(folder: Path) -> dict[str, Any]:
    """Return everything that one run recorded; ValueError if it lacks a file or has no steps."""
    try:
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        config = yaml.safe_load((folder / "resolved.yaml").read_text())
        environment = json.loads((folder / "environment.json").read_text())
    except FileNotFoundError as error:
        missing = f"{error.filename}: expected this file of a training run. Give a folder under runs/."
        raise ValueError(missing) from None
    if not steps:
        raise ValueError(f"{folder}/metrics.jsonl: expected at least one step. Train the run first.")
    profiled = (config.get("logging") or {}).get("profile_step")
    steady = [step for i, step in enumerate(steps, 1) if i > WARM_UP_STEPS and i != profiled] or steps
    medians = {
        key: statistics.median(values)
        for _, key, _ in COLUMNS
        if (values := [step[key] for step in steady if step.get(key) is not None])
    }
    seconds = [step["perf/step_s"] for step in steady]  # packs differ in work, so the mean is over all of them
    tokens = [step["perf/tokens_per_s"] * took for step, took in zip(steady, seconds, strict=True)]
    medians["mean_tokens_per_s"] = sum(tokens) / sum(seconds)
    prediction = folder / "prediction.json"  # of `analysis.training_cases`
    if prediction.exists():
        medians |= json.loads(prediction.read_text())
    return {"name": folder.name, "environment": environment, "config": config, "medians": medians, "steps": steps}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return Markdown with one row per run."""
    head = ["run", "layers", "tokens", "CP", "TP", "schedule", "recompute", "FP8", "steps", "first loss", "last loss"]
    rows = []
    for run in runs:
        config, steps = run["config"], run["steps"]
        par = config["parallelism"]
        rows.append([
            *(run["name"], str(config["model"]["num_layers"]), f"{config['data']['seq_length']:,}"),
            *(str(par["context_parallel_size"]), str(par["tensor_parallel_size"])),
            config["attention"].get("baseline") or par["schedule"],
            config["recompute"]["mode"] if "recompute" in config else "-",
            config["train"].get("fp8", "none"),
            *(str(len(steps)), f"{steps[0]['train/loss']:.4f}", f"{steps[-1]['train/loss']:.4f}"),
            *(format(run["medians"][key], form) if key in run["medians"] else "-" for _, key, form in COLUMNS),
        ])  # fmt: skip
    return markdown(head + [title for title, _, _ in COLUMNS], rows)


def describe_environment(environment: dict[str, Any]) -> str:
    """Return one line with date, hardware, versions and commit."""
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    gpu = ""
    if "cuda" in environment:
        gpu = f"CUDA {environment['cuda']}, cuDNN {environment['cudnn']}, NCCL {environment['nccl']}; "
    hosts = environment.get("devices_per_host")
    device = f"{hosts} x {environment['device']}" if hosts else environment["device"]
    return f"{environment['date']}; {device}; {packages}; {gpu}commit {environment['commit']}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write `OUT.json` and `OUT.md`; return 2 if a folder is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    parser.add_argument("--title", required=True)
    parser.add_argument("--note", default="", help="a paragraph under the table")
    arguments = parser.parse_args(argv)
    try:
        runs = [read_run(folder) for folder in arguments.runs]
    except ValueError as error:
        print(f"record: {error}", file=sys.stderr)
        return 2
    print(write(runs, arguments.out, arguments.title, arguments.note))
    return 0


def write(runs: Sequence[dict[str, Any]], out: Path, title: str, note: str) -> str:
    """Write `OUT.json` and `OUT.md` with results of `read_run`; return their names."""
    out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{out}.json").write_text(json.dumps({"title": title, "note": note, "runs": runs}, indent=1))
    parts = [f"# {title}", describe_environment(runs[0]["environment"]), table(runs)]
    parts += [f"Medians over the steps after the first {WARM_UP_STEPS}, but for one that was profiled. {note}".strip()]
    Path(f"{out}.md").write_text("\n\n".join(parts) + "\n")
    return f"{out}.json, {out}.md"


if __name__ == "__main__":
    sys.exit(main())
