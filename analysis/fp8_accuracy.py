"""What weights in FP8 cost a model: `python -m analysis.fp8_accuracy RUN --texts FOLDER --out FILE.json [WORDS...]`.

Computes, with the weights of an imported or trained run as they are and in FP8: the loss of the beginnings of texts
(the `.txt` files of FOLDER), how often the likeliest next token is the same, and needles in these texts.
"""

import argparse
import logging
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analysis.benchmarks.report import Report, check_least, paired, table
from analysis.needles.questions import Haystack, Question, make_questions, score
from megatron_longctx.config import Config
from megatron_longctx.config.progress import Progress
from megatron_longctx.inference.sampling import PromptScores, Sampling
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.inference import build_engine, inference_config
from megatron_longctx.mcore.tokenizer import build_tokenizer, detokenize
from megatron_longctx.models.chat import load_chat
from megatron_longctx.training.compose import RESOLVED, load_config, override_config
from megatron_longctx.training.ranks import Ranks, run_on_ranks

KINDS = ("exact", "fp8")


@dataclass
class Found:
    """What a model with one kind of weights says about the texts."""

    losses: list[float]  # the mean of each text, nats a token
    likeliest: list[int]  # the likeliest token at every position of all texts but the last of each
    scores: list[float]  # of every needle, from 0 to 1
    answers: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.fp8_accuracy", description=__doc__)
    parser.add_argument("run", type=Path, help="an imported or trained run in bf16")
    parser.add_argument("words", nargs="*", help="settings, such as train.device=cpu")
    parser.add_argument("--texts", type=Path, required=True, help="folder of .txt files")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="a .md is written beside it")
    parser.add_argument("--windows", type=int, default=32, help="texts (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a text (default: %(default)s)")
    parser.add_argument("--needles", type=int, default=16, help="questions (default: %(default)s)")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    check_least("--windows", arguments.windows, 2)
    check_least("--needles", arguments.needles)
    config = override_config(load_config(arguments.run / RESOLVED), arguments.words, training=False)
    length = arguments.length
    inference = replace(config.inference, cache_tokens=length + 64, max_model_len=None)
    config = inference_config(replace(config, inference=inference))
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    files = sorted(arguments.texts.glob("*.txt"))
    texts = [tokenizer.tokenize(path.read_text(encoding="utf-8"))[:length] for path in files]
    texts = [tokens for tokens in texts if len(tokens) == length][: arguments.windows]
    chat = load_chat(None, tokenizer)

    def prompt(text: str, opening: str) -> str:
        asked = chat.text([{"role": "user", "content": text}]) if chat.template else text
        return asked + (opening.lstrip() if chat.template else opening)

    haystack, count = Haystack.essays(arguments.texts), lambda text: len(tokenizer.tokenize(text))
    questions = make_questions(["needle"], (length,), arguments.needles, haystack, count, (0.5,), 0, prompt)
    ranks = Ranks.of(1, config.train.device, least=1)
    stop = (tokenizer.eod, *chat.stop_tokens)
    found = run_on_ranks(ranks, measure, config, arguments.run / "checkpoints", texts, tuple(questions), stop)
    name = f"{arguments.run.resolve().name}, {len(texts)} texts of {length:,} tokens, {arguments.needles} needles"
    report = Report(arguments.out, ranks.device, "accuracy of FP8 weights", name, "losses in nats a token")
    print(report.write(as_data(found), tables(found)))
    return 0


def measure(
    rank: int, config: Config, checkpoints: Path, texts: Sequence[list[int]], questions: Sequence[Question], stop: Any
) -> dict[str, Found]:
    """Compute both kinds of weights, one after the other."""
    found: dict[str, Found] = {}
    for kind in KINDS:
        collection = groups.initialize()
        try:
            of_kind = replace(config, inference=replace(config.inference, weights=kind))
            engine, tokenizer = build_engine(of_kind, collection, checkpoints)
            each = found[kind] = Found([], [], [], [])
            with Progress(kind, len(texts) + len(questions), "texts", told=rank == 0) as progress:
                for tokens in texts:
                    session = engine.open()
                    session.scores = scores = PromptScores(tokens, 1)
                    session.append(tokens)
                    session.close()
                    each.losses.append(-statistics.fmean(one.logprob for one in scores.found))
                    each.likeliest += [one.top[0][0] for one in scores.found]
                    progress.done += 1
                for question in questions:
                    sampling = Sampling(max_new_tokens=question.answer_tokens, stop=stop)
                    (answer,) = engine.generate([tokenizer.tokenize(question.prompt)], sampling)
                    each.answers.append(detokenize(tokenizer, answer))
                    each.scores.append(score(question, each.answers[-1]).share)
                    progress.done += 1
            engine.release()
        finally:
            groups.destroy()
    return found


def as_data(found: dict[str, Found]) -> dict[str, Any]:
    exact, fp8 = (found[kind] for kind in KINDS)
    more, noise = paired(fp8.losses, exact.losses)
    same = [a == b for a, b in zip(exact.likeliest, fp8.likeliest, strict=True)]
    return {
        "loss_more": more,
        "loss_noise": noise,
        "same_token_percent": 100 * statistics.fmean(same),
        "same_answers": sum(a == b for a, b in zip(exact.answers, fp8.answers, strict=True)),
        "kinds": [
            {
                "weights": kind,
                "loss": statistics.fmean(each.losses),
                "perplexity": math.exp(statistics.fmean(each.losses)),
                "needles_percent": 100 * statistics.fmean(each.scores),
                "losses": each.losses,
                "answers": each.answers,
            }
            for kind, each in found.items()
        ],
    }


def tables(found: dict[str, Found]) -> str:
    data = as_data(found)
    rows = [
        [
            kind["weights"],
            f"{kind['loss']:.4f}",
            f"{kind['perplexity']:.3f}",
            f"{data['loss_more']:+.4f} ± {data['loss_noise']:.4f}" if kind["weights"] == "fp8" else "",
            f"{data['same_token_percent']:.1f}%" if kind["weights"] == "fp8" else "",
            f"{kind['needles_percent']:.0f}%",
        ]
        for kind in data["kinds"]
    ]
    return table(["weights", "loss", "perplexity", "loss more by", "same likeliest token", "needles found"], rows)


if __name__ == "__main__":
    sys.exit(main())
