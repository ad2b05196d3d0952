"""Flash Communication's times on L40s and A100s (figures 1, 2, 9, 13 and 14), simulated from data sheets.

Matrix products and attention run at a share of the peak, all-reduces at the rate of a GPU's links.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron_longctx.core.plans.plan import ALL_HEADS
from megatron_longctx.lowbit.quantize import Format, RawFormat
from megatron_longctx.lowbit.quantized import formats
from megatron_longctx.planner.cost import attention_flops
from megatron_longctx.planner.flops import peak_tflops

from .page import Assumption, Cell, Table, cell, paper
from .simulated import MATMUL_SHARE, Llama

LLAMA3_8B = Llama(32, 4096, 14336, 32, 8)
LLAMA3_70B = Llama(80, 8192, 28672, 64, 8)
LINKS = {"L40": 32e9, "A100": 300e9}
"""Bytes per second in each direction of one GPU: PCIe 4.0 x16 and NVLink 3, half of the paper's 64 and 600 GB/s
(appendix A.1), which count both directions."""
PAPER_SHARES = {"L40": 65.0, "A100": 20.0}
"""The largest shares of communication in the paper, in percent (sections 1 and 3.1)."""
BITS = {"int8": 8, "int6": 6, "int4": 4}
_MODELS = (("Llama-3-70B, TP 4", LLAMA3_70B, 4), ("Llama-3-8B, TP 2", LLAMA3_8B, 2))
_TOKENS = 1, 4, 16
_SUMS = 2
"""All-reduces per layer: of the output projection and of the down projection."""
_VALUE_BYTES = 2


@dataclass(frozen=True)
class Prefill:
    """Seconds of the parts of a prompt's forward pass; nothing overlaps."""

    linear: float
    attention: float
    sums: float

    @property
    def seconds(self) -> float:
        return self.linear + self.attention + self.sums

    @property
    def share(self) -> float:
        """The share of communication, in percent."""
        return 100 * self.sums / self.seconds


def prefill(
    model: Llama, n: int, tokens: int, gpu: str, bits: int | None = None, work: float = 1.0, links: float = 1.0
) -> Prefill:
    """Return the times of one prompt on n tensor-parallel GPUs, with sums of `bits`; None for the values' 16 bits.

    Args:
        work, links: factors of what matrix products and links are assumed to reach.
    """
    peak = peak_tflops(gpu)
    assert peak is not None
    rate = n * work * MATMUL_SHARE * peak * 1e12 / model.layers
    attention = attention_flops(model.workload, tokens * (tokens + 1) / 2, ALL_HEADS, False)
    sums = _SUMS * model.layers * sent(tokens * model.hidden, n, bits) / (links * LINKS[gpu])
    return Prefill(model.linear_flops(tokens) / rate, attention / rate, sums)


def sent(values: int, n: int, bits: int | None = None) -> float:
    """Return the bytes that a rank sends in an all-reduce of `values` values, by ring or in two steps.

    Low bits include the ends of the ranges of groups of 128.
    """
    raw = RawFormat(_VALUE_BYTES)
    forms: tuple[Format, Format] = (raw, raw) if bits is None else formats(torch.bfloat16, bits)
    return (n - 1) * sum(form.message_bytes(values // n) for form in forms)


def parts() -> Table:
    rows: list[list[Cell]] = []
    for gpu in LINKS:
        for name, model, n in _MODELS:
            for each in _TOKENS:
                prompt = prefill(model, n, each * 1024, gpu)
                times = (cell(1e3 * x, "d", 0) for x in (prompt.linear, prompt.attention, prompt.sums))
                rows.append([gpu, name, f"{each}K", *times, cell(prompt.share, "d", 0)])
        rows.append([gpu, "the paper, at most", *[None] * 4, paper(PAPER_SHARES[gpu], 0)])
    columns = ["GPUs", "model", "tokens", "linear, ms", "attention, ms", "all-reduces, ms", "all-reduces, %"]
    return Table("parts", "where the time to first token goes", columns, rows, ["figure 1", "figure 2"])


def first_tokens() -> Table:
    rows: list[list[Cell]] = []
    for gpu in LINKS:
        for name, model, n in _MODELS:
            for each in _TOKENS:
                exact = prefill(model, n, each * 1024, gpu)
                low = [prefill(model, n, each * 1024, gpu, bits) for bits in BITS.values()]
                ratios = (cell(rounded.seconds / exact.seconds, "d") for rounded in low)
                faster, share = cell(exact.seconds / low[-1].seconds, "d"), cell(low[-1].share, "d", 0)
                rows.append([gpu, name, f"{each}K", cell(1e3 * exact.seconds, "d", 0), *ratios, faster, share])
        if gpu == "L40":
            rows.append([gpu, "the paper, at most", *[None] * 5, paper(2, 0), None])
    columns = [
        *("GPUs", "model", "tokens", "16 bits, ms"), *(f"{form}, of it" for form in BITS),
        *("int4, times as fast", "all-reduces with int4, %"),
    ]  # fmt: skip
    of = ["figure 9", "figure 13", "figure 14"]
    return Table("first_tokens", "time to first token by the bits of sums", columns, rows, of)


def assumed() -> Iterator[Assumption]:
    """Yield what the headlines depend on."""

    def prompt(of: str, by: float, bits: int | None = None) -> Prefill:
        return prefill(LLAMA3_70B, 4, 1024, "L40", bits, *((by, 1.0) if of == "work" else (1.0, by)))

    def share(of: str, by: float) -> float:
        return prompt(of, by).share

    def gain(of: str, by: float) -> float:
        return prompt(of, by).seconds / prompt(of, by, 4).seconds

    names = {"work": "matrix products reach 70% of the peak", "links": "links reach their full rate"}
    for of, name in names.items():
        yield Assumption(name, "all-reduces of Llama-3-70B on L40s, %", partial(share, of))
        yield Assumption(name, "int4's first token, times as fast", partial(gain, of))


def facts(tables: Sequence[Table]) -> dict[str, float]:
    """Return the numbers in the claims.

    l40_needed is the rate, in GB/s per direction, at which all-reduces would take the paper's share of the time on
    L40s, and l40_needed_gain the speed-up from int4 at this rate.
    """
    shares, gains = tables
    of_70b, of_8b = (name for name, _, _ in _MODELS)
    short, share = prefill(LLAMA3_70B, 4, 1024, "L40"), PAPER_SHARES["L40"] / 100
    fewer = sent(1 << 20, 4) / sent(1 << 20, 4, 4)
    return {
        "l40_share": shares.value("L40", of_70b, "1K", column=6),
        "a100_share": shares.value("A100", of_70b, "1K", column=6),
        "l40_gain": gains.value("L40", of_70b, "1K", column=7),
        "l40_gain_8b": gains.value("L40", of_8b, "1K", column=7),
        "a100_gain": gains.value("A100", of_70b, "1K", column=7),
        "int4_fewer": fewer,
        "l40_needed": LINKS["L40"] / 1e9 * short.sums / (short.linear + short.attention) * (1 - share) / share,
        **{f"{form}_bytes": sent(1 << 20, 4, bits) * _VALUE_BYTES / sent(1 << 20, 4) for form, bits in BITS.items()},
        "l40_needed_gain": 1 / (1 - share + share / fewer),
    }
