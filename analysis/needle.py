"""Needles in haystacks, over one rank and over several: `python -m analysis.needle [--out FOLDER] [words]`.

Trains a small GPT to find codes in long texts (or goes on with the run of an earlier call): on short sequences first,
then on whole ones. Then asks it for needles at all depths of texts of several lengths, through `LongContextEngine` on
1, 2, 3 and 4 context-parallel ranks, with keys, queries or queries straight to all ranks passed, the text given at once
and over several turns. Writes `needle.json`, `.md` and `.png`; fails where an answer is not that of one rank.
Costs about 16 minutes of training on a thread, and then minutes of asking, fewer with more free cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from analysis import haystack
from analysis.haystack import Question
from megatron_longctx import names
from megatron_longctx.comm.local_ranks import run_ranks
from megatron_longctx.compose import compose_config
from megatron_longctx.config import Config
from megatron_longctx.mcore.corpus import write_corpus
from megatron_longctx.mcore.tokenizer import build_tokenizer
from megatron_longctx.metrics.environment import environment
from megatron_longctx.training.run_folder import RunFolder

RANKS = (2, 3, 4)
MODES = ("pass_kv", "pass_q", "one_hop")
TURNS = (1, 4)
DEPTHS = tuple(i / 10 for i in range(11))
OTHERS = 3  # needles in the text that are not asked for
SHARES = (4, 2, 1)  # of the length, by stage
STEPS = (1400, 700, 450)
_LESSON_TOKENS = 8_000_000
_WORDS = (
    # Biases make attention to the token before, which comes first in finding anything, quick to learn.
    *("model=tiny", "model.hidden_size=64", "model.ffn_hidden_size=128", "model.num_kv_heads=4", "model.bias=true"),
    *("model.tie_embeddings=true", "model.init_std=0.08", "train.precision=fp32", "train.device=cpu"),
    *("train.global_batch_size=32", "train.micro_batch_size=32", "inference.page_tokens=16"),
    *("optim.lr=3e-3", "optim.min_lr=3e-4", "optim.decay_steps=2500", "run.name=needle", "logging.wandb=disabled"),
)


@dataclass(frozen=True)
class Setup:
    """How a question is put. mode: of `inference.mode`. turns: in how many pieces the text is given."""

    ranks: int
    mode: str
    turns: int


@dataclass(frozen=True)
class Answers:
    """By question: what the model said, and fp32 logits `[questions, vocabulary]` of the first token of it."""

    said: list[str]
    logits: torch.Tensor


@dataclass(frozen=True)
class Found:
    """right: share of right answers, by length and depth. different: answers that are not one rank's. off: the
    largest difference of a logit from one rank's."""

    setup: Setup
    right: list[list[float]]
    different: int
    off: float


def setups() -> list[Setup]:
    """One rank with the text at once, which the others are compared with, comes first."""
    several = itertools.product(RANKS, MODES, TURNS)
    return [*(Setup(1, "pass_kv", turns) for turns in TURNS), *(Setup(*each) for each in several)]


class _Bar:
    """A sink of training's metrics: a progress bar on terminals."""

    def __init__(self, config: Config, step: int) -> None:
        told = sys.stderr.isatty()
        desc = f"training at {config.data.seq_length} tokens"
        self._bar = tqdm(desc=desc, initial=step, total=config.train.steps, unit=" steps", disable=not told)

    def write(self, record: Mapping[str, Any]) -> None:
        self._bar.set_postfix(loss=f"{record[names.LOSS]:.3f}", refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


def train(stages: Sequence[Config], threads: int) -> int:
    """One run, stage by stage; what an earlier call has trained is not trained again.

    Returns:
        its step: that of the last stage, unless it was asked to stop.
    """
    RunFolder.of(stages[0]).path.mkdir(parents=True, exist_ok=True)
    for config in stages:
        prefix = Path(config.data.prefix)
        if not Path(f"{prefix}.json").is_file():
            write_lessons(prefix, config)
    step: int = run_ranks(_train_rank, 1, list(stages), timeout=24 * 3600.0, threads=threads)[0]
    return step


def write_lessons(prefix: Path, config: Config) -> None:
    """A corpus in which the labels of every sequence, `data.seq_length` tokens, are a lesson.

    Labels lie a token further than the sequence. What came at its end in all of them, the end of a document or the
    beginning of another lesson, the model would learn to say near that place, instead of answers.
    """
    length = config.data.seq_length
    lessons = haystack.lessons(length, max(2, _LESSON_TOKENS // length), config.train.seed)
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    write_corpus([[" " + "".join(lessons)]], prefix, tokenizer)


def _train_rank(rank: int, stages: Sequence[Config]) -> int:
    from megatron_longctx.mcore import groups
    from megatron_longctx.training.loop import Trainer
    from megatron_longctx.training.signals import StopRequest

    logger = logging.getLogger("megatron_longctx")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.FileHandler(RunFolder.of(stages[0]).log))
    stop = StopRequest()
    for config in stages:
        folder = RunFolder.of(config)
        trainer = Trainer(config, folder, stop)
        if trainer.step < config.train.steps:
            with folder.prepare(config, trainer.step):
                trainer.sinks.append(_Bar(config, trainer.step))
                trainer.train()
        groups.destroy()
        if trainer.step < config.train.steps:
            break
    return trainer.step


def ask(config: Config, asked: Sequence[Setup], questions: Sequence[Question]) -> dict[Setup, Answers]:
    """Put the questions to the run's model, in batches of a length each.

    Args:
        asked: of any numbers of ranks.
        questions: those of a length side by side.
    """
    found: dict[Setup, Answers] = {}
    with tqdm(desc="asking", total=len(asked), unit=" setups", disable=not sys.stderr.isatty()) as bar:
        for ranks in sorted({setup.ranks for setup in asked}):
            mine = [setup for setup in asked if setup.ranks == ranks]
            found |= run_ranks(_ask_rank, ranks, config, mine, list(questions), timeout=3600.0, threads=1)[0]
            bar.update(len(mine))
    return found


def _ask_rank(rank: int, config: Config, asked: Sequence[Setup], questions: Sequence[Question]) -> dict[Setup, Answers]:
    from megatron_longctx.mcore import groups
    from megatron_longctx.mcore.inference import build_engine, for_inference

    ranks = asked[0].ranks
    batches = [list(batch) for _, batch in itertools.groupby(questions, key=lambda question: question.length)]
    # Every session fills its pages on every rank but the last.
    needed = max(sum(q.length + 2 * ranks * config.inference.page_tokens for q in batch) for batch in batches)
    collection = groups.initialize(context=ranks)
    found = {}
    for setup in asked:
        config = replace(
            config,
            parallelism=replace(config.parallelism, context_parallel_size=ranks),
            inference=replace(config.inference, mode=setup.mode, cache_tokens=needed),
        )
        engine, tokenizer = build_engine(for_inference(config), collection, RunFolder.of(config).checkpoints)
        answers = [_put(engine, tokenizer, batch, setup.turns) for batch in batches]
        found[setup] = Answers([said for a in answers for said in a.said], torch.cat([a.logits for a in answers]))
    groups.destroy()
    return found


def _put(engine: Any, tokenizer: Any, questions: Sequence[Question], turns: int) -> Answers:
    """A session for each question: its text in so many turns, then the question (in the last of them if one)."""
    from megatron_longctx.inference import Sampling
    from megatron_longctx.mcore.tokenizer import text_of

    sessions = [engine.open() for _ in questions]
    draws = random.Random(turns)
    texts = [[q.prompt] if turns == 1 else [*haystack.pieces(q.text, turns, draws), q.question] for q in questions]
    for turn in zip(*texts, strict=True):
        engine.append({session: tokenizer.tokenize(text) for session, text in zip(sessions, turn, strict=True)})
    logits = engine.next_logits(sessions)
    said = engine.continue_all(sessions, Sampling(max_new_tokens=haystack.CODE))
    for session in sessions:
        session.close()
    return Answers([text_of(tokenizer, ids) for ids in said], logits)


def grid(lengths: Sequence[int], depths: Sequence[float], trials: int, seed: int = 0) -> list[Question]:
    """`trials` questions for every length and depth, in this order."""
    draw = random.Random(seed)
    places = itertools.product(lengths, depths, range(trials))
    return [haystack.question(length, depth, OTHERS, draw) for length, depth, _ in places]


def findings(questions: Sequence[Question], answers: Mapping[Setup, Answers]) -> list[Found]:
    """Of every setup, beside the first one."""
    first = next(iter(answers.values()))
    lengths, depths = axes_of(questions)
    found = []
    for setup, each in answers.items():
        right = torch.tensor([float(q.answer == said) for q, said in zip(questions, each.said, strict=True)])
        different = sum(a != b for a, b in zip(each.said, first.said, strict=True))
        off = float((each.logits - first.logits).abs().max())
        found.append(Found(setup, right.view(len(lengths), len(depths), -1).mean(2).tolist(), different, off))
    return found


def by_length(found: Found) -> list[float]:
    return [sum(row) / len(row) for row in found.right]


def table(found: Sequence[Found], lengths: Sequence[int]) -> str:
    """Markdown: right answers by length, and what differs from one rank."""
    head = ["CP", "mode", "turns", *(f"{length:,}" for length in lengths), "answers unlike CP=1's", "logits off by"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for each in found:
        setup = each.setup
        right = [f"{100 * share:.1f}%" for share in by_length(each)]
        unlike = [str(each.different), f"{each.off:.1e}"] if each is not found[0] else ["", ""]
        mode = "" if setup.ranks == 1 else setup.mode
        rows.append("| " + " | ".join([str(setup.ranks), mode, str(setup.turns), *right, *unlike]) + " |")
    return "\n".join(rows)


def draw(found: Sequence[Found], questions: Sequence[Question], path: Path) -> None:
    """Right answers by length and depth, a picture for each number of ranks: the least over its modes and turns."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lengths, depths = axes_of(questions)
    counts = sorted({each.setup.ranks for each in found})
    figure, axes = plt.subplots(
        1, len(counts), figsize=(1.6 + 2.9 * len(counts), 4.2), layout="constrained", sharey=True
    )
    for axis, ranks in zip(axes, counts, strict=True):
        mine = [each for each in found if each.setup.ranks == ranks]
        least = torch.tensor([each.right for each in mine]).amin(0).T * 100
        image = axis.imshow(least, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        for (row, column), share in ((divmod(i, len(lengths)), x) for i, x in enumerate(least.flatten().tolist())):
            axis.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=7)
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
        axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
        axis.set_xlabel("text and answer (tokens)")
        asked = len(questions) * len(mine)
        unlike = sum(each.different for each in mine)
        axis.set_title(
            f"CP={ranks}" + ("" if ranks == 1 else f": {unlike} of {asked:,}\nanswers unlike CP=1's"), fontsize=10
        )
    axes[0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=axes, label="right answers (%)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def axes_of(questions: Sequence[Question]) -> tuple[list[int], list[float]]:
    """Lengths and depths, in the order of the questions."""
    return list(dict.fromkeys(q.length for q in questions)), list(dict.fromkeys(q.depth for q in questions))


def stages_of(length: int, steps: Sequence[int], words: Sequence[str]) -> list[Config]:
    """Configurations of one run, at a quarter, half and the whole of the length."""
    stages, done = [], 0
    for share, more in zip(SHARES, steps, strict=True):
        done += more
        own = [f"data.seq_length={length // share}", f"train.steps={done}", "train.check_data=false"]
        config = compose_config([*_WORDS, "data.prefix=data/needle", *own, *words])
        prefix = f"{config.data.prefix}_{config.data.seq_length}"
        stages.append(replace(config, data=replace(config.data, prefix=prefix)))
    return stages


def report(title: str, found: Sequence[Found], questions: Sequence[Question]) -> str:
    """Markdown."""
    lengths, depths = axes_of(questions)
    trials = len(questions) // (len(lengths) * len(depths))
    unlike, asked = sum(each.different for each in found), len(questions) * (len(found) - 1)
    how = f"{trials} questions for each of {len(lengths)} lengths and {len(depths)} depths, {OTHERS} other needles in "
    how += (
        f"every text, greedy decoding, fp32. {unlike} of {asked:,} answers are not those of one rank given the text at "
    )
    how += "once; the logits of their first tokens differ from its by the last column at most."
    shown = questions[len(depths) * trials // 2]
    example = f"{shown.text[:60]} … {shown.text[-30:]}{shown.question}"
    example = f"A text of {shown.length} tokens: `{example}`, to be continued with `{shown.answer}`."
    return f"{title}\n\n{how}\n\n{table(found, lengths)}\n\n{example}\n"


def _trained(config: Config) -> tuple[float, float]:
    """Seconds in steps of the whole run, and its mean loss over the last ten."""
    steps = [json.loads(line) for line in RunFolder.of(config).metrics.read_text().splitlines()]
    last = [step[names.LOSS] for step in steps[-10:]]
    return sum(step[names.STEP_S] for step in steps), sum(last) / len(last)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.needle", description=__doc__)
    parser.add_argument("--length", type=int, default=512, help="trained, in tokens, and the longest asked")
    parser.add_argument("--steps", type=int, nargs=3, default=STEPS, help="at a quarter, half and all of it")
    parser.add_argument("--trials", type=int, default=5, help="questions for every length and depth")
    parser.add_argument("--threads", type=int, default=1, help="of training")
    parser.add_argument("--out", type=Path, default=Path("analysis/results"), help="folder of the results")
    parser.add_argument("words", nargs="*", help="settings of the run, after those of this analysis")
    args = parser.parse_args(arguments)
    if not args.out.is_dir():
        parser.error(f"--out {args.out}: expected a folder that exists")
    stages = stages_of(args.length, args.steps, args.words)
    config, facts = stages[-1], environment()
    questions = grid([args.length * i // 4 for i in range(1, 5)], DEPTHS, args.trials)
    step = train(stages, args.threads)
    if step < config.train.steps:
        print(f"stopped in step {step} of {config.train.steps}: the same command goes on from there", file=sys.stderr)
        return 1
    seconds, loss = _trained(config)
    found = findings(questions, ask(config, setups(), questions))
    lengths = ", ".join(
        f"{more} steps at {stage.data.seq_length:,}" for more, stage in zip(args.steps, stages, strict=True)
    )
    title = f"{facts['date'][:10]}, commit {str(facts['commit'])[:9]}. Trained for {lengths} tokens "
    title += f"({config.train.global_batch_size} sequences a step, CPU threads: {args.threads}, {seconds:.0f} s)."
    stem = args.out / "needle"
    text = report(title, found, questions)
    stem.with_suffix(".md").write_text(text)
    data: dict[str, Any] = {"what": "needles in haystacks", "environment": facts, "config": config.as_dict()}
    data |= {"steps": args.steps, "training_s": seconds, "last_loss": loss, "trials": args.trials, "others": OTHERS}
    data |= dict(zip(("lengths", "depths"), axes_of(questions), strict=True))
    data["found"] = [asdict(each) for each in found]
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    draw(found, questions, stem.with_suffix(".png"))
    print(text)
    return 1 if any(each.different for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
