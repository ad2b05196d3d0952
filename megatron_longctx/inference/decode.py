"""Few new tokens, through the whole model in one replayed CUDA graph: one of each of several sequences (decode), or
short prompts.

Hidden states of so few tokens are cheap next to the model's weights, which a rank reads whatever it computes. So every
rank computes all of them: nothing is gathered before attention, and each layer has one exchange, of what every rank has
found in its own part of the cache. ("Context Parallelism for Scalable Million-Token Inference", Algorithm 4, passes
queries around a ring and results back instead.)

A token is a row. A layer stores keys and values of all rows before it attends, and a row sees as many of its sequence's
as there are up to it. Rows of a prompt lie side by side, so that keys are read once for several.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import from_all, from_first
from ..errors import refuse
from ..kernels.paged import FUSED_DTYPES, Pages, has_fused_kernels, max_queries_per_tile
from .cache_manager import CacheManager, ScheduledChunk, slots_of
from .cached_attention import CachedAttention, CachedModel, Rows
from .session import NOT_FINITE, NextToken
from .settings import EngineSettings

logger = logging.getLogger(__name__)

MOST_ROWS = 128
"""Most sequences that are decoded in one step. With more the model's matrix products take longer than reading its
weights does, on an H100 or H200 in bf16, and computing them on every rank no longer comes free."""
MOST_PROMPT_ROWS = 512
"""Most rows of prompts in one step. Over 131,072 tokens on one H200, prompts of 13 to 511 tokens take less time so than
by plans (analysis/results/inference_rows_h200.md)."""
_EAGER = 2
"""Steps that run as they are before one is captured: kernels are compiled and chosen, communicators are set up."""
_ENDS, _TOKEN, _POSITION, _SLOT, _COUNT, _SKIPPED = range(6)  # and one more of each window but the first


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    ids: Tensor


class Decoder:
    """Runs batches of single tokens and of short prompts, or leaves them to plans.

    Rows are padded to one of few sizes, so that there are 8 graphs at most of single tokens, and 16 of prompts. They
    share their memory. Missing rows have no tokens, and their keys and values go nowhere.

    Args:
        mode: `inference.mode`, which `decode=auto` goes by.

    Raises:
        ValueError: CUDA graphs asked for where there can be none.
    """

    def __init__(self, model: CachedModel, manager: CacheManager, settings: EngineSettings, mode: str) -> None:
        self._model, self._cache_manager, self._attention = model, manager, model.attention
        self._most: float = MOST_ROWS
        if settings.decode == "plan" or (settings.decode == "auto" and mode != "auto"):
            self._most = 0
        elif settings.decode == "replicated":
            self._most = float("inf")  # in several steps
        self._graphs = self._most > 0 and _use_graphs(settings.cuda_graphs, self._attention)
        # Without graphs the host's work counts, which plans divide among the ranks as far as it is computing.
        self._prompts = self._graphs or settings.decode == "replicated"
        if self._most:
            self._attention.expect_rows(max(MOST_ROWS, self.most_prompt))
        self._together = max_queries_per_tile(self._attention.shape.num_heads, self._attention.shape.num_kv_heads)
        self._captured: dict[tuple[int, int], _Captured] = {}
        places = max(MOST_ROWS, self.most_prompt // self._together) if self._most else 0
        self._windows = tuple(window for window in self._attention.shape.kinds if window is not None)
        lines = _SKIPPED + len(self._windows)
        self._tables = _Tables(self._attention.device, places, manager.pages_per_rank, lines)
        why = f"inference.decode={settings.decode}" + (f", inference.mode={mode}" if settings.decode == "auto" else "")
        logger.info("decode: %s (%s)", self.name, why)

    @property
    def name(self) -> str:
        """How batches that it takes are computed."""
        if not self._most:
            return "by plans"
        return "replicated, CUDA graphs" if self._graphs else "replicated"

    @property
    def most_prompt(self) -> int:
        """Tokens of a prompt that it takes alone; 0 if prompts are left to plans."""
        return MOST_PROMPT_ROWS if self._prompts else 0

    @property
    def prompt_sizes(self) -> tuple[int, ...]:
        """Rows of the steps that take prompts, in ascending order."""
        return tuple(sorted({_padded(rows + 1, self._together) for rows in range(1, self.most_prompt)}))

    def batch_sizes(self, sequences: int) -> tuple[int, ...]:
        """Of the graphs that decode 2 to so many sequences, how many each serves at most; empty without graphs."""
        most = min(sequences, MOST_ROWS)
        return tuple(min(2 << i, most) for i in range((most - 1).bit_length())) if self._graphs else ()

    def takes(self, chunks: Sequence[ScheduledChunk], named: bool = False) -> bool:
        """Single tokens; or prompts, if all their rows fit into one step, unless a mode is `named` for these."""
        if _are_single(chunks):
            return len(chunks) <= self._most
        rows = sum(-(-chunk.new // self._together) for chunk in chunks) * self._together
        return not named and rows <= self.most_prompt

    def __call__(self, chunks: Sequence[ScheduledChunk], texts: Sequence[Sequence[int]]) -> list[NextToken]:
        """One step of the model over every chunk's new tokens. Collective over the ranks, which all know all chunks."""
        if not _are_single(chunks):
            return self._step(chunks, texts, self._together)
        found: list[NextToken] = []
        for start in range(0, len(chunks), MOST_ROWS):
            found += self._step(chunks[start : start + MOST_ROWS], texts[start : start + MOST_ROWS], 1)
        return found

    def release(self) -> None:
        """Drop the graphs: process groups whose messages they hold cannot be destroyed before."""
        if self._captured:
            torch.cuda.synchronize(self._attention.device)
        self._captured.clear()

    def _step(self, chunks: Sequence[ScheduledChunk], texts: Sequence[Sequence[int]], together: int) -> list[NextToken]:
        rows: list[tuple[int, ...]] = []
        ends: list[int] = []  # by chunk, the row whose logits are computed
        for chunk, text in zip(chunks, texts, strict=True):
            first = len(rows) // together
            rows += self._rows(chunk, text)
            ends.append(len(rows) - 1)
            rows += [(0, 0, self._attention.nowhere, 0, *[0] * len(self._windows))] * (-len(rows) % together)
            pages = self._cache_manager.pages(chunk.session, self._attention.rank)
            for place in range(first, len(rows) // together):
                self._tables.hold(place, pages)
        size = _padded(len(rows), together)
        numbers = self._tables.staging(size)
        numbers.zero_()
        numbers[_SLOT] = self._attention.nowhere
        numbers[_TOKEN:, : len(rows)] = torch.tensor(rows).t()
        numbers[_ENDS, : len(ends)] = torch.tensor(ends)
        self._tables.send(size)
        logits, ids = self._replay(size, together) if self._graphs else self._compute(size, together)
        likeliest = ids.tolist()[: len(ends)]
        if self._attention.rank:  # one rank's are enough, and the same numbers for all that is drawn from them
            return [NextToken(None, token) for token in likeliest]
        kept = logits[: len(ends)].clone()  # a replay writes where the last one did
        return [NextToken(row, token) for row, token in zip(kept, likeliest, strict=True)]

    def _rows(self, chunk: ScheduledChunk, text: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Of each new token itself, its position, where this rank stores it, and how many of the sequence's tokens this
        rank has up to there, and in front of each window; the books may be further on."""
        rank = self._attention.rank
        here, slots = set(chain.from_iterable(chunk.new_spans(rank))), iter(slots_of(chunk.new_runs[rank]))
        held = sum(map(len, chunk.cached_runs[rank]))
        new = (range(span.start + chunk.cached, span.stop + chunk.cached) for span in chunk.new_spans(rank))
        positions, total = (*chunk.positions[rank], *new), held + len(here)
        for i, token in enumerate(text):
            held += i in here
            at = chunk.cached + i
            skipped = (total - _from(positions, at - window) for window in self._windows)
            yield token, at, next(slots) if i in here else self._attention.nowhere, held, *skipped

    @torch.no_grad()
    def _compute(self, size: int, together: int) -> tuple[Tensor, Tensor]:
        """Logits `[size / together, vocabulary]`, of every chunk and as many more as there can be, and the likeliest
        tokens as the first rank has them."""
        numbers, places = self._tables.numbers(size), size // together
        whole = Pages(self._tables.pages[:places], numbers[_COUNT], self._cache_manager.page_tokens, together)
        pages: dict[int | None, Pages] = {None: whole}
        for window, skipped in zip(self._windows, numbers[_SKIPPED:], strict=True):
            pages[window] = replace(whole, window_starts=skipped)
        self._attention.begin_rows(Rows(pages, numbers[_SLOT]))
        logits = self._model.logits(numbers[_TOKEN], numbers[_POSITION], numbers[_ENDS, :places])
        ids = torch.where(torch.isfinite(logits).all(-1), logits.argmax(-1), NOT_FINITE)
        return logits, from_first(self._attention.group, ids)

    def _replay(self, size: int, together: int) -> tuple[Tensor, Tensor]:
        kind = size, together
        if kind not in self._captured:
            self._captured[kind] = self._capture(*kind)
        captured = self._captured[kind]
        captured.graph.replay()
        return captured.logits, captured.ids

    def _capture(self, size: int, together: int) -> _Captured:
        """A step stores and computes the same however often it runs, so this batch's own serves to warm up."""
        logger.info("decode: capturing a step of %d rows, %d of a sequence together", size, together)
        aside, now = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(now)
        with torch.cuda.stream(aside):
            for _ in range(_EAGER):
                self._compute(size, together)
        now.wait_stream(aside)
        torch.cuda.synchronize(self._attention.device)
        graph = torch.cuda.CUDAGraph()
        pool = next((captured.graph.pool() for captured in self._captured.values()), None)
        with _capturing(graph, pool):
            logits, ids = self._compute(size, together)
        return _Captured(graph, logits, ids)


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture what is issued inside.

    Other threads may go on with CUDA meanwhile: NCCL's watchdog does. Garbage is collected before and not meanwhile,
    since memory that peers read cannot be given back while a stream is captured.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if enabled:
            gc.enable()


class _Tables:
    """What a step reads, in memory that stays: its numbers, so many lines of them, and at most `pages` pages of each of
    `places`, which are rows, or several together."""

    def __init__(self, device: torch.device, places: int, pages: int, lines: int) -> None:
        most = max(MOST_ROWS, MOST_PROMPT_ROWS)
        self._lines = lines
        with torch.inference_mode(False):  # they outlive the call
            self.pages = torch.zeros(places, pages, dtype=torch.int32, device=device)
            self._numbers = torch.zeros(lines * most, dtype=torch.int64, device=device)
            self._staging = torch.zeros(lines * most, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._held: list[list[int]] = [[] for _ in range(places)]

    def numbers(self, size: int) -> Tensor:
        """int64 `[lines, size]` on the device: by chunk, the row whose logits are computed; then by row its token,
        position, slot, how many tokens there are here up to it, and how many in front of each window."""
        return self._numbers[: self._lines * size].view(self._lines, size)

    def staging(self, size: int) -> Tensor:
        """The same on the host. A step has read its numbers when its tokens are known."""
        return self._staging[: self._lines * size].view(self._lines, size)

    def send(self, size: int) -> None:
        self.numbers(size).copy_(self.staging(size), non_blocking=True)

    def hold(self, place: int, pages: Sequence[int]) -> None:
        """See that a row of the table names these pages."""
        held = self._held[place]
        if held == pages:
            return
        same = len(held) if held == pages[: len(held)] else 0
        self.pages[place, same : len(pages)] = torch.tensor(pages[same:], dtype=torch.int32, device=self.pages.device)
        self._held[place] = list(pages)


def _from(positions: Sequence[range], first: int) -> int:
    """How many of these positions, which ascend, are `first` or behind it."""
    found = 0
    for span in reversed(positions):
        if span.start < first:
            return found + len(span[-(-(first - span.start) // span.step) :])
        found += len(span)
    return found


def _padded(rows: int, together: int) -> int:
    """Rows of the step that has so many: of single tokens a power of two, of prompts, whose rows cost computation, a
    multiple of an eighth of it and of 16."""
    power = 1 << (rows - 1).bit_length()
    step = max(16, power // 8) if together > 1 else power
    return -(-rows // step) * step


def _are_single(chunks: Sequence[ScheduledChunk]) -> bool:
    return all(chunk.new == 1 for chunk in chunks)


def _use_graphs(wanted: str, attention: CachedAttention) -> bool:
    """Whether steps are replayed from graphs: on all ranks or on none, since it decides what becomes of prompts.
    Collective.

    Raises:
        ValueError: they have to be and cannot; on all ranks.
    """
    if wanted == "false":
        return False
    reasons = from_all(attention.group, why_no_graphs(attention))
    why = next((reason for reason in reasons if reason is not None), None)
    if why is not None and wanted == "true":
        raise refuse("inference.cuda_graphs", wanted, f"auto or false, since {why}", "Set it to auto.")
    if why is not None:
        logger.info("decode: no CUDA graphs, since %s", why)
    return why is None


def why_no_graphs(attention: CachedAttention) -> str | None:
    """Why this rank cannot capture steps; None if it can."""
    if attention.device.type != "cuda":
        return f"the model is on {attention.device.type}"
    if attention.shape.dtype not in FUSED_DTYPES:
        return f"no kernel of ours attends in {attention.shape.dtype}"
    if not has_fused_kernels():
        return "triton cannot be imported"
    if attention.world > 1 and "nccl" not in dist.get_backend(attention.group):
        return f"messages of {dist.get_backend(attention.group)} cannot be captured"
    return None
