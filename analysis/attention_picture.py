"""Draw what `python -m benchmarks attention` has measured: `python -m analysis.attention_picture RESULT.json`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OURS, OTHERS = ("#22667a", "#4497ab", "#8cc5d2", "#bfe0e7", "#7c8a5a"), ("#8a5a3b", "#c08a5e", "#dcb88f", "#ecd7bd")


def draw(data: dict[str, Any], path: Path) -> None:
    """Per cent of one device at equal FLOPs, a panel a head configuration, a group a length and mask, and a commit
    where measurements are of several. Of the kinds of another package, named after a comma, the best of each group."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = _best_of_packages(
        m
        for m in data["measurements"]
        if m["percent_of_one_device"] and not m["name"].startswith(("one device", "one GPU", "one CPU"))
    )
    heads = list(dict.fromkeys(m["heads"] for m in measured))
    names = list(dict.fromkeys(m["name"] for m in measured))
    colours = {}
    for pool, ours in ((OURS, True), (OTHERS, False)):
        chosen = [name for name in names if any(m["name"] == name and m.get("ours", True) == ours for m in measured)]
        colours.update({name: pool[i % len(pool)] for i, name in enumerate(chosen)})
    width = 7 * len(heads) if len(heads) > 1 else 11
    figure, axes = plt.subplots(1, len(heads), figsize=(width, 4.4), squeeze=False, sharey=True)
    for panel, pair in zip(axes[0], heads, strict=True):
        groups = list(dict.fromkeys(_group(m) for m in measured if m["heads"] == pair))
        groups.sort(key=lambda group: group[0])
        cases = [(length, mask) for length, mask, _ in groups]
        width = 0.84 / len(names)
        for i, name in enumerate(names):
            found = {_group(m): m["percent_of_one_device"] for m in measured if (m["heads"], m["name"]) == (pair, name)}
            at = [k + (i - (len(names) - 1) / 2) * width for k, group in enumerate(groups) if group in found]
            panel.bar(at, [found[g] for g in groups if g in found], width * 0.94, color=colours[name], label=name)
        panel.axhline(100, color="#888888", linewidth=0.8)
        labels = [
            f"{n // 1024}K" + f"\n{mask}" * (mask != "causal") + f"\n{commit[:7]}" * (cases.count((n, mask)) > 1)
            for n, mask, commit in groups
        ]
        panel.set_xticks(range(len(groups)), labels)
        panel.set_xlabel("tokens of the sequence")
        panel.set_title(f"heads {pair}")
        panel.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("% of one device at equal FLOPs")
    handles, labels = axes[0][0].get_legend_handles_labels()
    rows = 1 + len(labels) // 6
    figure.legend(handles, labels, ncols=-(-len(labels) // rows), loc="lower center", frameon=False)
    facts = data["environment"]
    figure.suptitle(f"forward and backward, causal, {data['ranks']} x {facts['device']}, {facts['date'][:10]}")
    figure.tight_layout(rect=(0, 0.06 * rows, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _group(measurement: dict[str, Any]) -> tuple[int, str, str]:
    return measurement["length"], measurement.get("mask", "causal"), measurement.get("commit", "")


def _best_of_packages(measured: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each in measured:
        name = each["name"] if each.get("ours", True) else each["name"].split(",")[0]
        key = each["heads"], _group(each), name
        if key not in best or best[key]["percent_of_one_device"] < each["percent_of_one_device"]:
            best[key] = {**each, "name": name}
    return list(best.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    result: Path = parser.parse_args().result
    draw(json.loads(result.read_text()), result.with_suffix(".png"))
    print(result.with_suffix(".png"))


if __name__ == "__main__":
    main()
