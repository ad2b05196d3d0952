"""How evenly the packs of a step are dealt out to data-parallel replicas, by `data.max_wait_steps`; without a GPU.

Work is predicted (`planner.flops`). Most documents are short, 2% have between 4K and 64K tokens, and some have 64K, as
many as a pack.
"""

import argparse
import time
from itertools import product

import numpy

from megatron_longctx.core.errors import refuse
from megatron_longctx.mcore.packing import Blend, Dealer, Packs, deal
from megatron_longctx.planner.flops import Work, training_flops
from megatron_longctx.training.compose import compose_config

from .report import Report, table

LENGTH, SHORT = 65_536, 4_096
REPLICAS, MICRO_BATCHES, WAITS = (2, 4, 8), (1, 4), (None, 0, 8, 32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--documents", type=int, default=1_000_000, help="(default: %(default)s)")
    parser.add_argument("--long", type=float, default=0.1, help="share of tokens in long documents (default: 0.1)")
    parser.add_argument("--model", default="llama3_8b", help="a model of recipes/model (default: %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Compute, and write JSON and a Markdown table."""
    if arguments.documents < 10_000:
        raise refuse("--documents", arguments.documents, "at least 10,000", "Fewer have too few long ones.")
    if not 0 < arguments.long < 1:
        raise refuse("--long", arguments.long, "a share between 0 and 1", "Correct it.")
    model = compose_config([f"model={arguments.model}"]).model
    flops = [training_flops(model, model.vocab_size or 0, one).causal for one in (Work(1, 0, 0), Work(0, 1, 0))]
    lengths = documents(arguments.documents, arguments.long)
    began = time.process_time()
    packs = Packs(lengths, LENGTH, seed=1)
    packed = time.process_time()

    packs.weigh(flops[0], flops[1], model.layer_windows)
    Dealer([packs], Blend([1.0]), 8, 1, 32).step(0)
    seconds = {"packs": packed - began, "steps": time.process_time() - packed}
    rows, measured = [], []
    for count, each in product(REPLICAS, MICRO_BATCHES):
        found = [
            excess(Dealer([packs], Blend([1.0]), count * each, 1, wait or 0), packs.size // (count * each), count, wait)
            for wait in WAITS
        ]
        rows.append([str(count), str(each), *(f"{mean:.1%}, {over:.0%}" for mean, over in found)])
        sizes = {"replicas": count, "micro_batches": each}
        measured += [{**sizes, "max_wait_steps": wait, "mean": mean, "steps_above_5_percent": over}
                     for wait, (mean, over) in zip(WAITS, found, strict=True)]  # fmt: skip
    what = "work of the busiest replica above the average: mean over steps, and the share of steps above 5%"
    about = (
        f"{len(lengths):,} documents, {arguments.long:.0%} of the tokens in documents of 64K; {packs.size:,} packs of "
        f"64K, {model.name}"
    )
    report = Report(arguments.out, "cpu", what, about, f"{what}; predicted")
    heads = ["replicas", "micro-batches", *(f"max_wait_steps={'null' if wait is None else wait}" for wait in WAITS)]
    full = float(packs.tokens.sum()) / packs.size / LENGTH
    data = {"documents": len(lengths), "packs": packs.size, "full": full, "model": model.name, "seconds": seconds}
    print(report.write({**data, "measurements": measured}, table(heads, rows)))
    print(f"{seconds['packs']:.2f} s of CPU for packs, {seconds['steps']:.2f} s for their work and the first 33 steps")


def documents(count: int, long: float) -> numpy.ndarray:
    """Return lengths, int32: `count` of less than 64K tokens, and documents of 64K with this share of all tokens."""
    random = numpy.random.RandomState(0)
    short = numpy.clip(random.lognormal(6.5, 1.0, count - count // 50), 16, SHORT)
    middle = numpy.clip(random.lognormal(9.0, 0.8, count // 50), SHORT, LENGTH - 1)
    number = round(long / (1 - long) * (short.sum() + middle.sum()) / LENGTH)
    return numpy.concatenate([short, middle, numpy.full(number, LENGTH)]).astype(numpy.int32)


def excess(dealer: Dealer, steps: int, count: int, wait: int | None) -> tuple[float, float]:
    """Return the imbalance of replicas, a mean over steps, and the share of steps in which it is above 5%."""
    found = []
    for step in range(steps):
        samples, work = dealer.step(step)
        if wait is None:  # in random order, as steps were before packs were dealt out
            totals = work[numpy.argsort(samples)].reshape(count, -1).sum(1)
        else:
            totals = numpy.array([work[share].sum() for share in deal(work, count)])
        found.append(totals.max() / totals.mean() - 1)
    return float(numpy.mean(found)), float(numpy.mean(numpy.array(found) > 0.05))
