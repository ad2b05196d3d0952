"""What `bench inference` has measured as data, as tables and as a picture of where the two rings cross."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .inference_ranks import RINGS, RULES, Decoded, FirstToken

TIE = 0.01
"""Modes whose medians differ by less of the faster one are equally right."""
_COLOURS = {"pass_kv": "#22667a", "pass_q": "#c0703a", "one_hop": "#7a6a9a"}


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, and 50th, 90th and 99th percentile by nearest rank."""
    ranked = sorted(seconds)
    found = {f"p{p}": ranked[max(0, math.ceil(p / 100 * len(ranked)) - 1)] for p in (50, 90, 99)}
    return {"mean": sum(ranked) / len(ranked), **found}


def medians(found: FirstToken) -> dict[str, float]:
    return {mode: percentiles(seconds)["p50"] for mode, seconds in found.seconds.items()}


def shares(found: Sequence[FirstToken]) -> list[dict[str, Any]]:
    """By rule: in how many cases it is right, which is to take the fastest of the measured modes that it can take, or
    one as fast (`TIE`); how much slower than that its choices are, and than the fastest of all measured modes."""
    cases = [m for m in found if m.taken]
    rows = []
    for rule in RULES if cases else ():
        slower, slower_of_all = (
            [medians(m)[m.taken[rule]] / min(medians(m)[mode] for mode in modes) - 1 for m, modes in pairs]
            for pairs in ([(m, m.choices(rule)) for m in cases], [(m, m.modes) for m in cases])
        )
        right = sum(loss <= TIE for loss in slower)
        row: dict[str, Any] = {"rule": rule, "modes": sorted({mode for m in cases for mode in m.choices(rule)})}
        row |= {"right": right, "cases": len(cases), "share": right / len(cases)}
        row |= {"mean_slower": sum(slower) / len(slower), "most_slower": max(slower)}
        rows.append(row | {"mean_slower_of_all": sum(slower_of_all) / len(slower_of_all)})
    return rows


def as_data(first: Sequence[FirstToken], decoded: Sequence[Decoded]) -> dict[str, Any]:
    """The measurements, in seconds."""
    return {
        "first_token": [
            {
                "context_parallel_size": m.ranks,
                "tokens": m.length,
                "new": m.new,
                "cached": m.cached,
                "miss_rate": m.new / m.length,
                "seconds": {mode: {**percentiles(s), "all": s} for mode, s in m.seconds.items()},
                "unseen_seconds": m.unseen,
                "taken": m.taken,
                "predicted_layer_s": m.predicted,
            }
            for m in first
        ],
        "rules": shares(first),
        "decode": [
            {
                "context_parallel_size": m.ranks,
                "cached": m.cached,
                "batch": m.batch,
                "mode": m.mode,
                **percentiles(m.seconds),
                "attention_s": m.attention_s,
                "read_bytes_per_rank": m.read_bytes,
            }
            for m in decoded
        ],
    }


def tables(first: Sequence[FirstToken], decoded: Sequence[Decoded]) -> str:
    """Markdown; times in milliseconds."""
    parts = []
    if first:
        said = (
            "Time to first token: p50 / p90 / p99; unseen: when these numbers of tokens come for the first time to an "
            "engine that has warmed up as a server does, but for shapes that kernels plan. A rank alone passes "
            "nothing: its time stands under the first mode."
        )
        parts += [said, "", _first_table(first)]
    if rows := shares(first):
        parts += ["", _rules_table(rows)]
    head = ["CP", "cached", "batch", "mode", "per token (mean)", "p50", "p90", "p99", "attention alone", "GB/s a rank"]
    cells = [
        [str(m.ranks), f"{m.cached:,}", str(m.batch), m.mode]
        + [f"{percentiles(m.seconds)[name] * 1e3:.2f}" for name in ("mean", "p50", "p90", "p99")]
        + [f"{m.attention_s * 1e3:.2f}", f"{m.read_bytes / m.attention_s / 1e9:,.1f}"]
        for m in decoded
    ]
    said = (
        "Decode: time between tokens, over random keys and values; of this, the kernels of replicated attention alone"
    )
    return "\n".join([*parts, *([""] if parts else []), said, "", _table(head, cells)])


def _rules_table(rows: Sequence[dict[str, Any]]) -> str:
    said = (
        "What the rules take. Right is the fastest of the modes that a rule can take, by medians, or one within "
        f"{TIE:.0%} of it; the paper's rules know the two rings."
    )
    head = ["rule", "can take", "right", "share", "slower than the fastest of these: mean", "most"]
    cells = [
        [r["rule"], ", ".join(r["modes"]), f"{r['right']} of {r['cases']}", f"{r['share']:.0%}",
         f"{r['mean_slower']:.1%}", f"{r['most_slower']:.1%}", f"{r['mean_slower_of_all']:.1%}"]
        for r in rows
    ]  # fmt: skip
    return "\n".join([said, "", _table([*head, "than the fastest measured: mean"], cells)])


def _first_table(first: Sequence[FirstToken]) -> str:
    modes = list(dict.fromkeys(mode for m in first for mode in m.seconds))
    head = ["CP", "tokens", "new", "miss rate", *modes, "pass_q / pass_kv", "unseen", *RULES]
    cells = []
    for m in first:
        found = medians(m)
        ratio = f"{found['pass_q'] / found['pass_kv']:.3f}" if set(RINGS) <= set(found) else ""
        times = [
            " / ".join(f"{percentiles(m.seconds[mode])[p] * 1e3:.2f}" for p in ("p50", "p90", "p99"))
            if mode in m.seconds
            else ""
            for mode in modes
        ]
        taken = [m.taken.get(rule, "") for rule in RULES]
        unseen = " / ".join(f"{m.unseen[mode] * 1e3:.2f}" for mode in modes if mode in m.unseen)
        cells.append([str(m.ranks), f"{m.length:,}", f"{m.new:,}", f"{m.new / m.length:.2%}", *times, ratio, unseen])
        cells[-1] += taken
    return _table(head, cells)


def _table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    rows = (head, ["---"] * len(head), *cells)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def draw(first: Sequence[FirstToken], path: Path, title: str) -> None:
    """Write a PNG: pass_q's time over pass_kv's by miss rate, a panel a (CP size, length); below, what rules take.

    Args:
        first: of two ranks or more, at least one.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((m.ranks, m.length) for m in first))
    figure, axes = pyplot.subplots(
        2, len(panels), figsize=(1.8 + 4.4 * len(panels), 5.6), squeeze=False, sharex="col", sharey="row",
        height_ratios=(3, 1.7),
    )  # fmt: skip
    for column, (ranks, length) in enumerate(panels):
        upper, lower = axes[0][column], axes[1][column]
        cases = sorted((m for m in first if (m.ranks, m.length) == (ranks, length)), key=lambda m: m.new)
        rates = [100 * m.new / m.length for m in cases]
        ratios = [medians(m)["pass_q"] / medians(m)["pass_kv"] for m in cases]
        upper.axhline(1, color="#888888", linewidth=0.8)
        upper.plot(rates, ratios, color="#444444", linewidth=1, zorder=1)
        faster = ["pass_q" if ratio < 1 else "pass_kv" for ratio in ratios]
        upper.scatter(rates, ratios, color=[_COLOURS[mode] for mode in faster], zorder=2)
        upper.set_title(f"{length:,} tokens, CP {ranks}", fontsize=10)
        judged = [(rate, m.taken) for rate, m in zip(rates, cases, strict=True) if m.taken]
        for row, rule in enumerate(RULES if judged else ()):
            colours = [_COLOURS[taken[rule]] for _, taken in judged]
            lower.scatter([rate for rate, _ in judged], [row] * len(judged), color=colours, marker="s", s=30)
        lower.set_ylim(len(RULES) - 0.5, -0.5)
        lower.set_yticks(range(len(RULES)), RULES)
        lower.set_xscale("log")
        lower.xaxis.set_major_formatter("{x:g}")
        lower.set_xlabel("miss rate: new tokens, % of all")
        for panel in (upper, lower):
            panel.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("time to first token,\npass_q / pass_kv")
    axes[1][0].set_ylabel("taken by")
    shown = set(RINGS).union(*(m.taken.values() for m in first))
    for mode in (mode for mode in _COLOURS if mode in shown):
        axes[0][0].scatter([], [], color=_COLOURS[mode], label=mode)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(labels), loc="lower center", frameon=False, title="faster, or taken")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
