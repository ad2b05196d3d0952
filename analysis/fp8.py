"""FP8 training on GPUs: which kinds of runs work, whether they are right, how fast they are, and their loss curves.

    python -m analysis.fp8 --out analysis/results/training_fp8_h200_x2.json            checks, then the table
    python -m analysis.fp8 --quick --out quick.json                                    one step of every kind of run
    python -m analysis.fp8 --curve --out curve.json [train.init_from=RUN data.…]       200 steps, bf16 and FP8
    python -m analysis.fp8 --weights --out weights.json                                weights in FP8 alone: checks

Every cell is an ordinary training run, and prints one line when it ends. A cell that fails prints its error, and the
next begins; if it takes its processes with it, new ones go on with the next cell. `OUT.json` has every cell that has
ended. The table's runs are those of `analysis/cases/fp8_h200.yaml`, as `analysis.training_cases` records them.
"""

import argparse
import faulthandler
import gc
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from analysis import fp8_weights
from analysis.record import write
from analysis.training_cases import Cases, predict, read_cases, train_case
from megatron_longctx.config import Config
from megatron_longctx.config.files import bundled
from megatron_longctx.config.gpus import max_gpu_ranks
from megatron_longctx.training.compose import compose_config, override_config
from megatron_longctx.training.preflight import check
from megatron_longctx.training.ranks import run_ranks
from megatron_longctx.training.text import prepare_missing

RECIPES = ("delayed", "tensorwise", "blockwise")
_CURVE_STEPS = 200
# Of the parts, without start-up.
_SECONDS = {"quick": 60.0, "checks": 100.0, "table": 280.0, "curve": 110.0, "weights": 150.0}
_CELL_SECONDS = 100  # a rank that is longer in one cell, or than a second a step, prints where it is, and ends
_SMALL = (
    *("model=llama3_8b", "model.num_layers=2", "model.hidden_size=1024", "model.num_attention_heads=8"),
    *("model.num_kv_heads=4", "model.ffn_hidden_size=2816", "model.vocab_size=null", "data.seq_length=4096"),
)
_SHARED = (
    *("train.device=cuda", "model.implementation=transformer_engine", "train.save=false", "logging.wandb=disabled"),
    *("parallelism=cp2", "parallelism.timeout_s=90", "train.check_memory=false"),
)
_SIX = (
    *(*_SMALL, "train.global_batch_size=2", "optim.warmup_steps=1", "optim.decay_steps=6", "train.steps=6"),
    "attention.deterministic=true",
)
_TP2 = ("parallelism=single", "parallelism.tensor_parallel_size=2")
_EXPERTS = ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=1408")
_MLA = (
    *("model=tiny_mla", "model.hidden_size=1024", "model.num_attention_heads=8", "model.num_kv_heads=8"),
    *("model.kv_lora_rank=512", "model.qk_head_dim=128", "model.qk_pos_emb_head_dim=64", "model.v_head_dim=128"),
    *("model.ffn_hidden_size=2816", "model.num_layers=2", "data.seq_length=4096"),
)
QUICK: dict[str, tuple[str, ...]] = {
    "bf16": _SMALL,
    **{recipe: (*_SMALL, f"train.fp8={recipe}") for recipe in (*RECIPES, "mxfp8")},
    "delayed_te_p2p": (*_SMALL, "train.fp8=delayed", "baseline=te_p2p"),
    "delayed_tp_sp": (*_SMALL, "train.fp8=delayed", *_TP2),
    "blockwise_tp_sp": (*_SMALL, "train.fp8=blockwise", *_TP2),
    "delayed_attention_output": (*_SMALL, "train.fp8=delayed", "recompute=attention_output"),
    "blockwise_offload": (*_SMALL, "train.fp8=blockwise", "recompute.mode=attention_output+offload"),
    "tensorwise_layer": (*_SMALL, "train.fp8=tensorwise", "recompute.mode=layer"),
    "tensorwise_tiles": (
        *(*_SMALL, "train.fp8=tensorwise", "recompute=attention_output", "recompute.mlp_tile_tokens=512"),
        "recompute.head_chunk_tokens=512",
    ),
    "tensorwise_bf16_ends": (
        *(*_SMALL, "train.fp8=tensorwise", "model.num_layers=4", "train.bf16_layers_at_start=1"),
        *("train.bf16_layers_at_end=1", "recompute=attention_output"),
    ),
    "delayed_packs": (*_SMALL, "train.fp8=delayed", "data.packing=best_fit"),
    "delayed_pp2": (*_SMALL, "train.fp8=delayed", "parallelism=single", "parallelism.pipeline_parallel_size=2"),
    "tensorwise_experts": (*_SMALL, *_EXPERTS, "train.fp8=tensorwise"),
    "blockwise_experts_ep2": (*_SMALL, *_EXPERTS, "train.fp8=blockwise", "parallelism.expert_model_parallel_size=2"),
    "blockwise_mla": (*_MLA, "train.fp8=blockwise"),
    "delayed_mla_recomputed": (*_MLA, "train.fp8=delayed", "recompute=attention_output"),
}
"""One step each, of every kind of run that FP8 supports."""

Records = dict[str, dict[str, Any]]
"""What runs gave, by their names: a record of `analysis.record.read_run`, or an `error`."""


@dataclass(frozen=True)
class Cell:
    """A training run.

    copy_of: the cell whose run folder it goes on from; None: it begins anew.
    begins_with: the cell whose run has the weights that it begins with (`train.init_from`); None: random ones.
    """

    name: str
    config: Config
    baseline: str | None = None
    copy_of: str | None = None
    begins_with: str | None = None


def checks() -> dict[str, tuple[str, ...]]:
    """Return the settings of the runs that `compare` compares."""
    found: dict[str, tuple[str, ...]] = {}
    for kind in ("bf16", *RECIPES):
        fp8 = () if kind == "bf16" else (f"train.fp8={kind}",)
        found |= {
            f"{kind}_cp2": (*_SIX, *fp8),
            f"{kind}_cp1": (*_SIX, *fp8, "parallelism=single"),
            f"{kind}_order": (*_SIX, *fp8, "train.micro_batch_size=2"),
            f"{kind}_again": (*_SIX, *fp8),
            f"{kind}_replay": (*_SIX, *fp8, "recompute=attention_output"),
            f"{kind}_saved": (*_SIX, *fp8, "train.steps=3", "train.save=true"),
            f"{kind}_resumed": (*_SIX, *fp8, "train.save=true"),
            f"{kind}_resumed_tp2": (*_SIX, *fp8, "train.save=true", *_TP2),
        }
    return found


def compare(cells: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare losses and gradient norms of runs that should be equal, bit for bit or but for rounding.

    Returns:
        for each pair, the largest relative difference of a loss and of a gradient norm, and whether all bits are equal.
    """
    pairs = []
    for kind in ("bf16", *RECIPES):
        for other, what in (
            ("cp1", "CP 2 and CP 1"),
            ("order", "two runs with other micro-batches"),
            ("again", "a second trainer in the same process"),
            ("replay", "recompute=attention_output and none"),
            ("resumed", "saved after 3 steps and resumed"),
            ("resumed_tp2", "saved after 3 steps and resumed with TP 2"),
        ):
            pairs.append((f"{kind}_{other}", f"{kind}_cp2", f"{kind}: {what}"))
    pairs += [pair for recipe in RECIPES for pair in fp8_weights.pairs(recipe)]
    found = []
    for first, second, what in pairs:
        one, two = cells.get(first, {}).get("steps"), cells.get(second, {}).get("steps")
        if not one or not two:
            continue
        by_step = {step["train/step"]: step for step in two}
        both = [(step, by_step[step["train/step"]]) for step in one if step["train/step"] in by_step]
        differences = {
            key: max(abs(a[key] - b[key]) / abs(b[key]) for a, b in both) for key in ("train/loss", "train/grad_norm")
        }
        equal = all(a[key] == b[key] for a, b in both for key in differences)
        found.append({"what": what, "runs": [first, second], "steps": len(both), **differences, "bits equal": equal})
    return found


def curves() -> dict[str, tuple[str, ...]]:
    """Return the settings of the loss curves."""
    shared = (
        *("model=smollm2_135m", "data.seq_length=8192", "train.global_batch_size=4", f"train.steps={_CURVE_STEPS}"),
        *("optim.lr=3e-4", "optim.warmup_steps=20"),
    )
    return {kind: shared if kind == "bf16" else (*shared, f"train.fp8={kind}") for kind in ("bf16", *RECIPES)}


def compare_curves(cells: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare the loss of each recipe with that of bf16: means over the last 50 steps, and over all."""
    means = {
        name: [statistics.fmean(step["train/loss"] for step in cell["steps"][from_:]) for from_ in (-50, 0)]
        for name, cell in cells.items()
        if cell.get("steps")
    }
    if "bf16" not in means:
        return []
    return [
        {
            "what": f"{name}: loss against bf16's",
            "last 50 steps": last,
            "difference of the last 50 steps %": 100 * (last / means["bf16"][0] - 1),
            "difference of all steps %": 100 * (whole / means["bf16"][1] - 1),
        }
        for name, (last, whole) in means.items()
    ]


def draw_curves(cells: Mapping[str, Any], path: Path) -> None:
    """Write a picture of the losses, each point the mean of ten steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, cell in cells.items():
        if steps := cell.get("steps"):
            tens = [steps[i : i + 10] for i in range(0, len(steps), 10)]
            means = [statistics.fmean(step["train/loss"] for step in ten) for ten in tens]
            axes.plot([ten[-1]["train/step"] for ten in tens], means, label=name, marker=".", lw=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss in nats, mean of ten steps")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def cells_of(settings: Mapping[str, Sequence[str]], shared: Sequence[str], root: Path) -> tuple[list[Cell], Records]:
    """Return the cells with these settings, and the errors of those that are refused, by name."""
    cells: list[Cell] = []
    refused: Records = {}
    for name, words in settings.items():
        own = dict(word.split("=", 1) for word in words if word.startswith(("baseline=", "begins_with=")))
        given = [word for word in words if not word.startswith(("baseline=", "begins_with="))]
        try:
            config = compose_config(_last_of_group([*_SHARED, *given, *shared, f"run.name={name}", f"run.root={root}"]))
        except ValueError as error:
            refused[name] = {"error": str(error)}
            continue
        before = None if "resumed" not in name else name[: name.index("resumed")] + "saved"
        cells.append(Cell(name, config, own.get("baseline"), before, own.get("begins_with")))
    return cells, refused


def _last_of_group(words: Sequence[str]) -> list[str]:
    """Return settings with the last of several recipes of a group, before the keys, which Hydra takes once each."""
    by_key = dict(word.split("=", 1) for word in words)
    return [f"{key}={value}" for key, value in by_key.items()]


def run(cells: Sequence[Cell], ranks: int, deadline: float, out: Path, done: Records) -> Records:
    """Run cells until the deadline (of `time.time`), and return their records by name, also in the file `out`.

    Args:
        done: the records that there are already.
    """
    ready = []
    for cell in cells:
        try:
            prepare_missing(cell.config.data)
            check(cell.config, ranks)
            predict(cell.config, ranks)
            ready.append(cell)
        except ValueError as error:
            done[cell.name] = {"error": str(error)}
            print(f"{cell.name}: refused: {error}", flush=True)
    while ready and time.time() < deadline:
        _write(out, done)
        try:
            limit = max(30.0, deadline - time.time() + 120)
            run_ranks(_rank, ranks, ready, out, deadline, backend=_backend(), timeout=limit)
            failed = None
        except Exception as error:  # whatever ended the processes
            failed = str(error).strip().rpartition("\n")[2]
        done = json.loads(out.read_text())
        if failed is None:
            break
        running = _running(out).read_text() if _running(out).exists() else ""
        if running not in done:
            name = running or ready[0].name
            done[name] = {"error": f"the processes ended: {failed}"}
            print(f"{name}: the processes ended: {failed}", flush=True)
        ready = [cell for cell in ready if cell.name not in done]
    _write(out, done)
    _running(out).unlink(missing_ok=True)
    return done


def _running(out: Path) -> Path:
    """Return the file that names the cell that runs."""
    return out.with_suffix(".running")


def _backend() -> str:
    return "nccl" if max_gpu_ranks() else "gloo"


def _write(out: Path, done: Mapping[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(done, indent=1))


def _rank(rank: int, cells: Sequence[Cell], out: Path, deadline: float) -> None:
    """Run the cells on this rank; rank 0 writes and prints what each gave."""
    logging.disable(logging.INFO)  # a line per cell
    for cell in cells:
        left = torch.tensor([deadline - time.time()], device="cuda" if torch.cuda.is_available() else "cpu")
        dist.broadcast(left, 0)
        if left.item() < 0:
            break
        if rank == 0 and cell.copy_of is not None:
            root = Path(cell.config.run.root)
            shutil.copytree(root / cell.copy_of, root / cell.name, dirs_exist_ok=True)
            (root / cell.name / "resolved.yaml").unlink(missing_ok=True)
        begin, failed = time.perf_counter(), None
        if rank == 0:
            _running(out).write_text(cell.name)
        faulthandler.dump_traceback_later(max(_CELL_SECONDS, cell.config.train.steps), exit=True)
        config = cell.config
        if cell.begins_with is not None:  # a run that did not exist when the settings were checked
            weights = str(Path(config.run.root, cell.begins_with))
            config = replace(config, train=replace(config.train, init_from=weights))
        try:
            record = train_case(config, cell.baseline)
        except Exception as error:  # reported, and the next cell goes on
            failed = f"{type(error).__name__}: {str(error).strip()[:1500]}"
        faulthandler.cancel_dump_traceback_later()
        if failed:
            gc.collect()
            torch.cuda.empty_cache()
        if rank == 0:
            done = json.loads(out.read_text())
            done[cell.name] = {"error": failed} if failed else record
            _write(out, done)
            print(f"{cell.name}: {failed or _line(record)} ({time.perf_counter() - begin:.1f} s)", flush=True)


def _line(record: Mapping[str, Any]) -> str:
    """Return the figures of a run in one line."""
    medians, steps = record["medians"], record["steps"]
    parts = [f"{medians['mean_tokens_per_s']:,.0f} tokens/s"]
    for title, key, form in (
        ("MFU {} %", "perf/mfu_causal_pct", ".1f"),
        ("{} % of FP8's peak", "perf/mfu_fp8_pct", ".1f"),
        ("{} GiB", "mem/peak_active_gib", ".2f"),
        ("predicted {} GiB", "predicted_peak_gib", ".2f"),
    ):
        if key in medians:
            parts.append(title.format(format(medians[key], form)))
    return ", ".join([*parts, f"loss {steps[0]['train/loss']:.5f} -> {steps[-1]['train/loss']:.5f}"])


def table_cells(settings: Sequence[str], root: Path) -> tuple[Cases, list[Cell]]:
    """Return the cases of the table, and their cells; settings are added to every case."""
    cases = read_cases(bundled("analysis") / "cases" / "fp8_h200.yaml")
    configs = [override_config(config, [*settings, f"run.root={root}"]) for config in cases.configs]
    return cases, [Cell(each.run.name, each, cases.baselines.get(each.run.name)) for each in configs]


def run_part(part: str, settings: Sequence[str], ranks: int, seconds: float, out: Path, root: Path) -> bool:
    """Run a part, write its files, and print what it shows. Return whether all cells succeeded."""
    deadline, path = time.time() + seconds, out.with_name(f"{out.name}_{part}.json")
    refused: Records = {}
    if part == "table":
        cases, cells = table_cells(settings, root)
    else:
        steps = ("train.steps=1", "optim.warmup_steps=0") if part == "quick" else ()
        wanted = {
            "checks": checks,
            "weights": lambda: fp8_weights.checks(RECIPES, _SIX, _TP2),
            "quick": lambda: QUICK,
            "curve": curves,
        }[part]()
        cells, refused = cells_of(wanted, [*steps, *settings], root)
    for name, cell in refused.items():
        print(f"{name}: refused: {cell['error']}", flush=True)
    done = run(cells, ranks, deadline, path, refused)
    for name in (cell.name for cell in cells if cell.name not in done):
        print(f"{name}: no time was left", flush=True)
    found = {"checks": compare, "weights": compare, "curve": compare_curves}.get(part, lambda _: [])(done)
    for each in found:
        print("; ".join(f"{key} {value}" for key, value in each.items() if key != "runs"), flush=True)
    if part == "table":
        runs = [cell for cell in done.values() if "error" not in cell]
        print(write(runs, out, cases.title, cases.note) if runs else "no run", flush=True)
    else:
        _write(path, {"comparisons": found, "cells": done})
    if part == "curve":
        draw_curves(done, out.with_name(f"{out.name}_curve.png"))
    return not any("error" in cell for name, cell in done.items() if "mxfp8" not in name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for, by default checks and table; return 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="added to every cell")
    parser.add_argument("--out", type=Path, required=True, help="path of the result, PATH.json")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, help=f"no cell of a part begins after this time; default: {_SECONDS}")
    for part in _SECONDS:
        parser.add_argument(f"--{part}", action="store_true", help="run this part alone")
    arguments = parser.parse_args(argv)
    asked = [part for part in _SECONDS if getattr(arguments, part)] or ["checks", "table"]
    out, succeeded = arguments.out.with_suffix(""), True
    with tempfile.TemporaryDirectory() as folder:
        for part in asked:
            seconds = arguments.seconds or _SECONDS[part]
            succeeded &= run_part(part, arguments.settings, arguments.ranks, seconds, out, Path(folder, part))
    return int(not succeeded)


if __name__ == "__main__":
    sys.exit(main())
