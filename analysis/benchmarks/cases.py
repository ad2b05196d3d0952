"""The problems of the attention benchmark: named masks and packs of documents, with heads."""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from megatron_longctx.core.errors import refuse
from megatron_longctx.core.plans import ALL_HEADS, Mask, Workload
from megatron_longctx.core.plans import mask as masks
from megatron_longctx.planner.cost import attention_flops

from .report import check_least, numbers

UNIT = 16
"""Document lengths are multiples of this: TransformerEngine accepts no others on 8 ranks."""
_TILE = 128
# MagiAttention, exps/dist_attn/benchmark/utils.py: shares of documents by length, for sequences above 64K tokens.
_PUBLISHED = {(0, 2): 0.16, (2, 4): 0.05, (4, 8): 0.04, (8, 16): 0.06, (16, 32): 0.08, (32, 64): 0.21, (64, 128): 0.4}


@dataclass(frozen=True)
class Case:
    """One attention problem over one document or a pack of several."""

    documents: tuple[int, ...]  # their lengths
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    element_bytes: int = 2
    causal: bool = True
    window: int | None = None  # tokens seen before a query's own and, unless causal, after it; None for all
    parents: tuple[int, ...] | None = None  # see `Mask.packed`
    name: str = "causal"  # of the mask

    @cached_property
    def mask(self) -> Mask:
        window = (self.window, 0 if self.causal else self.window)
        bounds = window if self.window else (None, None)
        return masks.documents(self.documents, causal=self.causal, window=bounds, parents=self.parents)

    @property
    def length(self) -> int:
        return sum(self.documents)

    @property
    def heads(self) -> str:
        return f"{self.num_heads}:{self.num_kv_heads}"

    @property
    def workload(self) -> Workload:
        return Workload(self.num_heads, self.num_kv_heads, self.head_dim, element_bytes=self.element_bytes)

    @property
    def dtype(self) -> torch.dtype:
        return {2: torch.bfloat16, 4: torch.float32}[self.element_bytes]

    @property
    def flops(self) -> float:
        """The FLOPs of visible pairs, forward and backward, for the whole sequence."""
        return sum(attention_flops(self.workload, self.mask.pairs, ALL_HEADS, backward) for backward in (False, True))

    def share(self, n: int) -> Case:
        """Return the case for one device that is compared with `n` devices.

        It is a shorter document with about 1/n of the FLOPs, or an unchanged pack, because the speed of kernels depends
        on the lengths of documents.
        """
        if len(self.documents) > 1:
            return self

        def pairs(length: int) -> int:
            return replace(self, documents=(length,)).mask.pairs

        length = bisect_left(range(1, self.length), self.mask.pairs // n, key=pairs) + 1
        return replace(self, documents=(round(length / _TILE) * _TILE or length,))

    def inputs(self, device: torch.device) -> list[torch.Tensor]:
        """Return q, k, v and the gradient of out for the whole sequence, the same on every rank."""
        generator = torch.Generator(device).manual_seed(self.length)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        return [
            torch.randn(self.length, 1, h, self.head_dim, device=device, dtype=self.dtype, generator=generator)
            for h in heads
        ]


def cases(names: str, lengths: str, heads: str, head_dim: int, dtype: str) -> list[Case]:
    """Return the cases of all masks and heads, with all lengths unless a mask gives the lengths of its documents.

    Args:
        names: masks like `causal,documents=24@7+window=1024,documents=100:28`. heads: like `32:8,32:32`.
    """
    check_least("--head-dim", head_dim)
    chosen = []
    for pair in heads.split(","):
        h, _, g = pair.partition(":")
        if not (h.isdecimal() and g.isdecimal() and int(g) and int(h) and int(h) % int(g) == 0):
            raise refuse("--heads", pair, "query:KV heads like 32:8, the first a multiple", "Correct them.")
        case = Case((), int(h), int(g), head_dim, 2 if dtype == "bf16" else 4)
        chosen += [each for name in names.split(",") for each in _with_mask(case, name, lengths)]
    return chosen


def _with_mask(case: Case, name: str, lengths: str) -> Iterator[Case]:
    case, drawn = replace(case, name=name), None
    for part in name.split("+"):
        key, _, value = part.partition("=")
        if part in ("causal", "full"):
            case = replace(case, causal=part == "causal")
        elif key == "window" and value.isdecimal() and int(value):
            case = replace(case, window=int(value))
        elif key == "documents" and (match := re.fullmatch(r"(\d+)@(\d+)", value)) and int(match[1]):
            drawn = int(match[1]), int(match[2])
        elif key == "pack" and value in packs():
            case = replace(case, documents=packs()[value])
        elif key == "documents" and value:
            case = replace(case, documents=numbers("--masks", value, 1, ":", distinct=False))
        else:
            expected = "parts of causal, full, window=N, documents=(COUNT@SEED | N:N:...), pack=NAME, joined by +"
            raise refuse("--masks", name, expected, f"Separate masks by commas. Packs: {', '.join(packs())}.")
    if case.documents:
        yield case
        return
    for length in numbers("--lengths", lengths, 1):
        yield replace(case, documents=_drawn_documents(length, *drawn) if drawn else (length,))


def _drawn_documents(length: int, count: int, seed: int) -> tuple[int, ...]:
    """Draw `count` document lengths with the sum `length` from a log-normal distribution."""
    spare = length // UNIT - count
    if spare < 0:
        raise refuse("--masks", f"documents={count}@{seed}", f"at most {length // UNIT} in {length} tokens", "Fewer.")
    weights = [random.Random(f"{seed} {i}").lognormvariate(0.0, 1.2) for i in range(count)]
    lengths = [UNIT * (1 + int(spare * weight / sum(weights))) for weight in weights]
    lengths[weights.index(max(weights))] += length - sum(lengths)
    return tuple(lengths)


def packs() -> dict[str, tuple[int, ...]]:
    """Return packs of documents by name: published ones, and ones drawn from published distributions."""
    draw = random.Random(0)  # three packs drawn one after the other

    def log_normal(mu: float, sigma: float, length: int) -> tuple[int, ...]:
        return _fill(length, lambda: max(int(draw.lognormvariate(mu, sigma)), 16))

    named = {"24": log_normal(7.5, 1.2, 2**16), "6": log_normal(9.2, 0.8, 2**16), "15": log_normal(8.0, 1.3, 2**17)}
    return named | {"64x1K": (1024,) * 64, "magi": _magi_attention(2**17)}


def _magi_attention(length: int) -> tuple[int, ...]:
    """Draw documents of MagiAttention's distribution, each at most a quarter of the pack."""
    draw, kinds, weights = random.Random(0), list(_PUBLISHED), list(_PUBLISHED.values())

    def one() -> int:
        ((low, high),) = draw.choices(kinds, weights)
        return min(max(draw.randint(1024 * low, 1024 * high), 1), length // 4)

    return _fill(length, one)


def dataset_documents(kind: str, tokens: int) -> tuple[int, ...]:
    """Draw the document lengths of a dataset.

    Args:
        kind: `log_normal` for the distribution of the pack of 128K tokens, or `long_tail`: most documents have less
            than 4K tokens, and one in a hundred has 128K; these have two fifths of all tokens. `long_tail_64k`: one in
            two hundred has 64K; these have a quarter.
    """
    draw = random.Random(0)
    kinds: dict[str, Callable[[], int]] = {
        "log_normal": lambda: min(max(int(draw.lognormvariate(8.0, 1.3)), 16), 2**17),
        "long_tail": lambda: 2**17 if draw.random() < 0.01 else draw.randint(UNIT, 4096),
        "long_tail_64k": lambda: 2**16 if draw.random() < 0.005 else draw.randint(UNIT, 4096),
    }
    if kind not in kinds:
        raise ValueError(f"documents of kind {kind}: expected one of {', '.join(kinds)}. Choose one of these.")
    return _fill(tokens, kinds[kind])


def _fill(length: int, draw: Callable[[], int]) -> tuple[int, ...]:
    """Draw documents until they have `length` tokens. All but the last, which is cut, are rounded to units."""
    drawn: list[int] = []
    left = length
    while left:
        drawn.append(min(draw(), left))
        left -= drawn[-1]
    ends = list(accumulate((max(UNIT, round(each / UNIT) * UNIT) for each in drawn), initial=0))
    rounded = [min(stop, length) - start for start, stop in pairwise(ends) if start < length]
    rounded[-1] += length - sum(rounded)
    return tuple(rounded)
