"""The states of recurrent layers beside the KV cache: their rows, and a pass of the model over them.

A state cannot be cut back as keys can, so a row is written by one pass and then only read. A pass reads the row of each
session and writes another one, which becomes the session's row when all passes are done. So a pass that fails changes
nothing, a step of a CUDA graph may run any number of times, and sessions that continue the same tokens share a row.

Every rank holds all rows. Of a prompt, ranks have contiguous parts: each computes its own from a zero state, then all
gather the last states and transfer matrices (`models.delta_rule`), so that every rank knows the state at the end.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.comm import all_gather_rows
from ..core.errors import refuse
from ..core.kernels.packed import to_device
from ..models import delta_rule
from .batch import Batch, ScheduledChunk
from .cache_manager import CacheFull, CacheManager

ROWS_OF_SEQUENCE = 3
"""The most rows that the passes over a chunk need for a sequence: one that is read, the one of a prefix, a new one."""
_BEGINNING = 0
"""The row of zeros, from which every sequence begins."""


class StateRows:
    """Which row holds the state of which session, and of which prefix. All ranks decide alike.

    A prefix is found at the page that it ends with, so it ends with a page. The least recently used ones give way.

    Attributes:
        total: their number; with 0, nothing is kept, and calls change nothing.
        moves: the rows that the current pass reads and writes, keyed by session.
    """

    def __init__(self, rows: int) -> None:
        self.total = rows
        self._free = list(range(rows, 0, -1))
        self._holders: Counter[int] = Counter()
        self._rows: dict[int, int] = {}  # keyed by session
        self._kept: OrderedDict[int, int] = OrderedDict()  # keyed by the number of the prefix's last page
        self._targets: dict[int, list[int]] = {}  # of the sessions under way
        self._cuts: Mapping[int, int] = {}
        self._found: dict[int, int] = {}  # the rows of states after the sessions' first `cuts` tokens
        self.moves: dict[int, tuple[int, int]] = {}

    def begin(self, passes: Sequence[Sequence[ScheduledChunk]], cuts: Mapping[int, int]) -> None:
        """Take the rows that passes over these chunks write.

        Args:
            cuts: the number of first tokens, at the end of one of these passes, whose state may be found later,
                keyed by session.

        Raises:
            CacheFull: there are too few.
        """
        if not self.total:
            return
        passed = Counter(chunk.session for chunks in passes for chunk in chunks)
        counts = {session: min(count, ROWS_OF_SEQUENCE) for session, count in passed.items()}
        needed = sum(counts.values())
        while len(self._free) < needed and self._kept:
            self._release(self._kept.popitem(last=False)[1])
        if len(self._free) < needed:
            raise CacheFull(
                f"{len(counts)} sequences need {needed} recurrent states: expected at most the "
                f"{len(self._free)} of {self.total} that are free. Close sessions, or raise inference.recurrent_states."
            )
        self._targets = {s: [self._held(self._free.pop()) for _ in range(count)] for s, count in counts.items()}
        self._cuts, self._found, self.moves = cuts, {}, {}

    def move(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Choose the rows of the next pass."""
        for chunk in chunks if self.total else ():
            session = chunk.session
            before = self.moves[session][1] if session in self.moves else self._rows.get(session, _BEGINNING)
            read = before if chunk.cached else _BEGINNING
            write = next(row for row in self._targets[session] if row not in (read, self._found.get(session)))
            self.moves[session] = read, write
            if chunk.cached + chunk.new == self._cuts.get(session):
                self._found[session] = write

    def end(self, done: bool, manager: CacheManager) -> None:
        """End the passes: give each session its new state, and keep those of prefixes; or neither if not `done`."""
        for session, (_, row) in self.moves.items() if done else ():
            self.close(session)
            self._rows[session] = self._held(row)
        for session, row in self._found.items() if done else ():
            pages = self._cuts[session] // manager.page_tokens
            numbers = manager.page_numbers(session)[:pages]
            if len(numbers) == pages and numbers[-1] not in self._kept:
                self._kept[numbers[-1]] = self._held(row)
        for row in chain.from_iterable(self._targets.values()):
            self._release(row)
        self._targets, self._found, self.moves = {}, {}, {}

    def adopt(self, session: int, manager: CacheManager) -> None:
        """Cut a session back to the longest prefix whose state is kept, which becomes its own."""
        if not self.total:
            return
        self.close(session)
        length = -1
        while manager.length(session) != length:  # it keeps fewer where layers with windows lack pages
            numbers = manager.page_numbers(session)
            pages = next((i for i in range(len(numbers), 0, -1) if numbers[i - 1] in self._kept), 0)
            length = pages * manager.page_tokens
            manager.truncate(session, length)
        if pages:
            self._kept.move_to_end(numbers[pages - 1])
            self._rows[session] = self._held(self._kept[numbers[pages - 1]])

    def close(self, session: int) -> None:
        """Release the state of a session, if it has one."""
        if session in self._rows:
            self._release(self._rows.pop(session))

    def _held(self, row: int) -> int:
        self._holders[row] += 1
        return row

    def _release(self, row: int) -> None:
        self._holders[row] -= 1
        if not self._holders[row]:
            self._free.append(row)


@dataclass(frozen=True)
class StateShape:
    """A state of `layers` recurrent layers: of `heads` value heads, `[key, value]` in fp32, and `taps` - 1 tokens of a
    convolution's `channels` in `dtype`. Heads and channels are those of one tensor-parallel rank."""

    layers: int
    heads: int
    key: int
    value: int
    channels: int
    taps: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """The bytes of a state in all layers."""
        tail = (self.taps - 1) * self.channels * self.dtype.itemsize
        return self.layers * (4 * self.heads * self.key * self.value + tail)


class _Part(NamedTuple):
    """Neighbouring tokens of a chunk on a rank. rows: of this rank's new tokens; place: in the chunk's parts."""

    rank: int
    number: int  # among the rank's parts
    rows: slice
    chunk: int
    place: int


class RecurrentStates:
    """The states of one rank, and the rule over the tokens of all ranks. `begin` or `begin_replicated` comes before the
    layers, as for `CachedAttention`.

    Args:
        group: the context-parallel process group, or None for one rank.
        rows: the number of states.

    Raises:
        ValueError: they do not fit into the device's memory.
    """

    def __init__(self, group: dist.ProcessGroup | None, shape: StateShape, rows: int, device: torch.device) -> None:
        self._group, self.shape, self._device = group, shape, device
        self._rank = 0 if group is None else dist.get_rank(group)
        self.rows = StateRows(rows)
        self.unused_row = rows + 1  # nobody reads it
        count = shape.layers, rows + 2
        try:
            sizes = *count, shape.heads, shape.key, shape.value
            self._states = torch.zeros(sizes, dtype=torch.float32, device=device)
            self._tails = torch.zeros(*count, shape.taps - 1, shape.channels, dtype=shape.dtype, device=device)
        except (RuntimeError, MemoryError) as error:  # CPUs have no error type for being out of memory
            expected = f"states that fit into memory; one takes {shape.row_bytes / 2**20:.1f} MiB per rank ({error})"
            raise refuse("inference.recurrent_states", rows, expected, "Lower it.") from error
        self._moves: tuple[Tensor, Tensor]
        self._parts: list[_Part] | None = None  # None: every rank computes all tokens

    def begin_replicated(self, reads: Tensor, writes: Tensor) -> None:
        """Compute single tokens on every rank, which read and write these rows, int64 `[B]`."""
        self._moves, self._parts = (reads, writes), None

    def begin(self, batch: Batch) -> None:
        """Compute the parts of chunks that ranks hold, with the rows of `StateRows.moves`."""
        counts: Counter[int] = Counter()
        chunks = [_parts(batch, index, counts) for index in range(len(batch.chunks))]
        self._most, size = max(counts.values()), self.shape.taps - 1
        self._parts = [part for parts in chunks for part in parts if part.rank == self._rank]
        self._order = [self._numbers([part.rank * self._most + part.number for part in parts]) for parts in chunks]
        before: list[int] = []
        ends: list[int] = []
        for index, parts in enumerate(chunks):
            # Rows of the table that `convolved` makes: the tails of the chunks' states, then those of all parts.
            seen = list(range(index * size, (index + 1) * size))
            for part in parts:
                before += seen[-size:] if part.rank == self._rank else []
                stop = (len(chunks) + part.rank * self._most + part.number + 1) * size
                seen += range(stop - min(size, part.rows.stop - part.rows.start), stop)
            ends += seen[-size:]
        self._before, self._ends = self._numbers(before), self._numbers(ends)
        reads, writes = zip(*(self.rows.moves[chunk.session] for chunk in batch.chunks), strict=True)
        self._moves = self._numbers(reads), self._numbers(writes)

    def _numbers(self, numbers: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self._device)

    def convolved(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """Return causal convolutions of this rank's tokens `x` `[s, 1, c]`. layer: among the recurrent ones.

        Args:
            weight: `[c, taps]`; the last tap is the token itself.
        """
        (reads, writes), tails, size = self._moves, self._tails[layer], self.shape.taps - 1
        if self._parts is None:
            whole = torch.cat((tails[reads], x), dim=1)
            tails.index_copy_(0, writes, whole[:, 1:])
            product = whole.to(delta_rule.precision(x)) * weight.t()
            return product.sum(1, keepdim=True).to(x.dtype)
        own = x.new_zeros(self._most, size, x.shape[2])
        for part in self._parts:
            last = x[part.rows][-size:, 0]
            own[part.number, size - len(last) :] = last
        gathered = all_gather_rows(self._group, own.flatten()).view(-1, x.shape[2])
        table = torch.cat((tails[reads].flatten(0, 1), gathered))
        tails[writes] = table[self._ends].view(-1, size, x.shape[2])
        before = table[self._before].view(-1, size, 1, x.shape[2])
        pieces = []
        for part, tail in zip(self._parts, before, strict=True):
            inside = x.new_full((part.rows.stop - part.rows.start,), size, dtype=torch.int64)  # zeros are at beginnings
            pieces.append(delta_rule.convolved(x[part.rows], tail, weight, inside))
        return torch.cat(pieces) if pieces else x

    def rule(self, layer: int, kernel: delta_rule.Kernel, *inputs: Tensor) -> Tensor:
        """Return a recurrence's outputs `[1, s, h, v]` for this rank's tokens. See `delta_rule.Kernel`."""
        (reads, writes), states, columns = self._moves, self._states[layer], self.shape.value
        if self._parts is None:
            out, after = delta_rule.step(states[reads], *(x[0] for x in inputs))
            states.index_copy_(0, writes, after)
            return out.unsqueeze(0).to(inputs[2].dtype)
        shape, wide = self.shape, delta_rule.precision(inputs[0])
        factors = shape.key if len(inputs) == 5 else 1  # see `delta_rule.Section`
        own = states.new_zeros(self._most, shape.heads, shape.key, columns + factors, dtype=wide)
        sections, before = [], states[reads].unsqueeze(1)
        for part in self._parts:
            its = [x[:, part.rows] for x in inputs]
            first = before[part.chunk] if part.place == 0 else None
            lengths = [part.rows.stop - part.rows.start]
            sections.append(delta_rule.section(lengths, part.place > 0, kernel, *its, state=first))
            own[part.number] = sections[-1].last[0]
        lasts = all_gather_rows(self._group, own.flatten()).view(-1, 1, *own.shape[1:])
        chunks = [lasts[order] for order in self._order]
        states[writes] = torch.cat([delta_rule.joined(parts, columns) for parts in chunks]).to(states.dtype)
        pairs = zip(sections, self._parts, strict=True)
        found = [delta_rule.finish(section, chunks[part.chunk], 0, part.place) for section, part in pairs]
        return torch.cat(found, dim=1) if found else inputs[2]


def _parts(batch: Batch, index: int, counts: Counter[int]) -> list[_Part]:
    """Return the parts of a chunk in the order of its tokens; neighbouring ones of a rank are one.

    Args:
        counts: of the parts of every rank so far.
    """
    chunk, found = batch.chunks[index], list[_Part]()
    rows = [starts[index] for starts in batch.row_starts]
    spans = sorted((span.start, len(span), rank) for rank in range(batch.n) for span in chunk.new_spans[rank] if span)
    for _, size, rank in spans:
        start, rows[rank] = rows[rank], rows[rank] + size
        if found and found[-1].rank == rank:
            found[-1] = found[-1]._replace(rows=slice(found[-1].rows.start, rows[rank]))
        else:
            found.append(_Part(rank, counts[rank], slice(start, rows[rank]), index, len(found)))
            counts[rank] += 1
    return found
