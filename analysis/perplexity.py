"""Measure what quantized sums cost a language model: `python -m analysis.perplexity [--steps 300] [--out FOLDER]`.

Trains a small GPT over two tensor-parallel ranks on the sources of Python's standard library, or resumes the run of an
earlier call. Then computes its perplexity on the library's tests, which it has not seen, with the sums of its
row-parallel layers quantized in every way, and, over two context-parallel ranks, with 8-bit keys and values. Writes
`perplexity_reductions.json`, `.md` (tables) and `.png`, after tables 4 and 6 of Flash Communication.
"""

import argparse
import json
import math
import statistics
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from analysis.benchmarks.report import paired
from analysis.benchmarks.report import table as markdown
from megatron_longctx.config import Config, ReductionConfig
from megatron_longctx.config.environment import environment
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.ranks import run_ranks
from megatron_longctx.training.run_folder import RunFolder
from megatron_longctx.training.text import prepare_missing

RANKS = 2
GROUP_SIZES = (32, 64, 128)
MODES = ("int8", "int6", "int4")
_WORDS = (
    *("model=tiny", "model.hidden_size=256", "model.ffn_hidden_size=768", "data.seq_length=512"),
    *(f"parallelism.tensor_parallel_size={RANKS}", "parallelism.sequence_parallel=false"),
    *("train.precision=fp32", "train.global_batch_size=8", "train.device=cpu"),
    *("optim.lr=2e-3", "optim.min_lr=2e-4", "run.name=perplexity", "logging.wandb=disabled"),
)


@dataclass(frozen=True)
class Result:
    """The perplexity of one setting, over all tokens."""

    reduction: ReductionConfig
    perplexity: float
    more: float  # increase of the mean loss over unquantized sums, in nats
    noise: float  # its standard error over pairs of windows

    @property
    def name(self) -> str:
        output, down = self.reduction.output_projection, self.reduction.down_projection
        return output if output == down else f"{output} output projection, {down} down projection"


def settings() -> list[ReductionConfig]:
    """Return no quantization, every mode, group size and kind of range, and int4 for one kind of layer alone."""
    configs = [ReductionConfig()]
    for symmetric in (False, True):
        configs += [ReductionConfig(m, m, size, symmetric, 0.0) for size in GROUP_SIZES for m in MODES]
    return [
        *configs,
        ReductionConfig("int4", "none", 128, False, 0.0),
        ReductionConfig("none", "int4", 128, False, 0.0),
    ]


def _rank(rank: int, configs: Sequence[Config], num_windows: int) -> list[list[float]]:
    """Train as the first of `configs` says, or load the trained weights; return losses by configuration and window."""
    from megatron_longctx.mcore import model
    from megatron_longctx.mcore.sequence import build_sequence
    from megatron_longctx.mcore.tokenizer import build_tokenizer
    from megatron_longctx.training.launcher import configure_logging
    from megatron_longctx.training.loop import Trainer
    from megatron_longctx.training.signals import StopRequest

    data, folder = configs[0].data, RunFolder.of(configs[0])
    configure_logging(folder.log, rank)
    trainer = Trainer(configs[0], folder, StopRequest())
    trainer.train()
    weights = trainer.models[0].module.state_dict()
    windows = held_out(build_tokenizer(data.tokenizer, None), data.seq_length, num_windows)
    positions = torch.arange(data.seq_length)
    losses = []
    for config in configs:
        sequence = build_sequence(config, trainer.groups.cp)
        megatron = model.transformer_config(config)
        gpt = model.build_model(config, megatron, trainer.groups, sequence, trainer.vocab_size)
        gpt.load_state_dict(weights)
        gpt.eval()
        sums = []
        with torch.no_grad():
            for batch in torch.split(windows, 8):
                whole = {"tokens": batch[:, :-1], "labels": batch[:, 1:]}
                mine = sequence.shard_batch(whole | {"position_ids": positions.expand(len(batch), -1)})
                of_tokens = gpt(mine["tokens"], mine["position_ids"], None, labels=mine["labels"])
                sums.append(of_tokens.double().sum(1))
        total = torch.cat(sums)
        dist.all_reduce(total, group=trainer.groups.cp)
        losses.append((total / data.seq_length).tolist())
        if rank == 0:
            mean = statistics.fmean(losses[-1])
            print(f"{config.reduction}, kv_int8={config.attention.kv_int8}: {math.exp(mean):.4f}", file=sys.stderr)
    return losses


def held_out(tokenizer: Any, length: int, num_windows: int) -> torch.Tensor:
    """Return `[num_windows, length + 1]` tokens of the standard library's tests, which `prepare("stdlib")` excludes."""
    folder = Path(sysconfig.get_paths()["stdlib"]) / "test"
    tokens: list[int] = []
    for path in sorted(folder.glob("test_*.py")):
        # From the middle of each file: the first lines are too similar.
        text = path.read_text(encoding="utf-8", errors="replace")
        tokens += tokenizer.tokenize(text[len(text) // 2 :])[: 4 * (length + 1)]
        if len(tokens) >= num_windows * (length + 1):
            return torch.tensor(tokens[: num_windows * (length + 1)]).view(num_windows, length + 1)
    raise ValueError(f"{folder}: expected the tests of Python's standard library. Use a Python that has them.")


def results(losses: Sequence[Sequence[float]]) -> list[Result]:
    """Return the results from the losses of every setting for the same windows, the first unquantized."""
    return [
        Result(reduction, math.exp(statistics.fmean(each)), *paired(each, losses[0]))
        for reduction, each in zip(settings(), losses, strict=True)
    ]


def kv_table(losses: Sequence[Sequence[float]]) -> str:
    """Return Markdown from losses with exact and with 8-bit keys and values."""
    exact, rounded = (math.exp(statistics.fmean(each)) for each in losses)
    more, noise = paired(losses[1], losses[0])
    rows = [["exact", f"{exact:.4f}", ""], ["8-bit", f"{rounded:.4f}", f"{more:+.5f} ± {noise:.5f}"]]
    return markdown(["keys and values", "perplexity", "loss more by (nats)"], rows)


def table(measured: Sequence[Result]) -> str:
    """Return Markdown with all settings."""
    rows = []
    for each in measured:
        details = ["", ""], ""
        if each.name != "none":
            ranges = "symmetric" if each.reduction.symmetric else "asymmetric"
            details = [str(each.reduction.group_size), ranges], f"{each.more:+.5f} ± {each.noise:.5f}"
        rows.append([each.name, *details[0], f"{each.perplexity:.4f}", details[1]])
    return markdown(["sums", "group", "ranges", "perplexity", "loss more by (nats)"], rows)


def draw(measured: Sequence[Result], path: Path) -> None:
    """Draw perplexity by mode, with a line per group size and kind of range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for color, size in zip(("tab:blue", "tab:green", "tab:red"), GROUP_SIZES, strict=True):
        for symmetric in (False, True):
            chosen = [f for f in measured if (f.reduction.group_size, f.reduction.symmetric) == (size, symmetric)]
            heights = [next(f.perplexity for f in chosen if f.name == mode) for mode in MODES]
            label = f"groups of {size}, {'symmetric' if symmetric else 'asymmetric'}"
            axis.plot(MODES, heights, "--" if symmetric else "-", marker="o", color=color, label=label)
    axis.axhline(measured[0].perplexity, color="0.3", linewidth=1, label="unquantized")
    axis.set_ylabel("perplexity (per byte)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, handlelength=4)
    axis.set_title(f"Sums of row-parallel layers, {RANKS} tensor-parallel ranks")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.perplexity", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--windows", type=int, default=128, help="windows of the sequence length to evaluate")
    parser.add_argument("--threads", type=int, default=1, help="threads of each of the two ranks")
    parser.add_argument("--out", type=Path, default=Path("analysis/results"), help="folder of the results")
    parser.add_argument("words", nargs="*", help="settings of the run, after this analysis's")
    args = parser.parse_args(argv)
    if not args.out.is_dir():
        parser.error(f"--out {args.out}: expected a folder that exists")
    config = compose_config([*_WORDS, f"train.steps={args.steps}", *args.words])
    prepare_missing(config.data)
    facts = environment()
    RunFolder.of(config).path.mkdir(parents=True, exist_ok=True)

    def losses(configs: Sequence[Config]) -> list[list[float]]:
        ran = run_ranks(_rank, RANKS, configs, args.windows, timeout=3600.0, threads=args.threads)
        of_rank: list[list[float]] = ran[0]
        return of_rank

    measured = results(losses([replace(config, reduction=reduction) for reduction in settings()]))
    par = replace(config.parallelism, tensor_parallel_size=1, context_parallel_size=RANKS)
    sharded = replace(config, parallelism=par)
    kv = losses([sharded, replace(sharded, attention=replace(config.attention, kv_int8=True))])
    tokens, batch = args.windows * config.data.seq_length, config.train.global_batch_size
    about = (
        f"{facts['date'][:10]}, commit {str(facts['commit'])[:9]}. {args.steps} steps of {config.data.seq_length} x "
        f"{batch} bytes of source text; perplexity per byte on {tokens:,} unseen bytes. "
        "Differences are paired over windows, with their standard error."
    )
    stem = args.out / "perplexity_reductions"
    text = f"{about}\n\n{table(measured)}\n\n{RANKS} context-parallel ranks, zigzag:\n\n{kv_table(kv)}\n"
    stem.with_suffix(".md").write_text(text)
    data: dict[str, Any] = {"what": "perplexity with quantized sums", "environment": facts, "config": config.as_dict()}
    data |= {"tokens": tokens, "found": [asdict(each) for each in measured], "kv_losses": kv}
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    draw(measured, stem.with_suffix(".png"))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
