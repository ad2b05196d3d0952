"""What attention takes of a layer's forward pass, by tokens, on one device. Weights are random."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_longctx.compose import compose_config
from megatron_longctx.config import Config
from megatron_longctx.errors import refuse
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.inference import load_model
from megatron_longctx.mcore.losses import for_losses
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.training.ranks import Ranks, run_on_ranks

from .inference_ranks import numbers
from .recorded import Report, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", help="group=NAME and key=value words")
    parser.add_argument("--lengths", default="4096,8192,16384,32768", help="tokens (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=5, help="of every length (default: %(default)s)")


@dataclass
class Parts:
    """Seconds of each layer in each iteration: of the attention function alone, without its projections, and of the
    whole layer."""

    tokens: int
    attention: list[float]
    layer: list[float]

    @property
    def medians(self) -> tuple[float, float]:
        return statistics.median(self.attention), statistics.median(self.layer)


def run(arguments: argparse.Namespace) -> None:
    """Measure, write JSON and a Markdown table after every length.

    Raises:
        ValueError: settings or sizes that cannot be used.
    """
    if arguments.iterations < 1:
        raise refuse("--iterations", arguments.iterations, "1 or more", "Raise it.")
    lengths = sorted(map(int, numbers("--lengths", arguments.lengths, 2)))
    config = for_losses(compose_config([*arguments.settings, f"data.seq_length={lengths[-1]}"]))
    ranks = config.parallelism.context_parallel_size * config.parallelism.tensor_parallel_size
    if ranks != 1:
        raise refuse("parallelism", f"{ranks} ranks", "1: a layer's parts on one device", "Take parallelism=single.")
    where = Ranks.of(1, config.train.device, least=1)
    what = "seconds of attention and of the whole layer in the forward pass, without gradients: random weights"
    about = f"{config.model.name}, {config.model.num_layers} layers, {config.train.precision}"
    report = Report(arguments.out, where.device, what, about, "forward pass of a layer, medians in ms")
    keep = partial(record, report, config)
    print(keep(run_on_ranks(where, measure, config, tuple(lengths), arguments.iterations, keep)))


def record(report: Report, config: Config, found: Sequence[Parts]) -> str:
    """Write what has been found so far; returns the table."""
    measured = [asdict(each) | dict(zip(("attention_s", "layer_s"), each.medians, strict=True)) for each in found]
    return report.write({"model": asdict(config.model), "measurements": measured}, medians(found))


def medians(found: Sequence[Parts]) -> str:
    """Markdown; in milliseconds."""
    rows = []
    for each in found:
        attention, layer = (1e3 * seconds for seconds in each.medians)
        rest = layer - attention
        rows.append([f"{each.tokens:,}", f"{attention:.2f}", f"{rest:.2f}", f"{attention / layer:.0%}"])
    return table(["tokens", "attention", "rest of the layer", "attention's share"], rows)


def measure(
    rank: int, config: Config, lengths: Sequence[int], iterations: int, keep: Callable[[list[Parts]], object]
) -> list[Parts]:
    """All lengths; `keep` is told after every one."""
    del rank
    collection, found = groups.initialize(tensor=1, context=1), list[Parts]()
    try:
        for tokens in lengths:
            of_length = replace(config, data=replace(config.data, seq_length=tokens))
            gpt = load_model(of_length, collection, build_sequence(of_length, collection.cp), None)[0].eval()
            words = torch.randint(gpt.vocab_size, (1, tokens), device=next(gpt.parameters()).device)
            places = torch.arange(tokens, device=words.device)[None]
            layers, cuda = list(gpt.decoder.layers), words.is_cuda
            cores = [layer.self_attention.core_attention for layer in layers]
            with torch.no_grad(), timed(layers, cuda) as whole, timed(cores, cuda) as attention:
                for _ in range(1 + iterations):
                    gpt(words, places, None)
            first = len(layers)  # of the first iteration, which compiles
            found.append(Parts(tokens, attention()[first:], whole()[first:]))
            keep(found)
        return found
    finally:
        groups.destroy()


def _mark(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    mark.record()
    return mark


@contextmanager
def timed(modules: Sequence[torch.nn.Module], cuda: bool) -> Iterator[Callable[[], list[float]]]:
    """Seconds of every forward pass of the modules, in their order: by CUDA's events, which wait for nothing, or by the
    host's clock."""
    begun: list[Any] = []
    ended: list[Any] = []
    hooks = []
    for each in modules:
        hooks.append(each.register_forward_pre_hook(lambda *_: begun.append(_mark(cuda))))
        hooks.append(each.register_forward_hook(lambda *_: ended.append(_mark(cuda))))

    def seconds() -> list[float]:
        if not cuda:
            return [stop - start for start, stop in zip(begun, ended, strict=True)]
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in zip(begun, ended, strict=True)]

    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()
