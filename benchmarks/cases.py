"""What the attention benchmark computes: masks by name, with heads."""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from megatron_longctx.errors import refuse
from megatron_longctx.schedules import ALL_HEADS, Mask, Workload
from megatron_longctx.schedules import mask as masks

from .packs import UNIT, packs

_TILE = 128


@dataclass(frozen=True)
class Case:
    """One attention problem: a pack of documents, or a single one.

    window: tokens that a query sees besides its own, before it and, unless it is causal, behind it. name: of the mask.
    """

    documents: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    element_bytes: int = 2
    causal: bool = True
    window: int | None = None
    name: str = "causal"

    @cached_property
    def mask(self) -> Mask:
        window = (self.window, 0 if self.causal else self.window)
        return masks.documents(self.documents, causal=self.causal, window=window if self.window else (None, None))

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
        """Forward and backward of visible pairs, of the whole sequence."""
        return sum(self.workload.flops(self.mask.pairs, ALL_HEADS, backward) for backward in (False, True))

    def share(self, n: int) -> Case:
        """What one device computes beside `n` of them: a shorter document with about an n-th of the FLOPs; a pack as it
        is, since kernels' speed depends on the lengths of documents."""
        if len(self.documents) > 1:
            return self

        def pairs(length: int) -> int:
            return replace(self, documents=(length,)).mask.pairs

        length = bisect_left(range(1, self.length), self.mask.pairs // n, key=pairs) + 1
        return replace(self, documents=(round(length / _TILE) * _TILE or length,))

    def inputs(self, device: torch.device) -> list[torch.Tensor]:
        """q, k, v and the gradient of out, of the whole sequence; the same on every rank."""
        generator = torch.Generator(device).manual_seed(self.length)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        return [
            torch.randn(self.length, 1, h, self.head_dim, device=device, dtype=self.dtype, generator=generator)
            for h in heads
        ]


def cases(names: str, lengths: str, heads: str, head_dim: int, dtype: str) -> list[Case]:
    """All masks with all heads; those without documents of their own with all lengths.

    Args:
        names: of masks, as `causal,documents=24@7+window=1024,documents=100:28`. heads: as `32:8,32:32`.

    Raises:
        ValueError: not of this form, or heads that do not divide.
    """
    if head_dim < 1:
        raise refuse("--head-dim", head_dim, "1 or more", "Raise it.")
    found = []
    for pair in heads.split(","):
        h, _, g = pair.partition(":")
        if not (h.isdecimal() and g.isdecimal() and int(g) and int(h) and int(h) % int(g) == 0):
            raise refuse("--heads", pair, "query:KV heads like 32:8, the first a multiple", "Correct them.")
        plain = Case((), int(h), int(g), head_dim, 2 if dtype == "bf16" else 4)
        found += [each for name in names.split(",") for each in _of_mask(plain, name, lengths)]
    return found


def _of_mask(plain: Case, name: str, lengths: str) -> Iterator[Case]:
    case, drawn = replace(plain, name=name), None
    for part in name.split("+"):
        key, _, value = part.partition("=")
        if part in ("causal", "full"):
            case = replace(case, causal=part == "causal")
        elif key == "window" and value.isdecimal() and int(value):
            case = replace(case, window=int(value))
        elif key == "documents" and (pack := re.fullmatch(r"(\d+)@(\d+)", value)) and int(pack[1]):
            drawn = int(pack[1]), int(pack[2])
        elif key == "pack" and value in packs():
            case = replace(case, documents=packs()[value])
        elif key == "documents" and value:
            case = replace(case, documents=_numbers("--masks", value, ":"))
        else:
            expected = "parts of causal, full, window=N, documents=(COUNT@SEED | N:N:...), pack=NAME, joined by +"
            remedy = f"Separate masks by commas. Packs: {', '.join(packs())}."
            raise refuse("--masks", name, expected, remedy)
    if case.documents:
        yield case
        return
    for length in _numbers("--lengths", lengths, ","):
        yield replace(case, documents=documents(length, *drawn) if drawn else (length,))


def documents(length: int, count: int, seed: int) -> tuple[int, ...]:
    """`count` documents of `length` tokens in all, drawn from a log-normal distribution.

    Raises:
        ValueError: they would not fit.
    """
    spare = length // UNIT - count
    if spare < 0:
        raise refuse("--masks", f"documents={count}@{seed}", f"at most {length // UNIT} in {length} tokens", "Fewer.")
    weights = [random.Random(f"{seed} {i}").lognormvariate(0.0, 1.2) for i in range(count)]
    found = [UNIT * (1 + int(spare * weight / sum(weights))) for weight in weights]
    found[weights.index(max(weights))] += length - sum(found)
    return tuple(found)


def _numbers(option: str, words: str, separator: str) -> tuple[int, ...]:
    found = words.split(separator)
    if not all(word.isdecimal() and int(word) for word in found):
        raise refuse(option, words, f"numbers of 1 or more, separated by {separator!r}", "Correct them.")
    return tuple(map(int, found))
