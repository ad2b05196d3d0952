"""Flash Communication (Li et al. 2024): the cost of low-bit sums for real models, by bits, group, format, rotation."""

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from analysis.benchmarks.report import check_least, paired
from megatron_longctx.config.environment import environment
from megatron_longctx.core.errors import refuse
from megatron_longctx.training.ranks import Ranks

from . import latencies
from .page import Cell, Results, Table, cell, paper, paths, recorded, sensitivity
from .rounding import TOKEN, Rounding

Weights = Mapping[str, Any]
TITLES = {"smollm2": "SmolLM2-135M", "qwen": "Qwen2.5-Coder-1.5B"}
_GROUPS = TOKEN, 128, 32
_BLOCKS = 16, 32, 48, 64, 96, 128
_HADAMARD = ((TOKEN, False), (TOKEN, True), (128, False), (128, True), (32, False))
ROUNDINGS = (
    *(Rounding(form) for form in ("int8", "int6", "int4", "fp8", "fp6", "fp4")),
    *(Rounding(form, symmetric=True) for form in ("int8", "int6", "int4")),
    *(Rounding("int4", group, hadamard=turned) for group, turned in _HADAMARD if (group, turned) != (128, False)),
    *(Rounding("int4", only=kind) for kind in ("output", "down")),
    Rounding("fp8", TOKEN),
    *(Rounding("int8", group) for group in (TOKEN, 32)),
    *(Rounding("int4", group, symmetric=True) for group in (TOKEN, 32)),
)
INT8_WEIGHTS = tuple(Rounding(form) for form in ("int8", "int6", "int4"))
ERRORS = (
    *(Rounding(form, group, ranges) for form in ("int8", "int4") for group in _GROUPS for ranges in (False, True)),
    *(Rounding("int4", group, hadamard=True) for group in _GROUPS),
    *(Rounding(form) for form in ("fp8", "fp4")),
)  # fmt: skip


def make(arguments: argparse.Namespace) -> Results:
    """Measure perplexities of the given models; those of others come from the recorded JSON."""
    if bool(arguments.model) != (arguments.text is not None):
        raise refuse("--text", arguments.text, "the essays where --model is given, else none", "Give both, or neither.")
    check_least("--windows", arguments.windows, 2)
    check_least("--length", arguments.length)
    Ranks.of(1, arguments.device, least=1)
    known = paths("flash_communication")[0].is_file()
    raw: dict[str, Any] = recorded("papers_flash_communication")["raw"] if known else {}
    for model in arguments.model:
        raw |= weights(model, arguments)
    raw = {name: raw[name] for name in TITLES}
    of = list(raw.values())
    own = [each["own"] for each in of]
    tables = (formats(own), coarse(own), rotated(own), whole(own, [each["int8_weights"] for each in of]), layers(own))
    found = {f"{name}_{key}": fact for name, one in zip(TITLES, of, strict=True) for key, fact in facts(one).items()}
    times = latencies.parts(), latencies.first_tokens()
    return Results(
        (*tables, steps(), blocks(), *times, sensitivity(latencies.assumed())), found | latencies.facts(times), raw=raw
    )


def weights(model: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a model's perplexities, errors and environment, keyed by its name in `TITLES`.

    This takes hours on few cores, and minutes on a GPU.
    """
    from .real_weights import Options, measure, model_name

    own = Options(ROUNDINGS, arguments.windows, arguments.length, formats=ERRORS)
    both = own, replace(own, roundings=INT8_WEIGHTS, int8_weights=True, formats=())
    measured = measure(model, arguments.text, arguments.device, both)
    return {
        model_name(model): dict(zip(("own", "int8_weights"), measured, strict=True)) | {"environment": environment()}
    }


def perplexity(weights: Weights, rounding: Rounding) -> float:
    return math.exp(statistics.fmean(weights["losses"][str(rounding)]))


def _heads(*words: str) -> list[str]:
    """Return columns of every model."""
    return [f"{title}: {words[0]}" if not number else word for title in TITLES.values()
            for number, word in enumerate(words)]  # fmt: skip


def formats(own: Sequence[Weights]) -> Table:
    theirs = {"fp8": 8.90, "int8 s": 8.90, "int8": 8.89, "fp6": 9.22, "int6 s": 9.48, "int6": 9.20, "fp4": 9.72}
    theirs |= {"int4 s": 10.51, "int4": 9.68}
    rows: list[list[Cell]] = [
        ["exact", *(each for one in own for each in (cell(perplexity(one, Rounding()), "w"), None, None)), None]
    ]
    for form in ("int8", "int6", "int4", "fp8", "fp6", "fp4"):
        for symmetric in (False, True) if form.startswith("int") else (False,):
            rounding = Rounding(form, symmetric=symmetric)
            row: list[Cell] = [form + (", symmetric" if symmetric else "")]
            for one in own:
                row.append(cell(perplexity(one, rounding), "w"))
                row += [cell(each, "w", 4) for each in _loss_increase(one, rounding)]
            rows.append([*row, paper(theirs[form + (" s" if symmetric else "")])])
    columns = ["sums", *_heads("perplexity", "loss more by, nats", "standard error"), "paper, Llama-3-8B on C4"]
    return Table("formats", "integers and low-bit floats", columns, rows, ["table 4"])


def _loss_increase(weights: Weights, rounding: Rounding) -> tuple[float, float]:
    """Return the increase of the loss over exact sums for the same texts, and its standard error."""
    return paired(weights["losses"][str(rounding)], weights["losses"]["none"])


def _error(own: Weights, rounding: Rounding, kind: str) -> float:
    """Return the mean relative squared error, in percent."""
    of = [each for each in own["errors"] if each["rounding"] == str(rounding) and each["kind"] == kind]
    return 100 * statistics.fmean(each["relative"] for each in of)


def coarse(own: Sequence[Weights]) -> Table:
    rows: list[list[Cell]] = []
    for form in ("int8", "int4"):
        for symmetric in (False, True):
            for group in _GROUPS:
                rounding = Rounding(form, group, symmetric)
                row: list[Cell] = [form, "symmetric" if symmetric else "asymmetric", str(group or "a token")]
                for one in own:
                    known = str(rounding) in one["losses"]
                    row += [cell(_error(one, rounding, kind), "w", 3) for kind in ("output", "down")]
                    row.append(cell(perplexity(one, rounding), "w") if known else None)
                rows.append(row)
    columns = [
        *("sums", "ranges", "group"),
        *_heads("error of output projections, %", "of down projections, %", "perplexity"),
    ]
    return Table("coarse", "coarse and fine groups", columns, rows, ["figure 4"])


def rotated(own: Sequence[Weights]) -> Table:
    theirs = {(TOKEN, False): 2363367.8, (TOKEN, True): 10.61, (128, False): 9.68, (128, True): 9.67}
    rows: list[list[Cell]] = []
    for group, turned in _HADAMARD:
        perplexities = [perplexity(one, Rounding("int4", group, hadamard=turned)) for one in own]
        row: list[Cell] = [str(group or "a token"), "with" if turned else "without"]
        rows.append([*row, *(cell(each, "w") for each in perplexities), paper(theirs.get((group, turned)))])
    columns = ["group", "Hadamard transform", *_heads("perplexity, int4"), "paper, Llama-3-8B"]
    return Table("rotated", "rotation before rounding", columns, rows, ["table 5"])


def whole(own: Sequence[Weights], int8: Sequence[Weights]) -> Table:
    theirs = {"none": (None, None), "int8": (8.89, 9.01), "int6": (9.20, 9.33), "int4": (9.68, 9.85)}
    rows: list[list[Cell]] = []
    for form in ("none", "int8", "int6", "int4"):
        pairs = [(perplexity(a, Rounding(form)), perplexity(b, Rounding(form))) for a, b in zip(own, int8, strict=True)]
        rows.append([form, *(cell(each, "w") for pair in pairs for each in pair), *map(paper, theirs[form])])
    for kind in ("output", "down"):
        alone = [perplexity(one, Rounding("int4", only=kind)) for one in own]
        row: list[Cell] = [f"int4, {kind} projections alone"]
        rows.append([*row, *(each for one in alone for each in (cell(one, "w"), None)), None, None])
    columns = ["sums", *_heads("its own weights", "8-bit weights"), "paper, Llama-3-8B on C4", "8-bit weights"]
    return Table("whole", "perplexities", columns, rows, ["table 6", "table 7"])


def _by_layer(own: Weights) -> dict[int, list[float]]:
    """Return mean squared errors by layer: of a rank's output projection and of the sum, then of down projections."""
    wanted = str(Rounding("int4"))
    errors = {(e["kind"], e["layer"], e["step"]): e["mse"] for e in own["errors"] if e["rounding"] == wanted}
    kinds = [(kind, step) for kind in ("output", "down") for step in ("reduce", "gather")]
    return {layer: [errors[kind, layer, step] for kind, step in kinds] for layer in sorted({e[1] for e in errors})}


def layers(own: Sequence[Weights]) -> Table:
    by_layer = [_by_layer(one) for one in own]
    rows: list[list[Cell]] = []
    for layer in sorted(set().union(*by_layer)):
        errors = [each for one in by_layer for each in one.get(layer, [math.nan] * 4)]
        rows.append([str(layer), *(cell(1e4 * each, "w", 3) for each in errors)])
    columns = ["layer", *_heads("output, to be summed", "output, sums", "down, to be summed", "down, sums")]
    return Table("layers", "squared errors by layer", columns, rows, ["figure 5"])


def blocks() -> Table:
    """Show all-reduces by size and number of thread blocks."""
    measured = {(m["way"], m["num_bytes"]): m["seconds"] for m in recorded("all_reduce_blocks_h100_x2")["measurements"]}
    rows: list[list[Cell]] = []
    for mib in (1, 4, 16, 64, 256):
        for form in ("int8", "int4"):
            ways = ["NCCL", *(f"{form} over peers, {count} blocks" for count in _BLOCKS)]
            rows.append([f"{mib} MiB", form, *(cell(1e6 * measured[way, mib * 2**20], "m", 1) for way in ways)])
    columns = ["size", "sums", "NCCL, exact, µs", *(f"{count} blocks, µs" for count in _BLOCKS)]
    return Table("blocks", "thread blocks of a kernel, on 2 H100s", columns, rows, ["figure 11"])


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


def facts(raw: Weights) -> dict[str, float]:
    """Return the numbers of one model in the claims."""
    own, int8 = raw["own"], raw["int8_weights"]
    forms = ("int8", "int6", "int4", "fp8", "fp6", "fp4")
    found = {form: perplexity(own, Rounding(form)) for form in forms}
    found |= {f"{form}_s": perplexity(own, Rounding(form, symmetric=True)) for form in forms[:3]}
    for form in forms:
        found[f"{form}_more"], found[f"{form}_noise"] = _loss_increase(own, Rounding(form))
    times = [row[2] / row[0] for row in _by_layer(own).values()]
    return found | {
        "tokens": own["tokens"],
        "exact": perplexity(own, Rounding()),
        "coarse": perplexity(own, Rounding("int4", TOKEN)),
        "coarse_s": perplexity(own, Rounding("int4", TOKEN, symmetric=True)),
        "down_relative": _error(own, Rounding("int4"), "down") / _error(own, Rounding("int4"), "output"),
        "coarse_turned": perplexity(own, Rounding("int4", TOKEN, hadamard=True)),
        "turned": perplexity(own, Rounding("int4", hadamard=True)),
        "fine": perplexity(own, Rounding("int4", 32)),
        **{kind: perplexity(own, Rounding("int4", only=kind)) for kind in ("output", "down")},
        "down_times": statistics.median(times),
        "down_most": max(times),
        "int8_weights": perplexity(int8, Rounding()),
        "int8_weights_int8": perplexity(int8, Rounding("int8")),
        "int8_weights_int4": perplexity(int8, Rounding("int4")),
    }
