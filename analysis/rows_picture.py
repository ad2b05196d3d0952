"""Draw first tokens of short prompts, by plans and replicated: `python -m analysis.rows_picture`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = Path(__file__).parent / "results"
PARTS = {
    "CP 2, steps in finer sizes": ("2 H200s", "#22667a"),
    "CP 1": ("1 H200", "#c0703a"),
}
MOST = 512  # new tokens that the picture shows


def times(part: dict[str, Any]) -> list[tuple[int, float, float]]:
    """(new tokens, ms of the fastest plan, ms replicated), of the prompts that were computed both ways."""
    found = []
    for case in part["first_token"]:
        ms = {mode: 1e3 * seconds["p50"] for mode, seconds in case["seconds"].items()}
        if "replicated" in ms and case["new"] <= MOST:
            replicated = ms.pop("replicated")
            found.append((case["new"], min(ms.values()), replicated))
    return sorted(found)


def main() -> None:
    parts = {part["way"]: part for part in json.loads((RESULTS / "inference_rows_h200.json").read_text())["parts"]}
    figure, axes = pyplot.subplots(figsize=(7.2, 3.8))
    for way, (name, colour) in PARTS.items():
        new, plans, replicated = zip(*times(parts[way]), strict=True)
        axes.plot(new, plans, "o--", color=colour, label=f"{name}, fastest plan")
        axes.plot(new, replicated, "o-", color=colour, label=f"{name}, replicated")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0)
    axes.set_xlabel("new tokens, of 131,072")
    axes.set_ylabel("ms to the first token")
    axes.set_title("Short prompts over a long cache: Llama 3 8B's shape, bf16", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(RESULTS / "inference_rows_h200.png", dpi=110)


if __name__ == "__main__":
    main()
