"""Log-probabilities of tokens. Those of prompts come from blocks of logits, so that memory does not grow with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.comm import all_reduce_sum
from .placement import ScheduledChunk


class Score(NamedTuple):
    """The log-probability of a token, its rank among all tokens from 1 on, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, token: int, row: Sequence[float], top: int) -> Score:
        """Return the score in a row of `score_table`, with the `top` likeliest of its tokens."""
        ids, logprobs = row[2 : 1 + len(row) // 2], row[1 + len(row) // 2 :]
        return cls(token, row[0], int(row[1]), tuple(zip(map(int, ids[:top]), logprobs[:top], strict=True)))


def score_table(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """Return log-probability and rank of each row's token, the `top` likeliest tokens and their log-probabilities.

    Args:
        logits: `[rows, vocabulary]`.
        tokens: int64 `[rows]`.

    Returns:
        fp64 `[rows, 2 + 2 * top]`, which holds every token's number exactly.
    """
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, tokens[:, None])
    values, ids = logprobs.topk(min(top, logprobs.shape[-1]), -1)
    rank = (logprobs > own).sum(-1, keepdim=True) + 1
    found = logits.new_zeros(len(tokens), 2 + 2 * top, dtype=torch.float64)
    found[:, :1], found[:, 1:2] = own, rank
    found[:, 2 : 2 + ids.shape[-1]], found[:, 2 + top : 2 + top + ids.shape[-1]] = ids, values
    return found


@dataclass
class PromptScores:
    """The scores of a prompt's tokens but the first, collected chunk by chunk as its session computes them.

    Attributes:
        top: see `Sampling.prompt_logprobs`.
    """

    prompt: Sequence[int]
    top: int
    found: list[Score] = field(default_factory=list)


class PromptScorer:
    """Scores the tokens of prompts in one pass of the model, from blocks of logits. Ranks have disjoint rows.

    Attributes:
        rows: int64, this rank's rows that have a next token in a prompt.

    Args:
        wanted: per chunk, where its scores go; None for none, but not for all.
        chunks: of the pass.
        starts: per chunk, the first of this rank's rows, followed by the number of rows.
        positions: int64 `[rows]`, on the host.
    """

    def __init__(
        self,
        wanted: Sequence[PromptScores | None],
        chunks: Sequence[ScheduledChunk],
        starts: Sequence[int],
        positions: Tensor,
        device: torch.device,
    ) -> None:
        self._top = max(each.top for each in wanted if each is not None)
        self._parts: list[tuple[PromptScores, Sequence[int]]] = []
        empty = torch.zeros(0, dtype=torch.int64)
        rows, labels, places, total = [empty], [empty], [empty], 0
        for chunk, (start, stop), each in zip(chunks, pairwise(starts), wanted, strict=True):
            if each is not None:
                following = each.prompt[chunk.cached + 1 : chunk.cached + chunk.new + 1]
                at = positions[start:stop] - chunk.cached
                has_label = at < len(following)  # the last token of a prompt has none
                rows.append(torch.arange(start, stop)[has_label])
                labels.append(torch.tensor(following, dtype=torch.int64)[at[has_label]])
                places.append(at[has_label] + total)
                self._parts.append((each, following))
                total += len(following)
        self.rows, self._labels, self._places = (torch.cat(each).to(device) for each in (rows, labels, places))
        self._table = torch.zeros(total, 2 + 2 * self._top, dtype=torch.float64, device=device)

    def add(self, start: int, logits: Tensor) -> None:
        """Take the logits `[b, vocabulary]` of `rows[start : start + b]`."""
        block = slice(start, start + len(logits))
        self._table[self._places[block]] = score_table(logits, self._labels[block], self._top)

    def finish(self, group: dist.ProcessGroup | None) -> None:
        """Add the pass's scores to each prompt, on all ranks. Collective."""
        table = iter(all_reduce_sum(group, self._table).tolist())
        for scores, tokens in self._parts:
            scores.found += [Score.of(token, next(table), scores.top) for token in tokens]
