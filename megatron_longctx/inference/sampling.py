"""Sampling: a token from logits, greedy or drawn, and log-probabilities; the same on any number of ranks.

Those of prompts come from blocks of logits, so that memory does not grow with them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Integral
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.comm import all_reduce_sum
from ..core.errors import refuse
from .batch import ScheduledChunk

_INTEGERS = {"max_new_tokens": 0, "top_k": 1, "min_tokens": 0, "logprobs": 0, "prompt_logprobs": 0}
"""Fields that count something, with the least that each may be."""
_BOUNDS = {
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}


@dataclass(frozen=True)
class Sampling:
    """How tokens of a sequence are drawn, and when it ends.

    Logits are changed in this order: `repetition_penalty`, the other penalties, `logit_bias`, `min_tokens`, `grammar`.

    Attributes:
        max_new_tokens: the most tokens to generate.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among this many of the likeliest tokens; None for all.
        top_p: draw among the fewest likeliest tokens whose probabilities add up to this.
        seed: the seed of the draws. A draw depends only on the seed, the sequence's `stream` and the token's number in
            the sequence: neither on other sequences in the batch nor on the ranks.
        stop: tokens that end the sequence; they are not returned.
        min_p: draw among tokens with at least this part of the likeliest one's probability, before top-k and top-p.
        min_tokens: no stop token is drawn before there are this many.
        presence_penalty, frequency_penalty: subtracted from the logits of generated tokens, once, and for each
            occurrence.
        repetition_penalty: divides positive logits of tokens of prompt and answer, and multiplies negative ones.
        logit_bias: pairs of a token and a number that is added to its logit.
        grammar: what the text must be, for the engine's `grammars`; None for any text.
        logprobs, prompt_logprobs: of every generated token, and of every token of the prompt, the log-probability,
            its rank, and this many of the likeliest tokens. They are the model's own, before any of the above.

    Raises:
        ValueError: a value is out of range, or a number of tokens is not an integer.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[int, ...] = ()
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        # Only one rank draws. If it failed then, the others would wait for it.
        for name, least in _INTEGERS.items():
            value = getattr(self, name)
            if value is None and name not in ("max_new_tokens", "min_tokens"):
                continue
            if not isinstance(value, Integral):
                raise refuse(name, repr(value), "an integer", "Round it.")
            if value < least:
                raise refuse(name, value, f"{least} or more", "Raise it, or leave it out.")
        for name, (low, high) in _BOUNDS.items():
            if not low <= getattr(self, name) <= high:
                raise refuse(name, getattr(self, name), f"from {low} to {high}", "Leave it out to change nothing.")
        if not 0 <= self.temperature < math.inf:
            raise refuse("temperature", self.temperature, "0 (greedy) or a positive number", "1 samples as trained.")
        if not 0 < self.top_p <= 1:
            raise refuse("top_p", self.top_p, "above 0 and at most 1", "1 draws among all tokens.")
        if self.min_tokens > self.max_new_tokens:
            raise refuse("min_tokens", self.min_tokens, f"at most max_tokens={self.max_new_tokens}", "Lower it.")
        if self.grammar is not None and (self.min_tokens or not self.stop):
            raise refuse("grammar", "", "a stop token that may come as soon as it is complete", "Leave min_tokens out.")

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is taken."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.logit_bias or self.min_tokens or self.grammar is not None)


def sample(
    logits: Tensor,
    sampling: Sampling,
    stream: int,
    step: int,
    prompt: Collection[int] = (),
    answer: Sequence[int] = (),
    allowed: Tensor | None = None,
) -> int:
    """Return the next token.

    Args:
        logits: `[vocabulary]`, finite.
        stream: the number of the sequence among those that share the seed.
        step: the number of the token in its sequence.
        prompt, answer: the tokens before it, for penalties.
        allowed: bool `[vocabulary]`, the tokens that the grammar allows.
    """
    if sampling.adjusts:
        logits = _adjusted(logits, sampling, prompt, answer, allowed)
    if sampling.temperature == 0:
        return int(logits.argmax())
    # On the CPU in fp64: a draw is then the same on every device.
    logits = logits.detach().cpu().double()
    weights = torch.exp((logits - logits.max()) / sampling.temperature)  # of numbers up to 0, at any temperature
    weights = torch.where(weights < sampling.min_p, 0.0, weights)  # the largest is 1
    if sampling.top_k is not None or sampling.top_p < 1:
        weights = _likeliest(weights, logits, sampling)
    # In the order of token ids, logits that other parallel sizes round otherwise move the bounds of a draw no more than
    # themselves. In the order of logits, two nearly equal ones would change places.
    sums = weights.cumsum(0)
    total = float(sums[-1])
    draw = random.Random(f"{sampling.seed}/{stream}/{step}").random() * total
    return int(torch.searchsorted(sums, min(draw, math.nextafter(total, 0)), right=True))


def not_finite() -> ValueError:
    """Return the error for logits that are not finite."""
    return ValueError("logits are not finite: expected numbers. Check the checkpoint, or use train.precision=fp32.")


def no_token() -> ValueError:
    """Return the error for a grammar in which nothing can follow an answer."""
    return ValueError(
        "grammar: no token may follow the answer here: expected a grammar in which every text has an end."
    )


def _adjusted(
    logits: Tensor, sampling: Sampling, prompt: Collection[int], answer: Sequence[int], allowed: Tensor | None
) -> Tensor:
    """Return the logits after penalties, biases and what must not be drawn. fp32, as in the library transformers."""
    logits = logits.float().clone()

    def ids(tokens: Collection[int]) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.int64, device=logits.device)

    if sampling.repetition_penalty != 1:
        seen = ids({*prompt, *answer})
        before, factor = logits[seen], sampling.repetition_penalty
        logits[seen] = torch.where(before < 0, before * factor, before / factor)
    if sampling.presence_penalty or sampling.frequency_penalty:
        generated, counts = ids(answer).unique(return_counts=True)  # type: ignore[no-untyped-call]
        logits[generated] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if sampling.logit_bias:  # in one operation: on a GPU, each of up to 1,024 would take a launch in every token
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        logits.index_add_(0, ids(tokens), logits.new_tensor(biases))
    if len(answer) < sampling.min_tokens:
        logits[ids(sampling.stop)] = -math.inf
    return logits if allowed is None else logits.masked_fill(~allowed.to(logits.device), -math.inf)


def _likeliest(weights: Tensor, logits: Tensor, sampling: Sampling) -> Tensor:
    """Set the weights that top-k or top-p leave out to 0; of equally likely tokens the larger ids go first."""
    order = logits.sort(descending=True, stable=True).indices[: sampling.top_k]
    kept = weights[order]
    before = kept.cumsum(0) - kept
    order = order[before < sampling.top_p * kept.sum()] if sampling.top_p < 1 else order
    return torch.zeros_like(weights).index_copy_(0, order, weights[order])


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
