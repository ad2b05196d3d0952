"""Attention of one layer while Llama 3 405B decodes (table 8): queries in a ring, and fewer exchanges."""

from dataclasses import dataclass
from functools import cache

from megatron_longctx.core.plans import Block, KernelSupport, Kind, Move, Target, Workload
from megatron_longctx.core.plans.kernel_calls import KernelCall
from megatron_longctx.core.plans.plan import ALL_HEADS, Heads
from megatron_longctx.planner.cost import GIB, Costs, attention_flops
from megatron_longctx.planner.messages import MessageTimes
from megatron_longctx.planner.simulate import Simulation, simulate

from .nodes import ATTENTION_TFLOPS, HEADS, MERGE_GIBPS, RDMA, batch, cluster
from .page import Cell, Table, cell, paper

MEMORY_BYTES = 2.4e12
"""Memory bandwidth per second of the paper's H100s, from the data sheet (section 4.1)."""
NODES = (1, 2, 4, 8)
CASES = ((128, 1), (32, 4), (128, 4))
"""Thousands of cached tokens per sequence, and sequences."""
_CALLS = KernelSupport(packed=True, rectangles=True, windows=True)


@dataclass(frozen=True)
class Table8:
    """Microseconds of the paper's table 8."""

    one: float  # one attention op
    loop: float  # all ops of the ring's loop
    hops: float  # SendRecv
    home: float  # All2All
    whole: float  # all of pass-Q


PAPERS = {
    (128, 1, 1): Table8(38.9, 38.9, 0, 0, 38.9),
    (128, 1, 2): Table8(22.0, 43.2, 32.3, 81.1, 157.7),
    (128, 1, 4): Table8(14.7, 60.8, 105.7, 79.9, 238.6),
    (32, 4, 1): Table8(60.1, 60.1, 0, 0, 60.1),
    (32, 4, 2): Table8(13.9, 24.5, 33.3, 66.8, 136.6),
    (32, 4, 4): Table8(9.6, 41.3, 104.9, 72.2, 180.6),
}


@dataclass(frozen=True)
class ReadingCosts(Costs):
    """Costs of calls with so few queries that reading the keys takes longer than computing."""

    def call_seconds(self, call: KernelCall, heads: Heads, workload: Workload, backward: bool) -> float:
        keys = sum(each.k_stop - each.k_start for each in call.segments)
        return self.seconds_of(keys, call.pairs, workload)

    def seconds_of(self, keys: int, pairs: int, workload: Workload = HEADS) -> float:
        """Return the seconds of a call that reads `keys` keys and computes `pairs` pairs."""
        read = keys * workload.token_bytes(Kind.KV) / MEMORY_BYTES
        return self.call_s + max(
            read, attention_flops(workload, pairs, ALL_HEADS, False) / (self.forward_tflops * 1e12)
        )


COSTS = ReadingCosts(ATTENTION_TFLOPS, ATTENTION_TFLOPS, merge_gibps=MERGE_GIBPS)


@cache
def simulated(mode: str, n: int, cached: int, sequences: int) -> Simulation:
    """Simulate one new token of every sequence, the last of `cached` thousand, in a mode."""
    plan = batch(n, 1, 1000 * cached - 1, sequences).plan(mode)
    return simulate(plan, cluster(n, RDMA), Target(HEADS, _CALLS), COSTS, timeline=True)


def rounds(mode: str, n: int, cached: int = 128, sequences: int = 1) -> int:
    """Return the number of steps with messages, which run one after the other."""
    return sum(bool(step.moves) for step in simulated(mode, n, cached, sequences).plan.steps)


def one_exchange(n: int, cached: int, sequences: int) -> float:
    """Return the seconds of replicated decode, as in `megatron_longctx.inference.decode`.

    Every rank has all queries and attends to its own keys in one call. Then all ranks exchange their partial results.
    """
    keys = sequences * -(-1000 * cached // n)
    seconds = COSTS.seconds_of(keys, keys)
    if n == 1:
        return seconds
    outs = [Block(Kind.OUT, rank, 0, sequences, origin=rank) for rank in range(n)]
    moves = tuple(Move(outs[rank], rank, (rank + t) % n) for t in range(1, n) for rank in range(n))
    _, done = MessageTimes(n, cluster(n, RDMA), HEADS, COSTS).exchange(moves, [seconds] * n, [seconds] * n)
    merged = (n + 1) * outs[0].tokens * HEADS.token_bytes(outs[0].kind, outs[0].heads)
    return max(done) + merged / (COSTS.merge_gibps * GIB)


def papers_exchange(n: int, cached: int, sequences: int) -> float | None:
    """Return the microseconds of one exchange by the paper's own numbers.

    They are those of attention to a rank's keys, for all sequences, and of one All2All. For several sequences, the ops
    of the ring's loop together compute as much.
    """
    theirs = PAPERS.get((cached, sequences, n))
    return None if theirs is None else (theirs.one if sequences == 1 else theirs.loop) + theirs.home


def _call_seconds(simulation: Simulation) -> list[list[float]]:
    """Return the seconds of every rank's kernel calls."""
    spans = [span for span in simulation.spans if span.lane == "compute" and span.home >= 0]
    return [[span.stop - span.start for span in spans if span.rank == rank] for rank in range(simulation.plan.n)]


def _message_seconds(simulation: Simulation, kind: Kind) -> float:
    """Return the seconds of the steps that move blocks of a kind."""
    steps = [t for t, step in enumerate(simulation.plan.steps) if any(move.block.kind is kind for move in step.moves)]
    spans = [span for span in simulation.spans if span.lane == "transfer"]
    return sum(max(span.stop - span.start for span in spans if span.step == t) for t in steps)


def table_8() -> Table:
    rows: list[list[Cell]] = []
    for (cached, sequences, n), them in PAPERS.items():
        simulation = simulated("pass_q", n, cached, sequences)
        calls = _call_seconds(simulation)
        messages = [_message_seconds(simulation, kind) for kind in (Kind.Q, Kind.OUT)]
        ours = (max(map(max, calls)), max(map(sum, calls)), *messages, simulation.seconds)
        pairs = zip(ours, (them.one, them.loop, them.hops, them.home, them.whole), strict=True)
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
                simulation = simulated(mode, n, cached, sequences)
                busy = max(simulation.compute_s)
                row += [cell(1e6 * each, "d", 1) for each in (busy, simulation.seconds - busy, simulation.seconds)]
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
    """Return the thousands of cached tokens, of all sequences, from which n nodes with one exchange beat one node.

    Args:
        exchange: seconds of the exchange; None to simulate it.
    """
    fixed = one_exchange(n, 0, 1) - COSTS.call_s if exchange is None else exchange
    return fixed / ((1 - 1 / n) * HEADS.token_bytes(Kind.KV) / MEMORY_BYTES) / 1000


def facts(parts: Table, by_form: Table) -> dict[str, float]:
    """Return the numbers in the claims, in microseconds; ring_off_* are ratios to the paper's."""
    one = ("128K", "1")
    off = [parts.value(f"{cached}K", str(sequences), str(n), column=11) / them.whole
           for (cached, sequences, n), them in PAPERS.items() if n > 1]  # fmt: skip
    return {
        "ring_off_least": min(off),
        "ring_off_most": max(off),
        **{f"decode_{n}_ring": by_form.value(*one, str(n), column=5) for n in NODES},
        **{f"decode_{n}_hop": by_form.value(*one, str(n), column=8) for n in NODES},
        **{f"decode_{n}_once": by_form.value(*one, str(n), column=9) for n in NODES},
        **{f"decode_{n}_parts": by_form.value(*one, str(n), column=11) for n in (2, 4)},
        "break_even": break_even(4),
        "break_even_parts": break_even(4, 1e-6 * PAPERS[128, 1, 4].home),
        "rounds_ring": rounds("pass_q", 4),
        "rounds_hop": rounds("one_hop", 4),
    }
