"""Draw pictures of the docs: `python -m analysis.pictures PICTURE [--out PATH]`; `make pictures` draws all of them.

- `attention RESULT.json`: results of `analysis.benchmarks attention`, as percent of one device at equal FLOPs.
- `hybrid RESULT.json`: results of `analysis.benchmarks hybrid`, as percent of one GPU at equal work.
- `emulated`, `extend`: the pictures of `analysis.network` and `analysis.evaluations`, from their recorded results.
- `inference`: which rank holds which tokens of a conversation, and what ranks do in its last turn. Plans are simulated
  for one layer of 32 query and 8 key/value heads of 128 on H200s, described by their data sheets.
- `memory`: predictions for Llama 3 8B at 1,048,576 tokens on 8 H200s, memory per token of every term, and predictions
  compared with the peaks measured on GPUs (`analysis.recorded_memory`).
- `plan`: which step of zigzag on 8 ranks computes which pairs, as `plan --draw` does.
- `rows`: times to the first token of short prompts, by plans and replicated.
- `reductions`: times of all-reduces by size.
- `schedules`: time lines of all modes, for one causal layer of the same heads on 8 such H200s.
- `trees RESULT.json`: results of `analysis.benchmarks trees`, steps over shared beginnings and over separate rollouts.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

from analysis import evaluations
from analysis.benchmarks.hybrid import ALONE, HELPER, MEGATRON
from analysis.inference_picture import WORKLOAD, inference
from analysis.network import job as network
from analysis.recorded_memory import EARLIER, RECORDED, RESULTS, recorded_peaks
from megatron_longctx.config import RECOMPUTES
from megatron_longctx.config.cluster import GIB, load_cluster
from megatron_longctx.core.plans import MODES, ModeOptions, Target, build_plan
from megatron_longctx.core.plans.mask import causal
from megatron_longctx.planner import memory
from megatron_longctx.planner.choose_mode import Problem, rank_modes
from megatron_longctx.planner.draw import draw as draw_plan
from megatron_longctx.planner.draw import draw_modes, draw_timeline
from megatron_longctx.planner.memory.reports import draw as draw_memory
from megatron_longctx.planner.simulate import simulate
from megatron_longctx.training.compose import compose_config

matplotlib.use("Agg")
from matplotlib import pyplot

IMAGES = Path("docs/images")
OURS, OTHERS = ("#22667a", "#4497ab", "#8cc5d2", "#bfe0e7", "#7c8a5a"), ("#8a5a3b", "#c08a5e", "#dcb88f", "#ecd7bd")

MILLION = ("model=llama3_8b", "parallelism=cp8", "data.seq_length=1048576", "attention.transport=p2p")
CHUNK = "recompute.head_chunk_tokens=4096"
TILE = "recompute.mlp_tile_tokens=16384"

ROWS = {"CP 2, steps in finer sizes": ("2 H200s", "#22667a"), "CP 1": ("1 H200", "#c0703a")}
MAX_ROWS = 512

REDUCTION_COLOURS = {"NCCL": "black", "torch one-shot": "#777777", "torch two-shot": "#aaaaaa"}
REDUCTION_COLOURS |= {"unquantized": "#2f7d4f", "int8": "#22667a", "int6": "#7a5a9a", "int4": "#c0703a"}


def attention(result: Path, out: Path | None) -> None:
    """Draw a panel per head configuration, and in it a group per length, mask and commit."""
    data = json.loads(result.read_text())
    measured = _best_of_packages(
        m
        for m in data["measurements"]
        if m["percent_of_one_device"] and not m["name"].startswith(("one device", "one GPU", "one CPU"))
    )
    heads = list(dict.fromkeys(m["heads"] for m in measured))
    names = list(dict.fromkeys(m["name"] for m in measured))
    colours = {}
    for palette, ours in ((OURS, True), (OTHERS, False)):
        chosen = [name for name in names if any(m["name"] == name and m.get("ours", True) == ours for m in measured)]
        colours.update({name: palette[i % len(palette)] for i, name in enumerate(chosen)})
    width = 7 * len(heads) if len(heads) > 1 else 11
    figure, axes = pyplot.subplots(1, len(heads), figsize=(width, 4.4), squeeze=False, sharey=True)
    for panel, pair in zip(axes[0], heads, strict=True):
        groups = list(dict.fromkeys(_group(m) for m in measured if m["heads"] == pair))
        groups.sort(key=lambda group: group[0])
        cases = [(length, mask) for length, mask, _ in groups]
        bar = 0.84 / len(names)
        for i, name in enumerate(names):
            speed = {_group(m): m["percent_of_one_device"] for m in measured if (m["heads"], m["name"]) == (pair, name)}
            at = [k + (i - (len(names) - 1) / 2) * bar for k, group in enumerate(groups) if group in speed]
            panel.bar(at, [speed[g] for g in groups if g in speed], bar * 0.94, color=colours[name], label=name)
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
    figure.savefig(out or result.with_suffix(".png"), dpi=110)


def trees(result: Path, out: Path | None) -> None:
    """Draw responses per second of whole steps, and how many times faster steps and attention are than separate ones.

    Black lines mark the ideal: how many times fewer FLOPs a tree has.
    """
    data = json.loads(result.read_text())
    steps = [each for each in data["cells"] if each["part"] == "steps" and "responses_per_s" in each]
    names = list(dict.fromkeys(each["tree"] for each in steps))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.8))
    for at, (what, colour) in enumerate((("tree", OURS[0]), ("separate", OTHERS[1]))):
        rates = [each["responses_per_s"] for each in steps if each["what"] == what]
        said = {"tree": "beginnings once", "separate": "separate documents"}[what]
        bars = left.bar([i + 0.4 * at for i in range(len(names))], rates, 0.38, color=colour, label=said)
        left.bar_label(bars, fmt="%.3g")
    for at, part in enumerate(("steps", "attention")):
        every = [each for each in data["cells"] if each["part"] == part and each["what"] == "tree" and "ideal" in each]
        for i, name in enumerate(names):
            of_tree = [each for each in every if each["tree"] == name]
            if not of_tree:
                continue
            best = max(of_tree, key=lambda each: each["faster"])
            x, label = i + 0.4 * at, {"steps": "whole steps", "attention": "attention alone"}[part] if i == 0 else None
            bar = right.bar(x, best["faster"], 0.38, color=OURS[2 * at], label=label)
            right.bar_label(bar, fmt="%.1f", label_type="center", color=("white", "black")[at])
            ideal = "ideal" if i == at == 0 else None
            right.hlines(best["ideal"], x - 0.19, x + 0.19, color="black", label=ideal)
    for panel, label in ((left, "responses per second"), (right, "times as fast as separate documents")):
        panel.set_xticks([i + 0.2 for i in range(len(names))], names)
        panel.set_ylabel(label)
        panel.set_ylim(top=1.2 * panel.get_ylim()[1])
        panel.legend(frameon=False, loc="upper left", ncols=3)
        panel.spines[["top", "right"]].set_visible(False)
    facts = data["environment"]
    figure.suptitle(f"forward and backward, {data['ranks']} x {facts['device']}, {facts['date'][:10]}")
    figure.tight_layout()
    figure.savefig(out or result.with_suffix(".png"), dpi=110)


def _group(measurement: dict[str, Any]) -> tuple[int, str, str]:
    return measurement["length"], measurement.get("mask", "causal"), measurement.get("commit", "")


def _best_of_packages(measured: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fastest kind of every other package in each group; the kind is after a comma in the name."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each in measured:
        name = each["name"] if each.get("ours", True) else each["name"].split(",")[0]
        key = each["heads"], _group(each), name
        if key not in best or best[key]["percent_of_one_device"] < each["percent_of_one_device"]:
            best[key] = {**each, "name": name}
    return list(best.values())


def memory_of_training(out: Path) -> None:
    """Draw predicted peaks by mode, memory per token, and predicted over measured peaks into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    sizes = "logits of 4,096 tokens at once, MLP tiles of 16,384"
    title = f"Llama 3 8B, 1,048,576 tokens over 8 ranks (CP 8), bf16, {sizes}: predicted"
    bars = [(mode, _predict(f"recompute.mode={mode}", CHUNK)) for mode in RECOMPUTES[1:]]
    bars += [(f"{mode}, tiles", _predict(f"recompute.mode={mode}", CHUNK, TILE)) for mode in RECOMPUTES[1:]]
    draw_memory(bars, out / "million.png", title, 139 * GIB)
    _draw_memory_per_token(out / "per_token.png")
    _draw_predicted_over_measured(out / "measured.png")


def _predict(*words: str) -> memory.Prediction:
    config = compose_config([*MILLION, *words])
    assert config.model.vocab_size is not None
    return memory.predict(memory.Job(config, config.model.vocab_size))


def _draw_memory_per_token(path: Path) -> None:
    terms: dict[str, float] = {}
    for words in (("recompute=none",), ("recompute=none", CHUNK), ("recompute=attention_output", CHUNK)):
        prediction = _predict(*words)
        terms |= {t.name: t.num_bytes / prediction.tokens / 1024 for t in prediction.terms if t.per_token}
    figure, axes = pyplot.subplots(figsize=(9, 4.2))
    names = sorted(terms, key=lambda name: -terms[name])
    axes.barh(names, [terms[name] for name in names], color="tab:blue")
    for row, name in enumerate(names):
        axes.text(terms[name], row, f" {terms[name]:,.1f}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(right=9000)
    axes.set_xlabel("KiB per token of a rank (of all 32 layers where layers keep it; logarithmic)")
    axes.set_title("Llama 3 8B, CP 8, bf16: what grows with the sequence, predicted", fontsize=10.5, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def _draw_predicted_over_measured(path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(9, 4.2))
    for colour, name, results in (
        ("tab:blue", "{} runs of code that needs what today's does", RECORDED),
        ("tab:brown", "{} earlier runs, before the fused cross-entropy", EARLIER),
    ):
        peaks = list(recorded_peaks(results))
        higher = [100 * (peak.predicted / peak.measured - 1) for peak in peaks]
        measured, label = [peak.measured for peak in peaks], name.format(len(peaks))
        axes.scatter(measured, higher, s=28, color=colour, alpha=0.6, label=label)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylim(-15, 15)
    axes.set_xlabel("measured: most GiB in the caching allocator, rank 0")
    axes.set_ylabel("predicted is higher by, %")
    axes.set_title("Training steps on H200s, bf16: predicted over measured peaks", fontsize=10.5, loc="left")
    axes.legend(fontsize=8.5, loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def rows_of_prompts(out: Path) -> None:
    """Draw times to the first token of short prompts over a long cache."""
    parts = {part["way"]: part for part in json.loads((RESULTS / "inference_rows_h200.json").read_text())["parts"]}
    figure, axes = pyplot.subplots(figsize=(7.2, 3.8))
    for way, (name, colour) in ROWS.items():
        times = []  # new tokens, ms of the fastest plan, ms replicated
        for case in parts[way]["first_token"]:
            ms = {mode: 1e3 * seconds["p50"] for mode, seconds in case["seconds"].items()}
            if "replicated" in ms and case["new"] <= MAX_ROWS:
                replicated = ms.pop("replicated")
                times.append((case["new"], min(ms.values()), replicated))
        new, plans, replicated = zip(*sorted(times), strict=True)
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
    figure.savefig(out, dpi=110)


def hybrid(result: Path, out: Path | None) -> None:
    """Draw tokens per second of hybrid models as percent of one GPU at equal work."""
    data = json.loads(result.read_text())
    cells = {(tuple(cell["documents"]), cell["name"]): cell["tokens_per_s"] for cell in data["cells"]}
    packs = [pack for pack in dict.fromkeys(pack for pack, _ in cells) if cells.get((pack, ALONE))]
    figure, axes = pyplot.subplots(figsize=(7.2, 3.4))
    for number, (name, colour) in enumerate(((HELPER, OURS[0]), (MEGATRON, OTHERS[1]))):
        shares = [100 * (cells.get((pack, name)) or 0) / cells[pack, ALONE] / data["ranks"] for pack in packs]
        bars = axes.bar([i + 0.38 * number for i in range(len(packs))], shares, 0.36, color=colour, label=name)
        axes.bar_label(bars, fmt="%.0f", fontsize=8.5)
    what = [f"{sum(pack) // 1024}K, {len(pack)} document{'s' * (len(pack) > 1)}" for pack in packs]
    axes.set_xticks([i + 0.19 for i in range(len(packs))], what, fontsize=8.5)
    axes.axhline(100, color="0.6", linewidth=0.8)
    axes.set_ylim(top=125)
    axes.set_ylabel("% of one GPU at equal work", fontsize=9)
    axes.set_title(
        f"8 layers of Qwen3-Next, 3 of 4 recurrent, {data['ranks']} {data['environment']['device']}", fontsize=9.5
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8.5, loc="upper right", ncols=2, frameon=False)
    figure.tight_layout()
    figure.savefig(out or result.with_suffix(".png"), dpi=130)


def schedules(out: Path) -> None:
    """Draw the time line of every mode, and all modes in one picture, into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    cluster, n, length = load_cluster("h200_x8"), 8, 32768
    for name in MODES:
        plan = build_plan(name, n, length, ModeOptions(inner_size=4))
        draw_timeline(simulate(plan, cluster, WORKLOAD, timeline=True), out / f"{name}.png")
    problem = Problem(n, causal(length), Target(WORKLOAD), keep_received=None)
    ranking = rank_modes(problem, cluster, timeline=True)
    draw_modes(ranking, out / "all.png", f"{length:,} tokens on {n} H200s, heads 32:8, simulated")


def plan(out: Path) -> None:
    """Draw zigzag on 8 ranks."""
    draw_plan(build_plan("zigzag", 8, 131072, ModeOptions()), out)


def reductions(out: Path) -> None:
    """Draw the times of all-reduces by size."""
    data = json.loads((RESULTS / "all_reduce_h200_x4.json").read_text())
    figure, axes = pyplot.subplots(figsize=(9.5, 5.2))
    for way in dict.fromkeys(m["way"] for m in data["measurements"]):
        times = [(m["num_bytes"], 1e6 * m["seconds"]) for m in data["measurements"] if m["way"] == way]
        kind = way.split()[0]
        colour = REDUCTION_COLOURS.get(way) or REDUCTION_COLOURS[kind]
        axes.plot(
            *zip(*sorted(times), strict=True), "--" if way.endswith("over NCCL") else "-", color=colour, label=way
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([2**power for power in range(16, 30, 2)])
    axes.xaxis.set_major_formatter(
        lambda size, _: f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"
    )
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_xlabel("size of a rank's tensor")
    axes.set_ylabel("time, µs")
    facts, dtype = data["environment"], data["sizes"]["dtype"].removeprefix("torch.")
    axes.set_title(f"all-reduce of {dtype}, {data['ranks']} x {facts['device']}, {facts['date'][:10]}", fontsize=10)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def extend(out: Path) -> None:
    """Draw losses by position and scores of models that were extended to 64K tokens."""
    data = json.loads((RESULTS / "extend_smollm2_64k.json").read_text())
    evaluations.draw(out, data["title"], data["models"])


def emulated(out: Path) -> None:
    """Draw measured and simulated times on emulated networks."""
    data = json.loads((RESULTS / "network_emulated.json").read_text())
    network.draw([network.Result(**each) for each in data["measurements"]], out)


PICTURES = {
    "emulated": (emulated, RESULTS / "network_emulated.png"),
    "extend": (extend, RESULTS / "extend_smollm2_64k.png"),
    "inference": (inference, IMAGES / "inference.png"),
    "memory": (memory_of_training, IMAGES / "memory"),
    "plan": (plan, IMAGES / "plan_zigzag_8.png"),
    "reductions": (reductions, RESULTS / "all_reduce_h200_x4.png"),
    "rows": (rows_of_prompts, RESULTS / "inference_rows_h200.png"),
    "schedules": (schedules, IMAGES / "schedules"),
}


OF_RESULTS = {"attention": attention, "trees": trees, "hybrid": hybrid}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=(*OF_RESULTS, *PICTURES))
    parser.add_argument("result", type=Path, nargs="?", help="attention, trees, hybrid: the result to draw")
    parser.add_argument("--out", type=Path, help="file or folder (default: where docs show it, or beside the result)")
    arguments = parser.parse_args()
    if (arguments.picture in OF_RESULTS) != (arguments.result is not None):
        parser.error(f"{' and '.join(OF_RESULTS)} need a result, and the other pictures take none")
    if arguments.picture in OF_RESULTS:
        OF_RESULTS[arguments.picture](arguments.result, arguments.out)
    else:
        draw, default = PICTURES[arguments.picture]
        draw(arguments.out or default)


if __name__ == "__main__":
    main()
