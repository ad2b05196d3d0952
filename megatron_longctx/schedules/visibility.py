"""Which queries of one rank see which keys of another: the geometry that every schedule shares."""

from __future__ import annotations

from typing import NamedTuple

from ..layout import Layout


class Region(NamedTuple):
    """Query slots `q_start..q_stop-1` against key slots `k_start..k_stop-1`, all of them or causally."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool


def visible_regions(layout: Layout, q_rank: int, k_rank: int, causal: bool) -> tuple[Region, ...]:
    """The fewest regions that cover each visible pair of (`q_rank`'s queries, `k_rank`'s keys) exactly once.

    Raises:
        ValueError: a layout whose spans interleave in a way that needs more than full and causal regions.
    """
    num_q, num_k = layout.num_tokens(q_rank), layout.num_tokens(k_rank)
    if not num_q or not num_k:
        return ()
    if not causal:
        return (Region(0, num_q, 0, num_k, False),)
    if q_rank == k_rank:  # slots are in token order, so the whole shard is one causal block
        return (Region(0, num_q, 0, num_k, True),)
    q_spans, k_spans = layout.spans[q_rank], layout.spans[k_rank]
    if all(span.step == 1 for span in (*q_spans, *k_spans)):
        return _between_blocks(q_spans, k_spans, num_q)
    if len(q_spans) == len(k_spans) == 1 and q_spans[0].step == k_spans[0].step:
        return _between_stripes(q_spans[0], k_spans[0])
    raise ValueError(f"layout {layout.name}: expected spans of consecutive tokens or one stripe per rank.")


def _between_blocks(q_spans: tuple[range, ...], k_spans: tuple[range, ...], num_q: int) -> tuple[Region, ...]:
    """Every key span is seen by a suffix of the queries; neighbours with the same suffix join."""
    regions: list[Region] = []
    k_start = 0
    for span in k_spans:
        k_stop = k_start + len(span)
        q_start = sum(len(q) for q in q_spans if len(q) and len(span) and q.start < span.stop)
        if len(span) and q_start < num_q:
            last = regions[-1] if regions else None
            if last and last.q_start == q_start and last.k_stop == k_start:
                regions[-1] = last._replace(k_stop=k_stop)
            else:
                regions.append(Region(q_start, num_q, k_start, k_stop, False))
        k_start = k_stop
    return tuple(regions)


def _between_stripes(q: range, k: range) -> tuple[Region, ...]:
    """Query slot i sees key slots j <= i, or j < i when the key stripe starts after the query stripe."""
    first = 0 if k.start <= q.start else 1
    size = min(len(q) - first, len(k))
    return (Region(first, first + size, 0, size, True),) if size > 0 else ()
