"""What other packages take: bf16, and equal parts of every document."""

from __future__ import annotations

from megatron_longctx.layout import zigzag

from ..cases import Case


def check_parts(case: Case, parts: int) -> None:
    """Refuse documents that so many parts do not divide, and numbers that are not bf16.

    In fp32 ring-flash-attn 0.1.8 adds up in the very buffers that its next kernel call overwrites, and gives wrong
    gradients (seen); TransformerEngine refuses it.

    Raises:
        ValueError: says what was expected.
    """
    if case.element_bytes != 2:
        raise ValueError("fp32: expected bf16")
    wrong = [length for length in case.documents if length % parts]
    if wrong:
        raise ValueError(f"{wrong[0]} tokens: expected a multiple of {parts}")


def head_tail(case: Case, n: int, rank: int) -> list[int]:
    """The tokens of a rank that has a part from the front and one from the back of every document."""
    tokens: list[int] = []
    start = 0
    for length in case.documents:
        tokens += (start + token for token in zigzag(n, length).tokens(rank))
        start += length
    return tokens
