"""Tables of TASP's page that were measured: on emulated networks, and on GPUs behind a switch."""

from collections.abc import Iterator
from typing import Any

from .page import Cell, Table, cell, recorded

_DIRECT = ("all_gather", "ulysses")
"""Modes that use all links without rings."""
_PASSES = ("forward_s", "backward_s", "both_s")
_GAINS = ("forward, times as fast as zigzag", "simulated", "backward", "simulated", "both", "simulated")


def emulated() -> Table:
    """Show what `python -m analysis.network` recorded."""
    measurements = recorded("network_emulated")["measurements"]
    rows: list[list[Cell]] = []
    for network in sorted({each["network"] for each in measurements}):
        for mask in ("causal", "full"):
            wanted = (network, mask == "causal")
            of = {each["mode"]: each for each in measurements if (each["network"], each["causal"]) == wanted}
            if "tasp" in of and "zigzag" in of:
                ways = [("tasp", _PASSES[0]), ("tasp", _PASSES[1]), *((mode, _PASSES[0]) for mode in _DIRECT)]
                times = [of["zigzag"][way] / of[mode][way] if mode in of else None for mode, way in ways]
                rows.append([network, mask, *(cell(each, "e") for each in times)])
    columns = [
        "network",
        "mask",
        "forward, times as fast as zigzag",
        "backward",
        *(f"{each}, forward" for each in _DIRECT),
    ]
    return Table("emulated", "measured where links are all that counts", columns, rows)


def measured() -> Table:
    """Show `tasp` beside `zigzag` on GPUs behind a switch, forward and backward over NCCL."""
    measurements = recorded("papers_measured_h200_x4")["measurements"]
    of = {(m["name"], m["length"], m["heads"]): 1e3 * (m["forward_s"] + m["backward_s"]) for m in measurements}
    rows: list[list[Cell]] = []
    for name, length, heads in of:
        if name == "tasp":
            one, several = (of[mode, length, heads] for mode in ("zigzag", "tasp"))
            rows.append([f"{length // 1024}K", heads, cell(one, "m"), cell(several, "m"), cell(one / several, "m", 3)])
    columns = ["tokens", "heads", "zigzag, ms", "tasp, ms", "times as fast"]
    return Table("measured", "measured on 4 H200s, forward and backward", columns, rows, ["figure 5"])


def by_ratio() -> Table:
    """Show what `python -m analysis.network --case ratios` recorded."""
    rows: list[list[Cell]] = []
    pairs = _recorded("network_ratios", "zigzag", "tasp")
    for one, several in sorted(pairs, key=lambda pair: float(pair[0]["computing"])):
        ratio = cell(one["computing"], "e")
        rows.append([one["network"].partition(", ")[2], ratio, *_gains(one, several, *_PASSES)])
    columns = ["network", "computation / communication of zigzag", *_GAINS]
    return Table("by_ratio", "measured where there is more to compute", columns, rows)


def sums_emulated() -> Table:
    """Show what `python -m analysis.network --case sums` recorded."""
    rows: list[list[Cell]] = []
    for mode in ("zigzag", "ring", "double_ring (4)", "tasp"):
        for plain, less in _recorded("network_sums", mode, f"{mode}, summed"):
            rows.append([plain["network"], mode, *_gains(plain, less, "backward_s")])
    columns = ["network", "mode", "backward, times as fast", "simulated"]
    return Table("sums_emulated", "the same, measured where links are all that counts", columns, rows)


def _recorded(result: str, mode: str, other: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the measurements of both modes on every network."""
    measurements = recorded(result)["measurements"]
    for each in measurements:
        for way in ("", "predicted_"):
            each[f"{way}both_s"] = each[f"{way}forward_s"] + each[f"{way}backward_s"]
    of = {(each["network"], each["mode"]): each for each in measurements}
    return [(of[key], of[key[0], other]) for key in of if key[1] == mode]


def _gains(one: dict[str, Any], other: dict[str, Any], *passes: str) -> Iterator[Cell]:
    """Yield how many times as fast the other mode is in each pass, measured and simulated."""
    for each in passes:
        yield cell(one[each] / other[each], "e")
        yield cell(one[f"predicted_{each}"] / other[f"predicted_{each}"], "d")
