"""The next token of sequences whose logits lie on different ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..comm import sum_over
from .decode import NOT_FINITE
from .sampling import sample
from .session import Generation


def draw(generations: Sequence[Generation], group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    """Every generation's next token, drawn where its logits are, then known everywhere."""
    likeliest = [g.session.likeliest for g in generations if g.sampling.temperature == 0]
    known = [token for token in likeliest if token is not None]
    if len(known) == len(generations):
        return known
    ids = torch.zeros(len(generations), dtype=torch.int64, device=device)
    for i, generation in enumerate(generations):
        session = generation.session
        if session.logits is not None:
            try:
                ids[i] = sample(session.logits, generation.sampling, generation.stream, len(session.tokens))
            except ValueError:  # all ranks have to hear of it, not this one alone
                ids[i] = NOT_FINITE
    tokens: list[int] = sum_over(group, ids).tolist()
    return tokens
