"""What the inference benchmark has measured, as data and as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .inference_ranks import Decoded, FirstToken
from .recorded import table


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, and 50th, 90th and 99th percentile by nearest rank."""
    ranked = sorted(seconds)
    found = {f"p{p}": ranked[max(0, math.ceil(p / 100 * len(ranked)) - 1)] for p in (50, 90, 99)}
    return {"mean": sum(ranked) / len(ranked), **found}


def as_data(first: Sequence[FirstToken], decoded: Sequence[Decoded]) -> dict[str, Any]:
    """The measurements, in seconds."""
    return {
        "first_token": [
            {
                **{"context_parallel_size": m.ranks, "tokens": m.length, "new": m.new, "cached": m.cached},
                "miss_rate": m.new / m.length,
                "seconds": {mode: {**percentiles(s), "all": s} for mode, s in m.seconds.items()},
                **{"auto": m.auto, "slower": m.slower, "predicted_layer_s": m.predicted},
            }
            for m in first
        ],
        "decode": [
            {"context_parallel_size": m.ranks, "cached": m.cached, "batch": m.batch, "mode": m.mode}
            | percentiles(m.seconds)
            for m in decoded
        ],
    }


def tables(first: Sequence[FirstToken], decoded: Sequence[Decoded]) -> str:
    """Markdown; times in milliseconds."""
    parts = [_first_table(first), ""] if first else []
    rows = []
    for m in decoded:
        times = [f"{seconds * 1e3:.2f}" for seconds in percentiles(m.seconds).values()]
        rows.append([str(m.ranks), f"{m.cached:,}", str(m.batch), m.mode, *times])
    head = ["CP", "cached", "batch", "mode", "per token (mean)", "p50", "p90", "p99"]
    return "\n".join([*parts, "Decode: time between tokens, over random keys and values", "", table(head, rows)])


def _first_table(first: Sequence[FirstToken]) -> str:
    modes, rows = list(dict.fromkeys(mode for m in first for mode in m.seconds)), []
    for m in first:
        found = {mode: percentiles(seconds) for mode, seconds in m.seconds.items()}
        times = [
            " / ".join(f"{found[mode][p] * 1e3:.2f}" for p in ("p50", "p90", "p99")) if mode in found else ""
            for mode in modes
        ]
        slower = "" if m.slower is None else f"{m.slower:.1%}"
        case = [str(m.ranks), f"{m.length:,}", f"{m.new:,}", f"{m.new / m.length:.2%}"]
        rows.append([*case, *times, m.auto or "", slower])
    said = "Time to first token: p50 / p90 / p99. A rank alone passes nothing: its time is under the first mode."
    return f"{said}\n\n{table(['CP', 'tokens', 'new', 'miss rate', *modes, 'auto takes', 'slower'], rows)}"
