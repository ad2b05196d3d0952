"""Replicated decode: a few new tokens through the whole model on every rank, on GPUs as one replayed CUDA graph.

The hidden states of a few tokens cost little next to reading the model's weights, which every rank does anyway. Every
rank therefore computes all of them. Nothing is gathered before attention, and each layer has one exchange: of the
partial results that every rank computed over its own part of the cache. ("Context Parallelism for Scalable
Million-Token Inference", Algorithm 4, passes queries around a ring and results back instead.)

A token is a row. A layer stores keys and values of all rows before it attends, and a row sees its sequence's tokens up
to itself. The tokens of a prompt are neighbouring rows, so that a tile of several queries reads keys once.
"""

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import InferenceConfig
from ..core.comm import gather_objects
from ..core.errors import refuse
from .batch import ScheduledChunk
from .cache_manager import CacheManager
from .cached_attention import CachedAttention, CachedModel
from .paged import FUSED_DTYPES, Pages, has_fused_kernels, max_queries_per_tile
from .session import NOT_FINITE, NextToken, RunningToken
from .step_inputs import StepIds, StepInputs

logger = logging.getLogger(__name__)

MAX_ROWS = 128
"""The most sequences in one step. Beyond this, on an H100 or H200 in bf16, matrix products of decode take longer than
reading the model's weights, and computing them on every rank is no longer free."""
MAX_PROMPT_ROWS = 4096
"""The most rows of prompts in one step that is captured. `warm_up` measures up to how many of them steps take less time
than plans."""
_UNMEASURED_PROMPT_ROWS = 1024
"""The same until it is measured, and without graphs. With Llama 3 8B's shape on H200s a step of so many rows takes 28
ms, and plans keep the host of even a short prompt busy for 30 to 110 ms."""
MAX_PROMPT_PAIRS = 512 * 131_072
"""The most pairs of a row and a token that it may see in such a step. With so many, prompts of 511 tokens take less
time this way than by plans (analysis/results/inference_rows_h200.md), whose attention is faster."""
_EAGER = 2
"""The steps that run before one is captured: they compile and choose kernels and set up communicators."""
_ENDS, _TOKEN, _POSITION, _PLACES = range(4)
"""The fields of a step's inputs. From `_PLACES` on there are a slot and a count for the layers without windows, the
same for those with one, then a number of skipped tokens for every window, and at last the rows of recurrent states that
are read and written, if there are any."""


class Decoder:
    """The replicated path for batches of single tokens and of short prompts; `takes` says which it computes.

    Rows are padded to one of a few sizes, so that there are at most 8 graphs for single tokens, 28 for prompts and 8
    for drafts. They share their memory. Padding rows see no tokens, and their keys and values go to an unused slot.

    Attributes:
        running: the tokens of the last `launch`.
        has_graphs: whether steps are replayed from graphs.
        max_prompt: the most rows of prompts in one step; 0 if they are left to plans. All ranks have the same.
        max_drafted: the most sequences whose drafts are computed in one step; 0 without `inference.speculate`.

    Args:
        mode: `inference.mode`, which `decode=auto` depends on.

    Raises:
        ValueError: CUDA graphs are required and cannot be used.
    """

    def __init__(self, model: CachedModel, manager: CacheManager, settings: InferenceConfig, mode: str) -> None:
        self._model, self._cache_manager, self._attention = model, manager, model.attention
        self._max_sequences: float = MAX_ROWS
        if settings.decode == "plan" or (settings.decode == "auto" and mode != "auto"):
            self._max_sequences = 0
        elif settings.decode == "replicated":
            self._max_sequences = float("inf")  # in several steps
        self.has_graphs = self._max_sequences > 0 and _use_graphs(settings.cuda_graphs, self._attention)
        self._waits = not self.has_graphs and settings.decode != "replicated"
        # Without graphs the host's time dominates. Plans divide its work among the ranks as far as it computes.
        # Recurrent layers take a row for a token of another sequence.
        self._states = self._attention.states
        takes_prompts = self._states is None and (self.has_graphs or settings.decode == "replicated")
        self.max_prompt = _UNMEASURED_PROMPT_ROWS if takes_prompts else 0
        self._most_rows = MAX_PROMPT_ROWS if takes_prompts and self.has_graphs else self.max_prompt
        if self._max_sequences:
            self._attention.allocate_merge(max(MAX_ROWS, self._most_rows))
        shape = self._attention.shape
        self._tile = max_queries_per_tile(shape.num_heads, shape.num_kv_heads)
        self.running: StepIds | None = None
        self._older: StepIds | None = None  # of the launch before
        self._captured: dict[tuple[int, int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._draft_tile = min(self._tile, 1 << settings.speculate.bit_length())
        self._draft_rows = -(-(1 + settings.speculate) // self._draft_tile) * self._draft_tile
        self.max_drafted = MAX_ROWS // self._draft_rows if settings.speculate and self._max_sequences else 0
        tiles = max(MAX_ROWS, self._most_rows // self._tile) if self._max_sequences else 0
        self._windows = tuple(window for window in shape.distinct_windows if window is not None)
        self._unused = self._attention.unused_slots[: 1 + bool(self._windows)]
        self._skipped = _PLACES + 2 * len(self._unused)
        states = [] if self._states is None else [0, self._states.unused_row]
        places = chain.from_iterable((slot, 0) for slot in self._unused)
        self._no_row = 0, 0, *places, *[0] * len(self._windows), *states  # sees nothing, and nobody sees it
        num_fields = 1 + len(self._no_row)
        pages = [manager.groups[0].num_pages, manager.groups[-1].num_pages][: len(self._unused)]
        most = max(MAX_ROWS, self._most_rows)
        self._inputs = StepInputs(self._attention.device, tiles, pages, num_fields, MAX_ROWS, most)
        with torch.inference_mode(False):  # of the latest replay, because graphs do not share what they return
            self._logits = torch.empty(MAX_ROWS * self.has_graphs, model.vocab_size, device=self._attention.device)
        why = f"inference.decode={settings.decode}" + (f", inference.mode={mode}" if settings.decode == "auto" else "")
        logger.info("decode: %s (%s)", self.name, why)

    @property
    def name(self) -> str:
        """How the decoder computes batches, for logs."""
        if not self._max_sequences:
            return "by plans"
        return "replicated, CUDA graphs" if self.has_graphs else "replicated"

    @property
    def max_launched(self) -> int:
        """The most sequences of a `launch`; 0 where a step is not launched before the one before has ended."""
        waits = self._waits or self._states is not None or self.max_drafted
        return 0 if waits else int(min(self._max_sequences, MAX_ROWS))

    @property
    def prompt_sizes(self) -> tuple[int, ...]:
        """The numbers of rows that steps for prompts may have, in ascending order."""
        return tuple(sorted({_padded(rows + 1, self._tile) for rows in range(1, self._most_rows)}))

    def batch_sizes(self, sequences: int) -> tuple[int, ...]:
        """Return the most sequences of each graph that decodes 2 to `sequences` of them; empty without graphs."""
        most = min(sequences, MAX_ROWS)
        return tuple(min(2 << i, most) for i in range((most - 1).bit_length())) if self.has_graphs else ()

    def drafted_sizes(self, sequences: int) -> tuple[int, ...]:
        """Return the most sequences of each size of step for drafts, of 1 to `sequences` of them."""
        most = {_padded(count * self._draft_rows, self._draft_tile): count for count in range(1, self.max_drafted + 1)}
        return tuple(sorted({min(count, sequences) for count in most.values()})) if self.has_graphs else ()

    def takes(self, chunks: Sequence[ScheduledChunk], mode_is_set: bool = False) -> bool:
        """Whether the decoder computes these chunks: single tokens, or prompts whose rows fit into one step.

        Args:
            mode_is_set: whether the user has set a mode, which then applies to prompts.
        """
        if _are_single(chunks):
            return len(chunks) <= self._max_sequences
        rows = [-(-chunk.new // self._tile) * self._tile for chunk in chunks]
        pairs = sum(count * (chunk.cached + chunk.new) for count, chunk in zip(rows, chunks, strict=True))
        fits = len(chunks) <= MAX_ROWS and sum(rows) <= self.max_prompt and pairs <= MAX_PROMPT_PAIRS
        return fits and not mode_is_set

    def __call__(self, chunks: Sequence[ScheduledChunk], texts: Sequence[Sequence[int]]) -> list[NextToken]:
        """Run the model over the new tokens of every chunk. Collective over the ranks, which all know all chunks."""
        if not _are_single(chunks):
            return self._step(chunks, texts, self._tile)
        next_tokens: list[NextToken] = []
        for start in range(0, len(chunks), MAX_ROWS):
            next_tokens += self._step(chunks[start : start + MAX_ROWS], texts[start : start + MAX_ROWS], 1)
        return next_tokens

    def verify(self, chunks: Sequence[ScheduledChunk], texts: Sequence[Sequence[int]]) -> list[list[NextToken]]:
        """Run the model over a token of every sequence and its draft; return what follows each of these tokens."""
        found = iter(self._step(chunks, texts, self._draft_tile, every=True))
        return [list(islice(found, len(text))) for text in texts]

    def launch(self, chunks: Sequence[ScheduledChunk], tokens: Sequence[int]) -> list[RunningToken]:
        """Launch a step of one token of every sequence, and do not wait for it.

        Args:
            tokens: up to MAX_ROWS; -1 - r for the likeliest token of row r of the launch before, which may still run.
        """
        if self._older is not None:
            self._older()  # it has read what is staged now
        size = self._stage(chunks, [[token] for token in tokens], 1)
        _, ids = self._run(size, 1, size)
        ids = ids[: len(chunks)]
        torch.clamp(ids, min=0, out=self._inputs.latest[: len(chunks)])  # what follows NOT_FINITE is not used
        self._older, self.running = self.running, StepIds(ids)
        self._attention.on_wait()
        return [RunningToken(self.running, row) for row in range(len(chunks))]

    def release(self) -> None:
        """Drop the graphs, which hold messages of process groups: the groups cannot be destroyed before."""
        if self._captured:
            torch.cuda.synchronize(self._attention.device)
        self._captured.clear()

    def _step(
        self, chunks: Sequence[ScheduledChunk], texts: Sequence[Sequence[int]], tile: int, every: bool = False
    ) -> list[NextToken]:
        size = self._stage(chunks, texts, tile, every)
        count = sum(map(len, texts)) if every else len(chunks)
        logits, ids = self._run(size, tile, size if every else min(size // tile, MAX_ROWS))
        if every or _are_single(chunks):
            self._attention.on_wait()
        greedy = ids.tolist()[:count]
        if self._attention.rank:  # the logits of one rank suffice, so that all tokens are drawn from the same numbers
            return [NextToken(None, token) for token in greedy]
        kept = logits[:count].clone()  # a replay overwrites the results of the one before
        return [NextToken(row, token) for row, token in zip(kept, greedy, strict=True)]

    def _run(self, size: int, tile: int, ends: int) -> tuple[Tensor, Tensor]:
        return (self._replay if self.has_graphs else self._compute)(size, tile, ends)

    def _stage(
        self, chunks: Sequence[ScheduledChunk], texts: Sequence[Sequence[int]], tile: int, every: bool = False
    ) -> int:
        """Send the inputs of a step to the device, and return its rows."""
        columns: list[list[int]] = [[] for _ in self._no_row]
        ends: list[int] = []  # the rows whose logits are computed: every one, or the last of each chunk
        for chunk, text in zip(chunks, texts, strict=True):
            first = len(columns[0]) // tile
            self._add_rows(columns, chunk, text)
            last = len(columns[0])
            ends += range(last - (len(text) if every else 1), last)
            self._pad(columns, last + -last % tile)
            pages = [self._cache_manager.shards(chunk.session)[self._attention.rank].pages]
            if chunk.windowed is not None:  # later chunks may have left some of them already
                pages.append(chunk.windowed.pages(self._attention.rank, self._cache_manager.page_tokens))
            elif self._windows:
                pages *= 2
            for index in range(first, len(columns[0]) // tile):
                self._inputs.set_pages(index, pages)
        size = _padded(len(columns[0]), tile)
        self._pad(columns, size)
        self._inputs.send([ends + [0] * (size - len(ends)), *columns])
        return size

    def _pad(self, columns: Sequence[list[int]], size: int) -> None:
        for column, number in zip(columns, self._no_row, strict=True):
            column += [number] * (size - len(column))

    def _add_rows(self, columns: Sequence[list[int]], chunk: ScheduledChunk, text: Sequence[int]) -> None:
        """Add the fields of every new token: its id and position; for every group of layers its slot on this rank and
        the number of its sequence's tokens that are there up to it; how many of these precede each window; and the rows
        of recurrent states.

        The counts come from the chunk, because the cache manager may have placed later chunks already."""
        rank, new = self._attention.rank, range(chunk.cached, chunk.cached + chunk.new)
        tokens, places, *others = columns
        tokens += text
        places += new
        groups = (chunk, chunk.windowed or chunk)[: len(self._unused)]
        for number, (group, unused) in enumerate(zip(groups, self._unused, strict=True)):
            slots, counts = others[2 * number : 2 * number + 2]
            own, held, at = chain.from_iterable(group.new_slots[rank]), sum(map(len, group.cached_slots[rank])), 0
            for span in (*chunk.new_spans[rank], range(chunk.new, chunk.new)):
                slots += [unused] * (span.start - at)
                counts += [held] * (span.start - at)
                slots += islice(own, len(span))
                counts += range(held + 1, held + 1 + len(span))
                held, at = held + len(span), span.stop
        del others[: 2 * len(groups)]
        if self._windows:
            positions = *groups[-1].cached_positions[rank], *chunk.new_positions(rank)
            total = sum(map(len, positions))
            for window in self._windows:
                others.pop(0).extend(total - _count_from(positions, at - window) for at in new)
        for state, row in zip(
            others, () if self._states is None else self._states.rows.moves[chunk.session], strict=True
        ):
            state += [row] * chunk.new

    @torch.no_grad()
    def _compute(self, size: int, tile: int, ends: int) -> tuple[Tensor, Tensor]:
        """Return logits `[ends, vocabulary]`, as many rows as can be wanted, and rank 0's likeliest tokens."""
        fields, tiles = self._inputs.fields(size), size // tile
        slots, counts = (fields[_PLACES + i : self._skipped : 2] for i in range(2))
        page_tokens = self._cache_manager.page_tokens
        tables = [
            Pages(table[:tiles], count, page_tokens, tile)
            for table, count in zip(self._inputs.pages, counts, strict=True)
        ]
        pages: dict[int | None, Pages] = {None: tables[0]}
        for window, skipped in zip(self._windows, fields[self._skipped :], strict=False):
            pages[window] = replace(tables[-1], window_starts=skipped)
        self._attention.begin_replicated(pages, (slots[0], slots[-1]))
        if self._states is not None:
            self._states.begin_replicated(*fields[-2:])
        tokens = fields[_TOKEN]
        if tile == 1:
            before = self._inputs.latest[(-1 - tokens).clamp_(0, MAX_ROWS - 1)]
            tokens = torch.where(tokens < 0, before, tokens)
        logits = self._model.logits(tokens, fields[_POSITION], fields[_ENDS, :ends])
        ids = torch.where(torch.isfinite(logits).all(-1), logits.argmax(-1), NOT_FINITE)
        if self._attention.world > 1:
            dist.broadcast(ids, group=self._attention.group, group_src=0)
        return logits, ids

    def _replay(self, size: int, tile: int, ends: int) -> tuple[Tensor, Tensor]:
        key = size, tile, ends
        if key not in self._captured:
            self._captured[key] = self._capture(*key)
        graph, ids = self._captured[key]
        graph.replay()
        return self._logits[:ends], ids

    def _capture(self, size: int, tile: int, ends: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a step. A step may run any number of times with the same results, so this batch's own warms up."""
        logger.info("decode: capturing a step of %d rows, %d rows of a sequence per tile", size, tile)
        aside, now = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(now)
        with torch.cuda.stream(aside):
            for _ in range(_EAGER):
                self._compute(size, tile, ends)
        now.wait_stream(aside)
        torch.cuda.synchronize(self._attention.device)
        graph = torch.cuda.CUDAGraph()
        pool = next((captured.pool() for captured, *_ in self._captured.values()), None)
        # Garbage is collected before the capture and not during it, because memory that peers read cannot be freed
        # while a stream is captured. Other threads may use CUDA meanwhile, as NCCL's watchdog does.
        gc.collect()
        enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits, ids = self._compute(size, tile, ends)
                self._logits[:ends].copy_(logits)
        finally:
            if enabled:
                gc.enable()
        return graph, ids


def _count_from(positions: Sequence[range], first: int) -> int:
    """Return how many of these ascending positions are at least `first`."""
    count = 0
    for span in reversed(positions):
        if span.start < first:
            return count + len(span[-(-(first - span.start) // span.step) :])
        count += len(span)
    return count


def _padded(rows: int, tile: int) -> int:
    """Return the rows of the step for `rows` rows: for single tokens a power of two; for prompts, whose rows cost
    computation, a multiple of an eighth of it and of 16."""
    power = 1 << (rows - 1).bit_length()
    step = max(16, power // 8) if tile > 1 else power
    return -(-rows // step) * step


def _are_single(chunks: Sequence[ScheduledChunk]) -> bool:
    return all(chunk.new == 1 for chunk in chunks)


def _use_graphs(wanted: str, attention: CachedAttention) -> bool:
    """Whether to replay steps from graphs. All ranks agree, because prompts take another path otherwise. Collective.

    Raises:
        ValueError: graphs are required and some rank cannot use them; raised on all ranks.
    """
    if wanted == "false":
        return False
    reasons = gather_objects(attention.group, why_no_graphs(attention))
    why = next((reason for reason in reasons if reason is not None), None)
    if why is not None and wanted == "true":
        raise refuse("inference.cuda_graphs", wanted, f"auto or false, because {why}", "Set it to auto.")
    if why is not None:
        logger.info("decode: no CUDA graphs, because %s", why)
    return why is None


def why_no_graphs(attention: CachedAttention) -> str | None:
    """Return why this rank cannot capture steps, or None if it can."""
    if attention.device.type != "cuda":
        return f"the model is on {attention.device.type}"
    if attention.shape.dtype not in FUSED_DTYPES:
        return f"no kernel of ours attends in {attention.shape.dtype}"
    if not has_fused_kernels():
        return "triton cannot be imported"
    if attention.world > 1 and "nccl" not in dist.get_backend(attention.group):
        return f"messages of {dist.get_backend(attention.group)} cannot be captured"
    return None
