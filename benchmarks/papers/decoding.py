"""One layer's attention while Llama 3 405B decodes (table 8): queries in a ring, and with fewer exchanges."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from megatron_longctx.schedules import Block, Kind, Move, Takes, Target, Workload
from megatron_longctx.schedules.cost import GIB, Costs
from megatron_longctx.schedules.kernel_calls import KernelCall
from megatron_longctx.schedules.messages import Messages
from megatron_longctx.schedules.plan import ALL_HEADS, Heads
from megatron_longctx.schedules.simulate import Simulation, simulate

from .nodes import ATTENTION_TFLOPS, HEADS, RDMA, batch, cluster
from .page import Cell, Table, cell, paper, value

MEMORY_BYTES = 2.4e12
"""A second, of the paper's H100s: the data sheet's figure (section 4.1)."""
NODES = (1, 2, 4, 8)
CASES = ((128, 1), (32, 4), (128, 4))
"""Thousands of cached tokens of a sequence, and sequences."""
_CALLS = Takes(packed=True, rectangles=True, windows=True)


@dataclass(frozen=True)
class Papers:
    """Microseconds of table 8: one attention op, all ops of the ring's loop, SendRecv, All2All, all of pass-Q."""

    one: float
    loop: float
    hops: float
    home: float
    whole: float


PAPERS = {
    (128, 1, 1): Papers(38.9, 38.9, 0, 0, 38.9),
    (128, 1, 2): Papers(22.0, 43.2, 32.3, 81.1, 157.7),
    (128, 1, 4): Papers(14.7, 60.8, 105.7, 79.9, 238.6),
    (32, 4, 1): Papers(60.1, 60.1, 0, 0, 60.1),
    (32, 4, 2): Papers(13.9, 24.5, 33.3, 66.8, 136.6),
    (32, 4, 4): Papers(9.6, 41.3, 104.9, 72.2, 180.6),
}


@dataclass(frozen=True)
class Reading(Costs):
    """Costs of calls with so few queries that reading the keys takes longer than computing."""

    def call_seconds(self, call: KernelCall, heads: Heads, workload: Workload, backward: bool) -> float:
        keys = sum(each.k_stop - each.k_start for each in call.segments)
        return self.reading(keys, call.pairs, workload)

    def reading(self, keys: int, pairs: int, workload: Workload = HEADS) -> float:
        """Seconds of a call."""
        read = keys * workload.token_bytes(Kind.KV) / MEMORY_BYTES
        return self.call_s + max(read, workload.flops(pairs, ALL_HEADS, False) / (self.forward_tflops * 1e12))


COSTS = Reading(ATTENTION_TFLOPS, ATTENTION_TFLOPS)


@cache
def simulated(mode: str, n: int, cached: int, sequences: int) -> Simulation:
    """One new token of every sequence, its last of `cached` thousand, by a plan of the mode."""
    plan = batch(n, 1, 1000 * cached - 1, sequences).plan(mode)
    return simulate(plan, cluster(n, RDMA), Target(HEADS, _CALLS), COSTS, timeline=True)


def rounds(mode: str, n: int, cached: int = 128, sequences: int = 1) -> int:
    """Steps with messages, which wait for each other."""
    return sum(bool(step.moves) for step in simulated(mode, n, cached, sequences).plan.steps)


def one_exchange(n: int, cached: int, sequences: int) -> float:
    """Seconds where every rank has all queries, as `megatron_longctx.inference.decode` computes: each attends to its
    own keys in one call, and all send all others what they found."""
    keys = sequences * -(-1000 * cached // n)
    seconds = COSTS.reading(keys, keys)
    if n == 1:
        return seconds
    found = [Block(Kind.OUT, rank, 0, sequences, origin=rank) for rank in range(n)]
    moves = tuple(Move(found[rank], rank, (rank + t) % n) for t in range(1, n) for rank in range(n))
    _, done = Messages(n, cluster(n, RDMA), HEADS, COSTS).exchange(moves, [seconds] * n, [seconds] * n)
    merged = (n + 1) * HEADS.block_bytes(found[0])
    return max(done) + merged / (COSTS.merge_gibps * GIB)


def papers_exchange(n: int, cached: int, sequences: int) -> float | None:
    """Microseconds of one exchange by the paper's own parts: all sequences' attention to a rank's keys, and one
    All2All. Of several sequences the ring's loop attends as much, in several ops."""
    found = PAPERS.get((cached, sequences, n))
    return None if found is None else (found.one if sequences == 1 else found.loop) + found.home


def _calls(found: Simulation) -> list[list[float]]:
    """Seconds of every rank's kernel calls."""
    spans = [span for span in found.spans if span.lane == "compute" and span.home >= 0]
    return [[span.stop - span.start for span in spans if span.rank == rank] for rank in range(found.plan.n)]


def _messages(found: Simulation, kind: Kind) -> float:
    """Seconds of the steps that move such blocks."""
    steps = [t for t, step in enumerate(found.plan.steps) if any(move.block.kind is kind for move in step.moves)]
    spans = [span for span in found.spans if span.lane == "transfer"]
    return sum(max(span.stop - span.start for span in spans if span.step == t) for t in steps)


def table_8() -> Table:
    rows: list[list[Cell]] = []
    for (cached, sequences, n), them in PAPERS.items():
        found = simulated("pass_q", n, cached, sequences)
        calls = _calls(found)
        ours = (max(map(max, calls)), max(map(sum, calls)), *(_messages(found, kind) for kind in (Kind.Q, Kind.OUT)))
        theirs = (them.one, them.loop, them.hops, them.home, them.whole)
        pairs = zip((*ours, found.seconds), theirs, strict=True)
        cells = (each for us, them in pairs for each in (cell(1e6 * us, "d", 1), paper(them, 1)))
        rows.append([f"{cached}K", str(sequences), str(n), *cells])
    columns = ["cached", "batch", "nodes"]
    for part in ("longest attention op, µs", "attention of a rank, µs", "hops, µs", "results home, µs", "whole, µs"):
        columns += [part, "paper"]
    return Table("decode", "decode's ring of queries, a layer", columns, rows, ["table 8"])


def forms() -> Table:
    rows: list[list[Cell]] = []
    for cached, sequences in CASES:
        for n in NODES:
            row: list[Cell] = [f"{cached}K", str(sequences), str(n)]
            for mode in ("pass_q", "one_hop"):
                found = simulated(mode, n, cached, sequences)
                busy = max(found.compute_s)
                row += [cell(1e6 * each, "d", 1) for each in (busy, found.seconds - busy, found.seconds)]
            them = PAPERS.get((cached, sequences, n))
            row += [cell(1e6 * one_exchange(n, cached, sequences), "d", 1), paper(them.whole if them else None, 1)]
            rows.append([*row, cell(papers_exchange(n, cached, sequences), "f", 1)])
    parts = ("computing, µs", "waiting, µs", "whole, µs")
    columns = [
        *("cached", "batch", "nodes"), *(f"{mode}: {part}" for mode in ("pass_q", "one_hop") for part in parts),
        *("one exchange, µs", "paper, pass-Q", "its parts, one exchange"),
    ]  # fmt: skip
    return Table("forms", "decode's attention by number of exchanges", columns, rows)


def break_even(n: int, exchange: float | None = None) -> float:
    """Thousands of cached tokens, of all sequences together, from which n nodes with one exchange beat one node.
    exchange: its seconds; None for what is simulated."""
    fixed = one_exchange(n, 0, 1) - COSTS.call_s if exchange is None else exchange
    return fixed / ((1 - 1 / n) * HEADS.token_bytes(Kind.KV) / MEMORY_BYTES) / 1000


def facts(parts: Table, by_form: Table) -> dict[str, float]:
    """What the claims quote, in microseconds; ring_off_*: times the paper's."""
    one = ("128K", "1")
    off = [value(parts, (f"{cached}K", str(sequences), str(n)), 11) / them.whole
           for (cached, sequences, n), them in PAPERS.items() if n > 1]  # fmt: skip
    return {
        "ring_off_least": min(off),
        "ring_off_most": max(off),
        **{f"decode_{n}_ring": value(by_form, (*one, str(n)), 5) for n in NODES},
        **{f"decode_{n}_hop": value(by_form, (*one, str(n)), 8) for n in NODES},
        **{f"decode_{n}_once": value(by_form, (*one, str(n)), 9) for n in NODES},
        **{f"decode_{n}_parts": value(by_form, (*one, str(n)), 11) for n in (2, 4)},
        "break_even": break_even(4),
        "break_even_parts": break_even(4, 1e-6 * PAPERS[128, 1, 4].home),
        "rounds_ring": rounds("pass_q", 4),
        "rounds_hop": rounds("one_hop", 4),
    }
