"""How much of the prompts a round computes, so that long prompts delay nothing for longer than a stated time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..config import ModelConfig
from ..planner.flops import Work, training_flops

DECODE_SHARE = 0.25
"""The share of the time that running answers get while prompts are computed."""
_AIM = 0.375
"""The part of the stated time that a round takes. A short prompt may arrive when a round has just begun, wait for
`DECODE_SHARE`, and is computed in the next round: 2 1/3 rounds, 7/8 of the stated time, and a round's last layers."""
_FIRST = 512
_LEAST = 64
"""The tokens per rank of the first chunk, whose time is not known, and of any: fewer hardly take less time."""


@dataclass
class Pace:
    """The work on prompts in a round.

    Attributes:
        room: of all prompts in a round.
        work: of `new` tokens that follow `cached` ones, in the unit of `room`.
        least: the tokens that the first prompt of a round gets, whatever their work; a multiple of `tile`.
        tile: chunks end at a multiple of it or at the end of their prompt, if they have room for that.
        delay_s: the time by which long prompts may delay others; None for a room that stays as it is.
    """

    room: float
    work: Callable[[int, int], float] = lambda cached, new: new
    least: int = 1
    tile: int = 1
    delay_s: float | None = None
    _decode_s: float = 0.0  # of the latest round without prompts
    _owed_s: float = 0.0  # to running answers, before the next chunk of prompts
    _turn: bool = False  # whether the shortest prompts go first

    @classmethod
    def timed(cls, model: ModelConfig, ranks: int, delay_s: float, tile: int = 1) -> Pace:
        """Return a pace that follows measured times. Its unit is a FLOP, so that it foresees how cached tokens slow
        a chunk down. `tile` is of a rank."""
        work = prefill_flops(model)
        return cls(work(0, _FIRST * ranks), work, (_LEAST if tile == 1 else tile) * ranks, tile * ranks, delay_s)

    @property
    def owes_decode(self) -> bool:
        """Whether running answers go on alone before the next chunk of prompts."""
        return self._owed_s > 0

    def shares(self, prompts: Sequence[tuple[int, int]], whole: int | None = None) -> tuple[list[int], float]:
        """Return the tokens that each prompt gets in a round, and their work: half of it for the shortest prompts, the
        rest for the first.

        Args:
            prompts: of each, the tokens that are cached and those that are left, in the order in which they came.
            whole: the size of chunks that have to be whole. The shortest prompts and the first then take turns.
        """
        sizes, work = [0] * len(prompts), 0.0
        first = list(range(len(prompts)))
        shortest = sorted(first, key=lambda i: prompts[i][1])
        self._turn = not self._turn
        for room, order in ((self.room / 2, shortest), (self.room, shortest if whole and self._turn else first)):
            for i in order:
                (cached, left), before = prompts[i], self.work(prompts[i][0], sizes[i])
                size = self.fitting(cached, -(-left // (whole or 1)) * (whole or 1), room - work + before)
                size = size // (whole or 1) * (whole or 1)
                if room == self.room and i == order[0]:
                    size = max(size, whole or self.least - cached % self.tile)
                sizes[i] = max(sizes[i], min(size, left))
                work += self.work(cached, sizes[i]) - before
        return sizes, work

    def fitting(self, cached: int, most: int, room: float) -> int:
        """Return the largest number of tokens up to `most` whose work after `cached` ones fits into the room."""
        size = bisect_right(range(1, most + 1), room, key=partial(self.work, cached))
        end = (cached + size) // self.tile * self.tile
        return end - cached if size < most and end > cached else size

    def observe(self, seconds: float, work: float) -> None:
        """Note the time of a round with this work on prompts. All ranks note the same."""
        if self.delay_s is None:
            return
        if not work:
            self._decode_s = seconds
            self._owed_s -= seconds
            return
        self._owed_s = (DECODE_SHARE * seconds - self._decode_s) / (1 - DECODE_SHARE)
        aim = _AIM * self.delay_s
        if seconds > aim or work > self.room / 2:  # a smaller chunk does not tell how large one may be
            self.room = min(2 * self.room, work * aim / max(seconds, 1e-9))


def attention_tile(model: ModelConfig, tensor_size: int, device: torch.device) -> int:
    """Return a rank's new tokens that keep every processor of its GPU busy, once, with attention over a long cache.

    FlashAttention-4 gives a processor 128 queries of a key/value head (192 if heads are narrow), those of several heads
    together. 1.7 times as many tokens take as long as twice as many.
    """
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    kv_heads = max(1, model.num_kv_heads // tensor_size)
    queries = model.num_attention_heads // tensor_size // kv_heads  # of a token and a key/value head
    return max(1, processors // kv_heads * (192 if model.kv_channels <= 96 else 128) // queries)


def prefill_flops(model: ModelConfig) -> Callable[[int, int], float]:
    """Return the FLOPs of a forward pass of `new` tokens that follow `cached` ones, without the LM head, as a function
    of `cached` and `new`. They are linear in tokens and pairs, so the model is gone through once."""
    of_token, of_pair = (training_flops(model, 0, one).causal // 3 for one in (Work(1, 0, 0), Work(0, 1, 0)))
    windows = [(math.inf if left is None else left, count) for (left, _), count in model.layer_windows.items()]

    def flops(cached: int, new: int) -> float:
        mean = cached + (new + 1) / 2
        return new * of_token + round(sum([count * new * min(mean, left) for left, count in windows])) * of_pair

    return flops
