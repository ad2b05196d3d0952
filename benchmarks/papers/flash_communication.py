"""Flash Communication (Li et al. 2024): what low-bit sums cost a real model, by bits, group, format and rotation."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .page import Cell, Made, Table, cell, paper, paths, value
from .rounding import Rounding

Weights = Mapping[str, Any]
_TOKEN = 576
"""Values of a token of SmolLM2: one range for all of it is the coarsest."""
_GROUPS = 32, 128, _TOKEN
_HADAMARD = ((_TOKEN, False), (_TOKEN, True), (128, False), (128, True), (32, False))
ROUNDINGS = (
    *(Rounding(form) for form in ("int8", "int6", "int4", "fp8", "fp6", "fp4")),
    *(Rounding(form, symmetric=True) for form in ("int8", "int6", "int4")),
    *(Rounding("int4", group, hadamard=turned) for group, turned in _HADAMARD if (group, turned) != (128, False)),
    *(Rounding("int4", only=kind) for kind in ("output", "down")),
    Rounding("fp8", _TOKEN),
)
INT8_WEIGHTS = tuple(Rounding(form) for form in ("int8", "int6", "int4"))
ERRORS = (
    *(Rounding(form, group, ranges) for form in ("int8", "int4") for group in _GROUPS for ranges in (False, True)),
    *(Rounding("int4", group, hadamard=True) for group in _GROUPS),
    *(Rounding(form) for form in ("fp8", "fp4")),
)  # fmt: skip


def make(arguments: argparse.Namespace) -> Made:
    """With `--model` and `--text` perplexities are taken anew; without, those of the recorded JSON are shown again."""
    if arguments.model and arguments.text:
        raw = weights(arguments)
    else:
        raw = json.loads(paths("flash_communication")[0].read_text(encoding="utf-8"))["raw"]
    own, int8 = raw["own"], raw["int8_weights"]
    tables = (formats(own), coarse(own), rotated(own), whole(own, int8), layers(own), steps())
    return Made(tables, facts(tables), raw=raw)


def weights(arguments: argparse.Namespace) -> dict[str, Any]:
    """Perplexities and errors with the real weights: hours on few cores."""
    from .real_weights import Asked, measure

    def say_nothing(found: dict[str, Any]) -> None:
        del found

    sizes = arguments.windows, arguments.length
    own = Asked(arguments.model, arguments.text, ROUNDINGS, *sizes, formats=ERRORS, progress=say_nothing)
    int8 = replace(own, roundings=INT8_WEIGHTS, int8_weights=True, formats=())
    return {"own": measure(own), "int8_weights": measure(int8)}


def perplexity(found: Weights, rounding: Rounding) -> float:
    return math.exp(statistics.fmean(found["losses"][str(rounding)]))


def formats(own: Weights) -> Table:
    theirs = {"fp8": 8.90, "int8 s": 8.90, "int8": 8.89, "fp6": 9.22, "int6 s": 9.48, "int6": 9.20, "fp4": 9.72}
    theirs |= {"int4 s": 10.51, "int4": 9.68}
    rows: list[list[Cell]] = [["exact", cell(perplexity(own, Rounding()), "w"), None, None, None]]
    for form in ("int8", "int6", "int4", "fp8", "fp6", "fp4"):
        for symmetric in (False, True) if form.startswith("int") else (False,):
            rounding = Rounding(form, symmetric=symmetric)
            more, noise = _more(own, rounding)
            rows.append([
                form + (", symmetric" if symmetric else ""), cell(perplexity(own, rounding), "w"), cell(more, "w", 3),
                cell(noise, "w", 3), paper(theirs[form + (" s" if symmetric else "")]),
            ])  # fmt: skip
    columns = ["sums", "perplexity", "loss more by, nats", "standard error", "paper, Llama-3-8B on C4"]
    return Table("formats", "integers and low-bit floats", columns, rows, ["table 4"])


def _more(found: Weights, rounding: Rounding) -> tuple[float, float]:
    """By how much the loss of the same texts is higher than exact, and the standard error of that."""
    pairs = zip(found["losses"][str(rounding)], found["losses"]["none"], strict=True)
    more = [ours - exact for ours, exact in pairs]
    return statistics.fmean(more), statistics.stdev(more) / math.sqrt(len(more))


def coarse(own: Weights) -> Table:
    rows: list[list[Cell]] = []
    for form in ("int8", "int4"):
        for symmetric in (False, True):
            for group in (_TOKEN, 128, 32):
                rounding = Rounding(form, group, symmetric)
                known = str(rounding) in own["losses"]
                of = [each for each in own["errors"] if each["rounding"] == str(rounding)]
                errors = [
                    statistics.fmean(each["relative"] for each in of if each["kind"] == kind)
                    for kind in ("output", "down")
                ]
                shown = cell(perplexity(own, rounding), "w") if known else None
                ranges = "symmetric" if symmetric else "asymmetric"
                rows.append([form, ranges, str(group), *(cell(100 * each, "w", 3) for each in errors), shown])
    columns = ["sums", "ranges", "group", "error of output projections, %", "of down projections, %", "perplexity"]
    return Table("coarse", "coarse and fine groups", columns, rows, ["figure 4"])


def rotated(own: Weights) -> Table:
    theirs = {(_TOKEN, False): 2363367.8, (_TOKEN, True): 10.61, (128, False): 9.68, (128, True): 9.67}
    rows: list[list[Cell]] = []
    for group, turned in _HADAMARD:
        found = perplexity(own, Rounding("int4", group, hadamard=turned))
        said = "with" if turned else "without"
        rows.append([str(group), said, cell(found, "w"), paper(theirs.get((group, turned)))])
    columns = ["group", "Hadamard transform", "perplexity, int4", "paper, Llama-3-8B (8,192 for 576)"]
    return Table("rotated", "rotation before rounding", columns, rows, ["table 5"])


def whole(own: Weights, int8: Weights) -> Table:
    theirs = {"none": (8.88, None), "int8": (8.89, 9.01), "int6": (9.20, 9.33), "int4": (9.68, 9.85)}
    rows: list[list[Cell]] = []
    for form in ("none", "int8", "int6", "int4"):
        first, second = theirs[form]
        rows.append([
            form, cell(perplexity(own, Rounding(form)), "w"), paper(first if form != "none" else None),
            cell(perplexity(int8, Rounding(form)), "w"), paper(second),
        ])  # fmt: skip
    for kind in ("output", "down"):
        rows.append(
            [f"int4, {kind} projections alone", cell(perplexity(own, Rounding("int4", only=kind)), "w"), *[None] * 3]
        )
    columns = ["sums", "its own weights", "paper, Llama-3-8B on C4", "weights as 8-bit integers", "paper"]
    return Table("whole", "perplexities", columns, rows, ["table 6", "table 7"])


def layers(own: Weights) -> Table:
    rows: list[list[Cell]] = []
    wanted = str(Rounding("int4"))
    found = {(e["kind"], e["layer"], e["step"]): e["mse"] for e in own["errors"] if e["rounding"] == wanted}
    for layer in sorted({layer for _, layer, _ in found}):
        errors = [found[kind, layer, step] for kind in ("output", "down") for step in ("reduce", "gather")]
        rows.append([str(layer), *(cell(1e4 * each, "w", 3) for each in errors)])
    columns = ["layer", "output, to be summed", "output, sums", "down, to be summed", "down, sums"]
    return Table("layers", "squared errors by layer", columns, rows, ["figure 5"])


def steps() -> Table:
    rows: list[list[Cell]] = []
    for n in (4, 8):
        for name, volume, reduce, gather, rounds in (
            ("ring", 2 * (n - 1) / n, n - 1, n - 1, n),
            ("two steps", 2 * (n - 1) / n, 1, 1, 2),
        ):
            rows.append([str(n), name, cell(volume, "f"), *(cell(each, "f", 0) for each in (reduce, gather, rounds))])
    columns = ["ranks", "all-reduce", "sent by a rank, of its values", "steps to sum", "to gather", "times rounded"]
    return Table("steps", "a ring and two steps", columns, rows, ["table 1"])


def facts(tables: Sequence[Table]) -> dict[str, float]:
    """What the claims quote."""
    of = {table.key: table for table in tables}
    columns = {row[0]: row[1] for row in of["formats"].rows}
    found = {str(name).replace(", symmetric", "_s"): float(each["value"]) for name, each in columns.items()
             if isinstance(each, dict)}  # fmt: skip
    down, output = (value(of["whole"], (f"int4, {kind} projections alone",), 1) for kind in ("down", "output"))
    errors = [[float(each["value"]) for each in row[1:] if isinstance(each, dict)] for row in of["layers"].rows]
    return found | {
        "int8_more": value(of["formats"], ("int8",), 2),
        "int8_noise": value(of["formats"], ("int8",), 3),
        "coarse": value(of["rotated"], ("576", "without"), 2),
        "coarse_turned": value(of["rotated"], ("576", "with"), 2),
        "turned": value(of["rotated"], ("128", "with"), 2),
        "fine": value(of["rotated"], ("32", "without"), 2),
        "down": down,
        "output": output,
        "down_times": statistics.median(row[2] / row[0] for row in errors),
        "down_most": max(row[2] / row[0] for row in errors),
        "int8_weights_int8": value(of["whole"], ("int8",), 3),
        "int8_weights_int4": value(of["whole"], ("int4",), 3),
    }
