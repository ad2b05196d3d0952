"""Attention's share of a layer's forward pass, by number of tokens, on one device. Weights are random."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_longctx.config import Config
from megatron_longctx.core.errors import refuse
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.inference import load_model
from megatron_longctx.mcore.losses import losses_config
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.ranks import Ranks, run_on_ranks

from .report import Report, check_least, numbers, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", help="group=NAME and key=value words")
    parser.add_argument("--lengths", default="4096,8192,16384,32768", help="tokens (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=5, help="of every length (default: %(default)s)")


@dataclass
class Parts:
    """Seconds of every layer in every iteration: of the attention function without projections, and of the layer."""

    tokens: int
    attention: list[float]
    layer: list[float]

    @property
    def medians(self) -> tuple[float, float]:
        return statistics.median(self.attention), statistics.median(self.layer)


def run(arguments: argparse.Namespace) -> None:
    """Measure, write JSON and a Markdown table after every length."""
    check_least("--iterations", arguments.iterations)
    lengths = sorted(numbers("--lengths", arguments.lengths, 2))
    config = losses_config(compose_config([*arguments.settings, f"data.seq_length={lengths[-1]}"]))
    count = config.parallelism.context_parallel_size * config.parallelism.tensor_parallel_size
    if count != 1:
        raise refuse("parallelism", f"{count} ranks", "1: a layer's parts on one device", "Take parallelism=single.")
    ranks = Ranks.of(1, config.train.device, least=1)
    what = "seconds of attention and of the whole layer in the forward pass, without gradients: random weights"
    about = f"{config.model.name}, {config.model.num_layers} layers, {config.train.precision}"
    report = Report(arguments.out, ranks.device, what, about, "forward pass of a layer, medians in ms")
    save = partial(record, report, config)
    print(save(run_on_ranks(ranks, measure, config, tuple(lengths), arguments.iterations, save)))


def record(report: Report, config: Config, measured: Sequence[Parts]) -> str:
    """Write the results so far; return the table."""
    data = [asdict(each) | dict(zip(("attention_s", "layer_s"), each.medians, strict=True)) for each in measured]
    return report.write({"model": asdict(config.model), "measurements": data}, medians(measured))


def medians(measured: Sequence[Parts]) -> str:
    """Return Markdown with times in milliseconds."""
    rows = []
    for each in measured:
        attention, layer = (1e3 * seconds for seconds in each.medians)
        rows.append([f"{each.tokens:,}", f"{attention:.2f}", f"{layer - attention:.2f}", f"{attention / layer:.0%}"])
    return table(["tokens", "attention", "rest of the layer", "attention's share"], rows)


def measure(
    rank: int, config: Config, lengths: Sequence[int], iterations: int, save: Callable[[list[Parts]], object]
) -> list[Parts]:
    """Measure all lengths; call `save` after every one."""
    del rank
    collection, measured = groups.initialize(tensor=1, context=1), list[Parts]()
    try:
        for length in lengths:
            of_length = replace(config, data=replace(config.data, seq_length=length))
            gpt = load_model(of_length, collection, build_sequence(of_length, collection.cp), None)[0].eval()
            tokens = torch.randint(gpt.vocab_size, (1, length), device=next(gpt.parameters()).device)
            positions = torch.arange(length, device=tokens.device)[None]
            layers, cuda = list(gpt.decoder.layers), tokens.is_cuda
            cores = [layer.self_attention.core_attention for layer in layers]
            with torch.no_grad(), timed(layers, cuda) as whole, timed(cores, cuda) as attention:
                for _ in range(1 + iterations):
                    gpt(tokens, positions, None)
            first = len(layers)  # calls of the first iteration, which compiles
            measured.append(Parts(length, attention()[first:], whole()[first:]))
            save(measured)
        return measured
    finally:
        groups.destroy()


def _now(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@contextmanager
def timed(modules: Sequence[torch.nn.Module], cuda: bool) -> Iterator[Callable[[], list[float]]]:
    """Time every forward pass of the modules, in their order: by CUDA events without waiting, or by the host's clock.

    Yields:
        a function that returns the seconds.
    """
    begun: list[Any] = []
    ended: list[Any] = []
    hooks = []
    for each in modules:
        hooks.append(each.register_forward_pre_hook(lambda *_: begun.append(_now(cuda))))
        hooks.append(each.register_forward_hook(lambda *_: ended.append(_now(cuda))))

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
