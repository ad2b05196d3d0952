"""Draw the pictures of docs/memory.md: `python -m analysis.memory_pictures [--out docs/images/memory]`.

Predictions for Llama 3 8B at 1,048,576 tokens on 8 H200s, memory per token of each piece, and predictions beside the
peaks measured on GPUs (`analysis.recorded_memory`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

from analysis.recorded_memory import recorded_peaks
from megatron_longctx.compose import compose_config
from megatron_longctx.config import RECOMPUTES
from megatron_longctx.memory import Job, Prediction, predict
from megatron_longctx.memory.draw import draw

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
    """Predicted peaks beside measured ones."""
    rows = [(peak.name, peak.predicted, peak.measured) for peak in recorded_peaks()]
    figure, axes = pyplot.subplots(figsize=(9, 0.7 + 0.42 * len(rows)))
    for row, (_, model, real) in enumerate(rows):
        axes.barh(row - 0.19, model, height=0.36, color="tab:blue", label="predicted" if row == 0 else None)
        axes.barh(row + 0.19, real, height=0.36, color="tab:orange", label="measured" if row == 0 else None)
        axes.text(
            max(model, real), row, f"  {model:.1f} / {real:.1f} ({model / real - 1:+.1%})", va="center", fontsize=9
        )
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlim(right=175)
    axes.set_xlabel("GiB of live tensors on a rank at the peak")
    axes.set_title("Llama-3-8B layers on H200s, bf16: peaks predicted and measured", fontsize=10.5, loc="left")
    axes.legend(fontsize=8.5, loc="center right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
