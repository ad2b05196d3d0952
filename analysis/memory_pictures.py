"""Draw the pictures of docs/memory.md: `python -m analysis.memory_pictures [--out docs/images/memory]`.

Predictions for Llama 3 8B at 1,048,576 tokens on 8 H200s, memory per token of each piece, and predictions beside the
peaks measured on GPUs (`analysis.recorded_memory`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

from analysis.recorded_memory import EARLIER, RECORDED, recorded_peaks
from megatron_longctx.compose import compose_config
from megatron_longctx.config import RECOMPUTES
from megatron_longctx.memory import Job, Prediction, predict
from megatron_longctx.memory.command import draw

matplotlib.use("Agg")
from matplotlib import pyplot

MILLION = ("model=llama3_8b", "parallelism=cp8", "data.seq_length=1048576", "attention.transport=p2p")
CHUNK = "recompute.head_chunk_tokens=4096"
TILE = "recompute.mlp_tile_tokens=16384"
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images/memory"), help="folder of the pictures")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    sizes = "logits of 4,096 tokens at once, MLP tiles of 16,384"
    title = f"Llama 3 8B, 1,048,576 tokens over 8 ranks (CP 8), bf16, {sizes}: predicted"
    bars = [(mode, predicted(f"recompute.mode={mode}", CHUNK)) for mode in RECOMPUTES[1:]]
    bars += [(f"{mode}, tiles", predicted(f"recompute.mode={mode}", CHUNK, TILE)) for mode in RECOMPUTES[1:]]
    draw(bars, out / "million.png", title, 139 * GIB)
    per_token(out / "per_token.png")
    measured(out / "measured.png")


def predicted(*words: str) -> Prediction:
    config = compose_config([*MILLION, *words])
    assert config.model.vocab_size is not None
    return predict(Job(config, config.model.vocab_size))


def per_token(path: Path) -> None:
    """KiB per token of a rank, of everything that grows with the sequence."""
    pieces: dict[str, float] = {}
    for words in (("recompute=none",), ("recompute=none", CHUNK), ("recompute=attention_output", CHUNK)):
        found = predicted(*words)
        for term in found.terms:
            if term.per_token:
                pieces[term.name] = term.num_bytes / found.tokens / 1024
    figure, axes = pyplot.subplots(figsize=(9, 4.2))
    names = sorted(pieces, key=lambda name: -pieces[name])
    axes.barh(names, [pieces[name] for name in names], color="tab:blue")
    for row, name in enumerate(names):
        axes.text(pieces[name], row, f" {pieces[name]:,.1f}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(right=9000)
    axes.set_xlabel("KiB per token of a rank (of all 32 layers where layers keep it; logarithmic)")
    axes.set_title("Llama 3 8B, CP 8, bf16: what grows with the sequence, predicted", fontsize=10.5, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def measured(path: Path) -> None:
    """Predicted peaks over measured ones, a dot a run."""
    figure, axes = pyplot.subplots(figsize=(9, 4.2))
    for colour, name, results in (
        ("tab:blue", "{} runs of code that needs what today's does", RECORDED),
        ("tab:brown", "{} earlier runs, before the fused cross-entropy", EARLIER),
    ):
        peaks = list(recorded_peaks(results))
        over = [100 * (peak.predicted / peak.measured - 1) for peak in peaks]
        axes.scatter(
            [peak.measured for peak in peaks], over, s=28, color=colour, alpha=0.6, label=name.format(len(peaks))
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylim(-15, 15)
    axes.set_xlabel("measured: most GiB in the caching allocator, rank 0")
    axes.set_ylabel("predicted is higher by, %")
    axes.set_title("Training steps on H200s, bf16: predicted over measured peaks", fontsize=10.5, loc="left")
    axes.legend(fontsize=8.5, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
