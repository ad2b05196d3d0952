"""Fits the empirical rule of "Context Parallelism for Scalable Million-Token Inference" to measured prompts.

For T new and P cached tokens, h = alpha ln T + beta ln(T / (T + P)) + gamma approximates, by least squares, the
logarithm of the speed-up from passing keys and values instead of queries.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_longctx.core.errors import refuse

from .report import Report, table


class Prompt(NamedTuple):
    """New and cached tokens, and the seconds to the first token in both modes."""

    new: int
    cached: int
    pass_kv: float
    pass_q: float


Coefficients = tuple[float, float, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of = "of `benchmarks inference`"
    parser.add_argument("--prompts", type=Path, required=True, nargs="+", metavar="FILE", help=of)
    parser.add_argument("--ranks", type=int, help="use only prompts measured on this number of context-parallel ranks")


def run(arguments: argparse.Namespace) -> None:
    """Fit, and write JSON and a Markdown table."""
    measured = [each for path in arguments.prompts for each in prompts(json.loads(path.read_text()), arguments.ranks)]
    fitted = fit(measured)
    words = " ".join(f"{n}={x:.4g}" for n, x in zip(("alpha", "beta", "gamma"), fitted, strict=True))
    rows = [
        [f"{p.new:,}", f"{p.new + p.cached:,}", f"{1e3 * p.pass_kv:.1f}", f"{1e3 * p.pass_q:.1f}",
         "pass_kv" if score(p, fitted) > 0 else "pass_q", f"{slower(p, fitted):.1%}"]
        for p in measured
    ]  # fmt: skip
    report = Report(arguments.out, "cpu", "coefficients of the empirical rule", words, "ms to the first token")
    head = ["new", "of", "pass_kv", "pass_q", "taken", "slower than the faster"]
    print(report.write({"coefficients": fitted, "prompts": measured}, table(head, rows)))


def prompts(data: Any, ranks: int | None = None) -> list[Prompt]:
    """Return the prompts, anywhere in a benchmark's JSON, that were measured in both modes on several ranks."""
    if isinstance(data, dict):
        nested = [each for value in data.values() for each in prompts(value, ranks)]
        times, n = data.get("seconds"), data.get("context_parallel_size", 1)
        if isinstance(times, dict) and {"pass_kv", "pass_q"} <= set(times) and n > 1 and ranks in (None, n):
            nested.append(Prompt(data["new"], data["cached"], times["pass_kv"]["p50"], times["pass_q"]["p50"]))
        return nested
    return [each for value in data for each in prompts(value, ranks)] if isinstance(data, list) else []


def fit(measured: Sequence[Prompt]) -> Coefficients:
    """Return alpha, beta and gamma."""
    if len(measured) < 4:
        raise refuse("--prompts", len(measured), "4 or more prompts with pass_kv and pass_q", "Measure more of them.")
    rows = torch.tensor([[*_terms(p), 1.0] for p in measured], dtype=torch.float64)
    gains = torch.tensor([[math.log(p.pass_q / p.pass_kv)] for p in measured], dtype=torch.float64)
    alpha, beta, gamma = torch.linalg.lstsq(rows, gains, driver="gelsd").solution.flatten().tolist()
    return alpha, beta, gamma


def score(prompt: Prompt, by: Coefficients) -> float:
    """Return h. If it is above 0, the rule passes keys and values."""
    first, second = _terms(prompt)
    return by[0] * first + by[1] * second + by[2]


def slower(prompt: Prompt, by: Coefficients) -> float:
    """Return how much slower the rule's choice is than the faster mode: 0.1 for 10% more time."""
    chosen = prompt.pass_kv if score(prompt, by) > 0 else prompt.pass_q
    return chosen / min(prompt.pass_kv, prompt.pass_q) - 1


def _terms(prompt: Prompt) -> tuple[float, float]:
    return math.log(prompt.new), math.log(prompt.new / (prompt.new + prompt.cached))
