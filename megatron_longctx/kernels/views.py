"""The two views between the token-first layout of this project and the heads-first layout of the ATen ops."""

from torch import Tensor


def heads_first(x: Tensor) -> Tensor:
    """`[s, b, h, d]` seen as `[b, h, s, d]`, no copy."""
    return x.permute(1, 2, 0, 3)


def token_first(x: Tensor) -> Tensor:
    """`[b, h, s, d]` seen as `[s, b, h, d]`, no copy."""
    return x.permute(2, 0, 1, 3)
