"""Plans in words and pictures, and where the documents of a pack are placed."""

import struct
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_longctx.config.cluster import load_cluster
from megatron_longctx.core.layout import LAYOUTS
from megatron_longctx.core.plans import KernelSupport, Target, Workload, build_plan, keep_received, transpose
from megatron_longctx.core.plans.mask import documents, full
from megatron_longctx.planner import draw as drawing
from megatron_longctx.planner.describe import describe, document_shards, imbalance_pct, rank_pairs
from megatron_longctx.planner.draw import draw
from megatron_longctx.planner.simulate import simulate
from tests.core.plans.masks import pairs_of, tokens_of
from tests.shared.plans import helper_plan


def test_a_backward_plan_in_words():
    """`test_cli_plan` has the whole text of a forward plan."""
    lines = describe(transpose(helper_plan(2, 4))).splitlines()
    assert lines[0] == "helper backward: 2 ranks, 4 tokens (contiguous), causal mask, 3 steps"
    for line in (
        "  rank 0: attend q[0:2] x kv own[0:2] causal; send kv0[0:2] -> 1; receive q_grad1[1:2] <- 1",
        "  rank 0: attend q[1:2] of rank 1 x kv own[0:2] full",
        "  rank 0: idle; send dq1[1:2] by 0 -> 1; receive dkv0[0:2] by 1 <- 1",
        "     0                5  100.0%  dkv 0 / 2, dq 1 / 0, kv 2 / 0, q_grad 0 / 1",
    ):
        assert line in lines


def test_idle_ranks_uneven_loads_and_empty_shards():
    text = describe(build_plan("ring", 3, 2))
    assert "  rank 0: nothing  (0 tokens)" in text
    assert "rank 0: idle\n" in text
    assert "     0                0    0.0%  nothing" in text
    assert "     2                2  200.0%  kv 0 / 1" in text
    assert "full mask" in describe(build_plan("ring", 3, full(6)))
    assert "0 tokens" in describe(build_plan("zigzag", 2, 0))


def test_stripes_and_sizes():
    text = describe(build_plan("striped", 2, 8), Target(Workload(1, 1, 128, batch=6 << 20)))
    assert "rank 1: 1:8:2  (4 tokens)" in text
    assert "kv 3 / 4 (21 GiB)" in text and "4 tokens = 12 GiB at most" in text


def test_windows_documents_and_kept_blocks():
    target = Target(Workload(2, 2, 128), KernelSupport(packed=True, rectangles=True, windows=True))
    text = describe(keep_received(build_plan("ulysses", 2, documents([3, 2, 3], window=(1, 0)))), target)
    assert "causal, 3 documents, window 1, 0 mask" in text and "heads 1/2 where [0:3] x [0:3] where -1 <= j - i" in text
    assert "kept from other ranks, for backward: 6 KiB at most, and the outputs of its queries" in text
    assert "in 5 slices, 5 pairs" in describe(build_plan("ring", 1, documents([1] * 5)), target)


@pytest.mark.parametrize(
    "plan",
    [
        build_plan("zigzag", 4, 64),
        build_plan("ring", 3, full(2)),
        build_plan("zigzag", 2, 0),
        helper_plan(3, 12),
        build_plan("ring", 18, 512),
        build_plan("usp", 4, documents([100, 28, 900], window=(64, 0))),
    ],
    ids=lambda plan: f"{plan.name}-{plan.n}-{plan.mask.length}",
)
@pytest.mark.filterwarnings("error")
def test_a_plan_as_a_picture(plan, tmp_path):
    path = tmp_path / "plan.png"
    draw(plan, path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert 1200 <= width <= 5000
    assert 600 <= height <= 2000
    assert len(data) > 10_000


def test_the_pair_map_shows_which_step_computes_each_pair():
    """Every visible pair gets the step that computes it, every other pair stays blank."""
    import numpy
    from matplotlib import pyplot

    from megatron_longctx.planner.draw import _pair_map

    for plan in (
        build_plan("zigzag", 4, 64),
        build_plan("ring", 3, full(10)),
        helper_plan(2, 9),
        build_plan("zigzag", 2, documents([7, 13])),
    ):
        figure, axes = pyplot.subplots()
        _pair_map(axes, plan)
        grid = numpy.ma.filled(axes.images[0].get_array().astype(float), numpy.nan)
        pyplot.close(figure)
        expected = numpy.full((plan.mask.length,) * 2, numpy.nan)
        for t, _, attend in plan.calls():
            at = numpy.ix_(tokens_of(plan, attend.queries, False), tokens_of(plan, attend.keys, True))
            seen = pairs_of(attend.slices, attend.num_queries, attend.num_keys) > 0
            expected[at] = numpy.where(seen, t, expected[at])
        numpy.testing.assert_array_equal(grid, expected)


def test_text_in_pictures_is_legible(tmp_path, monkeypatch):
    """Digits contrast with their bars (4.5 by WCAG 2), and no text crosses a frame."""
    from matplotlib.colors import to_rgb

    figures, real = [], drawing._figure
    monkeypatch.setattr(drawing, "_figure", lambda *a, **b: figures.append(real(*a, **b)) or figures[-1])
    draw(build_plan("zigzag", 8, 4096), tmp_path / "plan.png")
    pack = build_plan("all_gather", 4, documents([400, 300, 200, 100, 60, 40]), layout="balanced")
    drawing.draw_placement(pack, tmp_path / "pack.png")
    timeline = simulate(build_plan("ring", 8, 32768), load_cluster("h200_x8"), Workload(32, 8, 128), timeline=True)
    drawing.draw_timeline(timeline, tmp_path / "timeline.png")

    def luminance(colour):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) + 0.05

    checked = 0
    for axes in (axes for figure in figures for axes in figure.axes):
        axes.figure.draw_without_rendering()
        frame = axes.get_window_extent()
        for text in axes.texts:
            box = text.get_window_extent()
            assert not (axes.spines["right"].get_visible() and box.x0 < frame.x1 < box.x1), text.get_text()
            centre = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
            bars = [bar for bar in axes.patches if bar.get_window_extent().contains(*centre)]
            if bars and text.get_bbox_patch() is None:
                both = luminance(text.get_color()), luminance(bars[-1].get_facecolor())
                assert max(both) / min(both) >= 4.5, text.get_text()
                checked += 1
    assert checked > 64


def test_a_picture_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError):
        draw(build_plan("ring", 2, 8), tmp_path / "missing" / "plan.png")


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 5), st.sampled_from([*LAYOUTS]))
def test_every_token_of_every_document_is_placed(lengths, n, layout):
    plan = build_plan("all_gather", n, documents(lengths), layout=layout)
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    expected = {
        (rank, number, tokens, tokens == lengths[number])
        for rank in range(n)
        for number, tokens in Counter(document[token] for token in plan.queries.tokens(rank)).items()
    }
    assert set(document_shards(plan)) == expected


def test_imbalance_of_attention_and_of_all_work():
    plan = build_plan("ring", 2, documents([100]))
    assert imbalance_pct(plan) == pytest.approx(100 * (3775 / 2525 - 1))
    assert imbalance_pct(build_plan("ring", 2, 0)) == 0.0
    pack = documents([300, 20, 20, 60, 40, 200])
    assert imbalance_pct(build_plan("zigzag", 4, pack, layout="zigzag")) > 5
    plan = build_plan("zigzag", 4, pack)
    for pairs_per_token in (0.0, 10.0, 1e6):
        work = [p + pairs_per_token * plan.queries.num_tokens(rank) for rank, p in enumerate(rank_pairs(plan))]
        assert max(work) < 1.015 * sum(work) / 4
