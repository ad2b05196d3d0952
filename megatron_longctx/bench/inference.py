"""`bench inference`: times to first token and between tokens of the configured model, and how well rules choose."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from ..config import Config, refuse
from ..inference.figures import calibration_file, known_figures
from ..inference.plan import MODES
from ..mcore.inference import for_inference
from ..schedules import Workload
from . import inference_report as report
from .command import Where, run_calibrate, start
from .inference_ranks import RINGS, Decoded, FirstToken, Sweep, measure
from .recorded import Recorded

logger = logging.getLogger(__name__)
_N = TypeVar("_N", int, float)


@dataclass(frozen=True)
class Words:
    """Lists as they are typed, numbers separated by commas. context: None for the settings' own size."""

    lengths: str
    miss_rates: str
    batches: str
    context: str | None
    iterations: int
    tokens: int
    decode_only: bool = False
    modes: str = ",".join(RINGS)

    def sweep(self) -> Sweep:
        """Raises ValueError for what is not such numbers."""
        for name, value, least in (("--iterations", self.iterations, 0), ("--tokens", self.tokens, 1)):
            if value < least:
                raise refuse(name, value, f"{least} or more", "Raise it.")
        rates = _numbers("--miss-rates", self.miss_rates, float, 0.0)
        if max(rates) > 1:
            raise refuse("--miss-rates", self.miss_rates, "shares from above 0 to 1", "1 computes all tokens anew.")
        lengths, batches = (
            _numbers(n, v, int, 1) for n, v in (("--lengths", self.lengths), ("--batches", self.batches))
        )
        if min(lengths) < 2:
            raise refuse("--lengths", self.lengths, "2 tokens or more", "Raise them.")
        modes = tuple(dict.fromkeys(self.modes.split(",")))
        if not set(modes) <= set(MODES):
            raise refuse("--modes", self.modes, "some of " + ", ".join(MODES), "Separate them by commas.")
        return Sweep(lengths, rates, batches, self.iterations, self.tokens, self.decode_only, modes)

    def sizes(self, config: Config) -> tuple[int, ...]:
        """Context-parallel sizes, in the order given."""
        if self.context is None:
            return (config.parallelism.context_parallel_size,)
        return _numbers("--context", self.context, int, 1)


def run_inference(config: Config, words: Words, out: Path) -> None:
    """Measure, write JSON and a Markdown report after every measurement, at the end a picture of the crossover.

    A device that is not calibrated for the model's heads is calibrated first.

    Args:
        out: a .json file.

    Raises:
        ValueError: settings, sizes or a place that cannot be used.
    """
    if out.suffix != ".json" or not out.parent.is_dir():
        raise refuse("--out", out, "a .json file in a folder that exists", "Give another file name.")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise refuse("RANK", os.environ["RANK"], "to be started once", "Run it without torchrun: it starts its ranks.")
    sweep = words.sweep()
    jobs = [_sized(for_inference(config), sweep, n) for n in words.sizes(config)]
    places = [_where(job) for job in jobs]
    for job, where in zip(jobs, places, strict=True):
        if not sweep.decode_only:
            _calibrated(job, where)
    first: list[FirstToken] = []
    decoded: list[Decoded] = []
    for job, where in zip(jobs, places, strict=True):
        record = _Record(out, where.device, job, sweep, tuple(first), tuple(decoded))
        found = start(where, measure, job, sweep, record)[0]
        first += found[0]
        decoded += found[1]
    if shared := [m for m in first if set(RINGS) <= set(m.seconds)]:
        report.draw(shared, out.with_suffix(".png"), record.title)
    print(report.tables(first, decoded))
    logger.info("written to %s, and .md and .png beside it", out)


@dataclass(frozen=True)
class _Record(Recorded):
    """Writes what one size's ranks have found so far, behind what was found `first` and `decoded` with others."""

    config: Config
    sweep: Sweep
    first: tuple[FirstToken, ...]
    decoded: tuple[Decoded, ...]

    @property
    def title(self) -> str:
        config, facts = self.config, self.facts
        tp = config.parallelism.tensor_parallel_size
        return f"{config.model.name}, {facts['device']}, {config.train.precision}, TP {tp}, {facts['date'][:10]}"

    def __call__(self, first: list[FirstToken], decoded: list[Decoded]) -> None:
        first, decoded = [*self.first, *first], [*self.decoded, *decoded]
        config = self.config
        data = {
            "what": "inference over a sharded cache: random weights, times of the slowest rank in seconds",
            "environment": self.facts,
            "model": asdict(config.model),
            "inference": asdict(config.inference),
            "precision": config.train.precision,
            "tensor_parallel_size": config.parallelism.tensor_parallel_size,
            "sweep": asdict(self.sweep),
            **report.as_data(first, decoded),
        }
        self.write(data, "random weights; times in ms, of the slowest rank", report.tables(first, decoded))


def _numbers(name: str, text: str, kind: Callable[[str], _N], least: float) -> tuple[_N, ...]:
    """`1,2,4` as numbers, each once; integers of `least` or more, other numbers above it."""
    try:
        found = tuple(dict.fromkeys(kind(word) for word in text.split(",")))
        if not all(number > least or (kind is int and number == least) for number in found):
            raise ValueError
    except ValueError:
        what = f"integers of {least} or more" if kind is int else f"numbers above {least:g}"
        raise refuse(name, text, f"{what}, separated by commas", "Correct it.") from None
    return found


def _sized(config: Config, sweep: Sweep, n: int) -> Config:
    """The settings for `n` context-parallel ranks, with the cache and the positions that `sweep` takes."""
    inference = config.inference
    # What `pages_per_rank` makes so many pages of.
    cache = n * (sweep.pages(n, inference.page_tokens) * inference.page_tokens - 2)
    longest = max(sweep.lengths) + 2 * sweep.tokens + 64
    return replace(
        config,
        parallelism=replace(config.parallelism, context_parallel_size=n),
        inference=replace(inference, cache_tokens=cache),
        data=replace(config.data, seq_length=max(config.data.seq_length, longest)),
    )


def _where(config: Config) -> Where:
    par, wanted = config.parallelism, config.train.device
    cuda = torch.cuda.is_available() and wanted != "cpu"
    if wanted == "cuda" and not cuda:
        raise refuse("train.device", wanted, "a CUDA device here; torch sees none", "Use train.device=cpu.")
    ranks, gpus = par.context_parallel_size * par.tensor_parallel_size, torch.cuda.device_count()
    if cuda and ranks > gpus:
        raise refuse("context x tensor-parallel size", ranks, f"at most {gpus}, the GPUs here", "Use smaller sizes.")
    return Where(ranks, "cuda" if cuda else "cpu", config.attention.kernel, config.inference.transport)


def _calibrated(config: Config, where: Where) -> None:
    """See that the simulator knows this device."""
    n, device = config.parallelism.context_parallel_size, torch.device(where.device)
    if n > 1 and known_figures(config, device).costs is None:
        logger.info("%s is not there: calibrating %d ranks", calibration_file(config, device), n)
        run_calibrate(replace(where, ranks=n), replace(Workload.of(config), batch=1))
