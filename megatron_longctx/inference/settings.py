"""What an engine is told beside its model and its cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ..config import check_value
from ..errors import refuse

T = TypeVar("T")


@dataclass(frozen=True)
class EngineSettings:
    """How sessions share the ranks.

    prefill_chunk: most new tokens of a sequence computed at once; None for all that `rank_tokens` lets through. evict:
    when the cache is full, forget what the least recently used sessions have cached (it is computed again when they go
    on) instead of refusing. exact: prompts are computed in calls of their own, whose results depend on the session's
    tokens alone, bit for bit: not on other sessions, nor on whether a prefix of whole chunks was found in the cache;
    single tokens that go on from there are still computed together. decode, cuda_graphs: see `config.InferenceConfig`.
    rank_tokens: most new tokens that a rank computes at once, of all sequences together, but for a chunk that is
    larger; it bounds the memory of activations (86 KB a token with the MLP of Llama 3 8B).

    Raises:
        ValueError: a value that cannot be, or exact without a chunk.
    """

    prefill_chunk: int | None = None
    evict: bool = False
    exact: bool = False
    decode: str = "auto"
    cuda_graphs: str = "auto"
    rank_tokens: int = 65536

    def __post_init__(self) -> None:
        for name in ("prefill_chunk", "decode", "cuda_graphs"):
            check_value(f"inference.{name}", getattr(self, name))
        if not isinstance(self.rank_tokens, int) or self.rank_tokens < 1:
            raise refuse("rank_tokens", self.rank_tokens, "an integer of 1 or more", "Correct it.")
        if self.exact and self.prefill_chunk is None:
            raise refuse("inference.prefill_chunk", None, "a number with inference.exact_reuse=true", "Set it to 2048.")

    def batches(self, new: Mapping[T, list[int]], todo: Mapping[T, list[int]]) -> list[list[T]]:
        """Which sessions are computed together."""
        if not self.exact:
            return [list(todo)]
        going_on = [session for session, tokens in todo.items() if len(tokens) == 1 and not new[session]]
        alone = [[session] for session in todo if session not in going_on]
        return [*alone, going_on] if going_on else alone

    def passes(self, counts: Mapping[T, int], n: int) -> Iterator[dict[T, int]]:
        """How many tokens of which sessions are computed in one pass after the other, of n ranks."""
        most = self.rank_tokens * n
        size = self.prefill_chunk or most
        for start in range(0, max(counts.values()), size):
            taken: dict[T, int] = {}
            room = most
            for session, count in counts.items():
                now = min(count - start, size)
                if now <= 0:
                    continue
                if taken and now > room:
                    yield taken
                    taken, room = {}, most
                taken[session] = now
                room -= now
            yield taken
