"""What was found, as tables and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import table as markdown

from .job import Found

CLOSE = 0.25
"""How far a prediction may be off."""


def cases(found: Sequence[Found]) -> dict[tuple[str, bool], list[Found]]:
    """By network and mask, the fastest first."""
    grouped: dict[tuple[str, bool], list[Found]] = {}
    for each in sorted(found, key=lambda each: each.seconds):
        grouped.setdefault((each.network, each.causal), []).append(each)
    return dict(sorted(grouped.items(), key=lambda item: (item[0][0], not item[0][1])))


def title(network: str, causal: bool) -> str:
    return f"{network}, {'causal' if causal else 'full'}"


def table(found: Sequence[Found]) -> str:
    """Markdown; a prediction off by more than `CLOSE` is marked."""
    head = ("network", "mode", "forward", "backward", "predicted", "predicted / measured", "error")
    rows = []
    for (network, causal), group in cases(found).items():
        for each in group:
            mark = "" if abs(each.ratio - 1) <= CLOSE else " (!)"
            predicted = f"{each.predicted_forward_s:.2f} + {each.predicted_backward_s:.2f}"
            seconds = (f"{each.forward_s:.2f}", f"{each.backward_s:.2f}", predicted)
            rows.append([title(network, causal), each.mode, *seconds, f"{each.ratio:.2f}{mark}", f"{each.error:.0e}"])
    return markdown(head, rows)


def speedups(found: Sequence[Found]) -> str:
    """How much faster every mode is than the flat rings: forward / forward and backward together."""
    rows = []
    for (network, causal), group in cases(found).items():
        flat = {each.mode: each for each in group}
        for each in group:
            cells = [
                f"{flat[name].forward_s / each.forward_s:.2f} / {flat[name].seconds / each.seconds:.2f}"
                if name in flat
                else ""
                for name in ("ring", "zigzag")
            ]
            rows.append([title(network, causal), each.mode, *cells])
    return markdown(["network", "mode", "against ring", "against zigzag"], rows)


def ratios(found: Sequence[Found]) -> str:
    """`tasp` against `zigzag` by how much there is to compute, the least first: Markdown."""
    head = ("network", "computation / communication of zigzag", "zigzag", "tasp", "forward, times as fast", "simulated",
            "backward")  # fmt: skip
    rows = []
    pairs = [{each.mode: each for each in group} for group in cases(found).values()]
    for pair in sorted(pairs, key=lambda pair: pair["zigzag"].computing):
        one, several = pair["zigzag"], pair["tasp"]
        simulated = one.predicted_forward_s / several.predicted_forward_s
        seconds = [f"{each.forward_s:.2f} + {each.backward_s:.2f}" for each in (one, several)]
        gains = (one.forward_s / several.forward_s, simulated, one.backward_s / several.backward_s)
        rows.append([one.network, f"{one.computing:.2f}", *seconds, *(f"{gain:.2f}" for gain in gains)])
    return markdown(head, rows)


def sums(found: Sequence[Found]) -> str:
    """Modes with gradients summed inside nodes, against the same without: Markdown."""
    rows = []
    for (network, causal), group in cases(found).items():
        of = {each.mode: each for each in group}
        for each in group:
            less = of.get(f"{each.mode}, summed")
            if less is not None:
                simulated = each.predicted_backward_s / less.predicted_backward_s
                gains = (each.backward_s / less.backward_s, simulated, each.seconds / less.seconds)
                rows.append([title(network, causal), each.mode, *(f"{gain:.2f}" for gain in gains)])
    return markdown(["network", "mode", "backward, times as fast", "simulated", "forward and backward"], rows)


def overlaps(found: Sequence[Found]) -> str:
    """Modes against the same without overlap: Markdown."""
    rows = []
    for (network, causal), group in cases(found).items():
        of = {each.mode: each for each in group}
        for each in group:
            apart = of.get(f"{each.mode}, no overlap")
            if apart is not None:
                ways = (("forward_s", "predicted_forward_s"), ("backward_s", "predicted_backward_s"))
                gains = [getattr(apart, key) / getattr(each, key) for way in ways for key in way]
                rows.append([title(network, causal), each.mode, *(f"{gain:.2f}" for gain in gains)])
    head = ("network", "mode", "forward, times as fast", "simulated", "backward", "simulated")
    return markdown(head, rows)


def draw(found: Sequence[Found], path: Path) -> None:
    """Bars of measured times, with what was predicted marked, one panel a case."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = cases(found)
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(7 * columns, 3.6 * rows), squeeze=False, layout="constrained")
    for panel in axes.flat[len(groups) :]:
        panel.axis("off")
    for panel, ((network, causal), group) in zip(axes.flat, groups.items(), strict=False):
        group = group[::-1]
        names = [each.mode for each in group]
        panel.barh(names, [each.forward_s for each in group], color="#4477aa", label="forward")
        panel.barh(
            names,
            [each.backward_s for each in group],
            left=[each.forward_s for each in group],
            color="#99bbdd",
            label="backward",
        )
        predicted = [each.predicted_forward_s + each.predicted_backward_s for each in group]
        panel.plot(predicted, range(len(group)), "k|", markersize=14, markeredgewidth=2, label="simulated")
        panel.set_title(title(network, causal))
        panel.set_xlabel("seconds")
        panel.legend(framealpha=0.9, loc="upper right")
    figure.savefig(path, dpi=100)
    plt.close(figure)
