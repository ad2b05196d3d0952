"""The layouts by name, each for any number of ranks and any length.

`unit` keeps every span a multiple of so many tokens (tensor parallelism with sequence parallelism splits a rank's
tokens once more, so its size must divide them); 1 leaves lengths free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .balanced import balanced
from .layout import Layout


def _cuts(length: int, pieces: int, unit: int) -> list[int]:
    """`pieces + 1` boundaries that cut `length` tokens into pieces differing by one unit at most."""
    units = length // unit
    return [units * i // pieces * unit for i in range(pieces + 1)]


def contiguous(n: int, length: int, unit: int = 1) -> Layout:
    """Rank r holds the r-th of n equal pieces."""
    cut = _cuts(length, n, unit)
    return Layout("contiguous", length, tuple((range(cut[r], cut[r + 1]),) for r in range(n)))


def zigzag(n: int, length: int, unit: int = 1) -> Layout:
    """2n pieces; rank r holds pieces r and 2n-1-r ("head-tail"): equal causal work for every rank."""
    cut = _cuts(length, 2 * n, unit)
    pieces = [range(cut[i], cut[i + 1]) for i in range(2 * n)]
    return Layout("zigzag", length, tuple((pieces[r], pieces[2 * n - 1 - r]) for r in range(n)))


def striped(n: int, length: int, unit: int = 1) -> Layout:
    """Token t is held by rank t mod n (Striped Attention).

    Raises:
        ValueError: with `unit` > 1, when the ranks' shares are not multiples of it.
    """
    if unit > 1 and length % (n * unit):
        step = n * unit
        raise ValueError(
            f"length {length}: the striped layout over {n} ranks with shares in units of {unit} needs a multiple of "
            f"{step}. Nearest: {length // step * step} or {(length // step + 1) * step}; or use zigzag."
        )
    return Layout("striped", length, tuple((range(r, length, n),) for r in range(n)))


def per_document(n: int, length: int, unit: int = 1, documents: Iterable[tuple[int, int, int]] | None = None) -> Layout:
    """Every document in zigzag over all ranks, as TransformerEngine and Megatron-Core lay packs out.

    Every rank has work on every document, so that all of them travel; `balanced` keeps short ones whole.

    Args:
        documents: as `balanced` takes them.

    Raises:
        ValueError: with `unit` > 1, a document that is no multiple of it.
    """
    spans: list[list[range]] = [[] for _ in range(n)]
    for start, stop, _ in [(0, length, 0)] if documents is None else documents:
        if (stop - start) % unit:
            raise ValueError(
                f"document of {stop - start} tokens: the per_document layout with shares in units of {unit} needs a "
                f"multiple of {unit}. Pad the documents, or use balanced."
            )
        cut = [start + at for at in _cuts(stop - start, 2 * n, unit)]
        for rank, mine in enumerate(spans):
            for piece in (rank, 2 * n - 1 - rank):
                mine.append(range(cut[piece], cut[piece + 1]))
    return Layout("per_document", length, tuple(tuple(filter(len, mine)) for mine in spans))


LAYOUTS: dict[str, Callable[..., Layout]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
    "balanced": balanced,
    "per_document": per_document,
}
_OF_DOCUMENTS = ("balanced", "per_document")


def build_layout(
    name: str, n: int, length: int, unit: int = 1, documents: Iterable[tuple[int, int, int]] | None = None
) -> Layout:
    """The layout `name` for `n` ranks and `length` tokens. documents: see `balanced`. Others than it and
    `per_document` do not look at them.

    Raises:
        ValueError: unknown name, `n` < 1, negative length, or a length that is not a multiple of `unit`.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout {name!r}: expected one of {', '.join(LAYOUTS)}. Choose one of these.")
    if n < 1:
        raise ValueError(f"n={n}: expected at least 1 rank. Set a positive context-parallel size.")
    if length < 0:
        raise ValueError(f"length={length}: expected 0 tokens or more. Give the global sequence length.")
    if unit < 1 or length % unit:
        raise ValueError(
            f"length={length}: expected a multiple of unit={unit} (the tensor-parallel size, under sequence "
            f"parallelism). Pad the sequence or turn sequence parallelism off."
        )
    return LAYOUTS[name](n, length, unit, *([documents] if name in _OF_DOCUMENTS else []))
