"""Supervised training: the cross-entropy of every label."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def sft(losses: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the token losses."""
    return losses.float()
