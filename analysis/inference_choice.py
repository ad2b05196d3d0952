"""What `inference.rule=simulate` takes for prompts that were measured on GPUs: `python -m analysis.inference_choice`.

Prices are the code's own, over calibrations of the same kind of machine (`results/calibrations/`). Those of four ranks
do not say how fast a host is: they get the figure of the first of two ranks. Writes `results/inference_choice.json` and
a table beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_longctx.inference.batch import Batch
from megatron_longctx.inference.cache_manager import CacheManager
from megatron_longctx.inference.choice import Chooser, Figures
from megatron_longctx.inference.shares import FEW
from megatron_longctx.schedules import Takes, Target
from megatron_longctx.schedules.calibration import load_calibration

RESULTS = Path(__file__).parent / "results"
PAGE = 64
TIE = 0.01
"""By so much slower is as good."""


@dataclass(frozen=True)
class Source:
    """Prompts of one run. few: new tokens a rank up to which they lay in a row then. held_out: the rule's constants
    were set without them."""

    result: str
    part: int
    transport: str
    calibration: str
    few: int = FEW
    held_out: bool = False


SOURCES = (
    Source("inference_rows_h200", 3, "peer", "h200_x2_peer_bursts"),
    Source("inference_short_prompts_h200_x4", 0, "p2p", "h200_x4_p2p_bursts"),
    Source("inference_short_prompts_h200_x4", 1, "peer", "h200_x4_peer_bursts"),
    Source("inference_planned_h200_x4", 0, "p2p", "h200_x4_p2p_bursts", 0),
    Source("inference_transports_h200_x4", 0, "peer", "h200_x4_peer_bursts", 0),
    Source("inference_transports_h200_x4", 1, "p2p", "h200_x4_p2p_bursts", 0),
    Source("inference_planned_h200_x4", 1, "p2p", "h200_x4_p2p_bursts", 0),
    Source("inference_rows_h200", 0, "peer", "h200_x2_peer"),
    Source("inference_rows_h200", 5, "peer", "h200_x2_peer", held_out=True),
    Source("inference_rows_h200", 6, "peer", "h200_x2_peer", held_out=True),
)


def cases() -> Iterator[dict[str, Any]]:
    """Every measured prompt on several ranks, with what is taken for it."""
    pace = load_calibration(RESULTS / "calibrations" / "h200_x2_peer_bursts.json").costs.host_operation_s
    for source in SOURCES:
        found = load_calibration(RESULTS / "calibrations" / f"{source.calibration}.json")
        costs = replace(found.costs, host_operation_s=found.costs.host_operation_s or pace)
        workload = replace(found.workload, batch=1)
        part = json.loads((RESULTS / f"{source.result}.json").read_text())["parts"][source.part]
        for prompt in part["first_token"]:
            seconds = {mode: s["p50"] for mode, s in prompt["seconds"].items() if mode != "replicated"}
            if prompt["context_parallel_size"] == 1:
                continue
            batch = _batch(prompt, source.few)
            hosts = (tuple(range(batch.n)),) * batch.n if source.transport == "peer" else None
            target = Target(workload, Takes(packed=True, rectangles=True, windows=True), hosts)
            chooser = Chooser(Figures(workload, found.cluster, costs), rule="simulate", modes=tuple(seconds))
            mode = chooser.choose(batch, target).mode
            yield {
                "result": source.result,
                "held_out": source.held_out,
                "transport": source.transport,
                "ranks": prompt["context_parallel_size"],
                "new": prompt["new"],
                "cached": prompt["cached"],
                "milliseconds": {name: 1e3 * s for name, s in seconds.items()},
                "taken": mode,
                "slower": seconds[mode] / min(seconds.values()) - 1,
            }


def _batch(prompt: dict[str, Any], few: int) -> Batch:
    n, new, cached = prompt["context_parallel_size"], prompt["new"], prompt["cached"]
    manager = CacheManager(n, (new + cached) // n // PAGE + 8, PAGE, few)
    session = manager.open()
    if cached:
        manager.append({session: cached})
    return Batch(n, manager.slots_per_rank, manager.append({session: new}))


def table(found: list[dict[str, Any]]) -> str:
    """The cases, and how often the choice is right: those that set the constants, and others."""
    lines = []
    for held_out in (False, True):
        cases = [case for case in found if case["held_out"] == held_out]
        right = sum(case["slower"] <= TIE for case in cases)
        mean, most = sum(case["slower"] for case in cases) / len(cases), max(case["slower"] for case in cases)
        lines += [
            f"Of the {len(cases)} prompts {'measured afterwards' if held_out else 'that set its constants'} the rule "
            f"takes the fastest of the measured modes, or one within {TIE:.0%} of it, for {right}; what it takes is "
            f"{mean:.1%} slower than the fastest in the mean, {most:.1%} at most.",
            "",
        ]
    lines += [
        "| ranks | transport | new | of | pass_kv | pass_q | one_hop | taken | slower | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in found:
        ms = case["milliseconds"]
        cells = [f"{ms[mode]:.1f}" if mode in ms else "" for mode in ("pass_kv", "pass_q", "one_hop")]
        lines.append(
            f"| {case['ranks']} | {case['transport']} | {case['new']:,} | {case['new'] + case['cached']:,} | "
            f"{' | '.join(cells)} | {case['taken']} | {case['slower']:.1%} | "
            f"{'afterwards' if case['held_out'] else ''} |"
        )
    return "\n".join(lines)


def main() -> None:
    found = list(cases())
    (RESULTS / "inference_choice.json").write_text(json.dumps(found, indent=1) + "\n")
    head = "# What `inference.rule=simulate` takes for measured prompts\n\nms to the first token, medians, on H200s"
    head += (
        " (`python -m analysis.inference_choice`, which names the runs). Some are the same prompts measured twice.\n\n"
    )
    (RESULTS / "inference_choice.md").write_text(head + table(found) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
