"""Plans in words and pictures."""

import struct

import pytest

from megatron_longctx.layout import striped
from megatron_longctx.schedules import Kind, build_plan, describe, seal, transpose
from megatron_longctx.schedules.draw import draw
from megatron_longctx.schedules.ring import ring
from megatron_longctx.testing.plans import helper_plan

ZIGZAG_2_8 = """\
zigzag forward: 2 ranks, 8 tokens (zigzag), causal mask, 2 steps, 0.0% of rank-time idle

who holds what
  rank 0: 0:2 + 6:8  (4 tokens)
  rank 1: 2:4 + 4:6  (4 tokens)

step 0
  rank 0: attend q[0:4] x kv own[0:4] causal; send kv0[0:4] -> 1; receive kv1[0:4] <- 1
  rank 1: attend q[0:4] x kv own[0:4] causal; send kv1[0:4] -> 0; receive kv0[0:4] <- 0

step 1
  rank 0: attend q[2:4] x kv 1[0:4] full
  rank 1: attend q[0:4] x kv 0[0:2] full

totals
  rank            pairs    load  tokens sent / received
     0               18  100.0%  kv 4 / 4 (4 KiB)
     1               18  100.0%  kv 4 / 4 (4 KiB)
  buffers for other ranks' kv: 4 tokens = 2 KiB at most"""

HELPER_2_4_BACKWARD = """\
helper backward: 2 ranks, 4 tokens (contiguous), causal mask, 3 steps, 0.0% of rank-time idle

who holds what
  rank 0: 0:2  (2 tokens)
  rank 1: 2:4  (2 tokens)

step 0
  rank 0: attend q[0:2] x kv own[0:2] causal; send kv0[0:2] -> 1; receive q_grad1[1:2] <- 1
  rank 1: attend q[0:2] x kv own[0:2] causal; send q_grad1[1:2] -> 0; receive kv0[0:2] <- 0

step 1
  rank 0: attend q[1:2] of rank 1 x kv own[0:2] full
  rank 1: attend q[0:1] x kv 0[0:2] full

step 2
  rank 0: idle; send dq1[1:2] by 0 -> 1; receive dkv0[0:2] by 1 <- 1
  rank 1: idle; send dkv0[0:2] by 1 -> 0; receive dq1[1:2] by 0 <- 0

totals
  rank            pairs    load  tokens sent / received
     0                5  100.0%  dkv 0 / 2, dq 1 / 0, kv 2 / 0, q_grad 0 / 1
     1                5  100.0%  dkv 2 / 0, dq 0 / 1, kv 0 / 2, q_grad 1 / 0
  buffers for other ranks' dkv: 2 tokens at most
  buffers for other ranks' dq: 1 tokens at most
  buffers for other ranks' kv: 2 tokens at most
  buffers for other ranks' q_grad: 1 tokens at most"""


def test_a_small_plan_in_words():
    assert describe(build_plan("zigzag", 2, 8), {Kind.KV: 512}) == ZIGZAG_2_8


def test_a_backward_plan_in_words():
    assert describe(seal(transpose(helper_plan(2, 4)))) == HELPER_2_4_BACKWARD


def test_idle_ranks_uneven_loads_and_empty_shards():
    text = describe(build_plan("ring", 3, 2))
    assert "  rank 0: nothing  (0 tokens)" in text
    assert "rank 0: idle\n" in text
    assert "     0                0    0.0%  nothing" in text
    assert "     2                2  200.0%  kv 0 / 1" in text
    assert "full mask" in describe(build_plan("ring", 3, 6, False))
    assert "0 tokens" in describe(build_plan("zigzag", 2, 0))


def test_stripes_and_sizes():
    text = describe(seal(ring(striped(2, 8), True)), {Kind.KV: 3 << 30})
    assert "rank 1: 1:8:2  (4 tokens)" in text
    assert "kv 4 / 4 (24 GiB)" in text
    assert "4 tokens = 12 GiB at most" in text


@pytest.mark.parametrize(
    "plan",
    [
        build_plan("zigzag", 4, 64),
        build_plan("all_gather", 8, 8192),
        build_plan("ring", 1, 5),
        build_plan("ring", 3, 2, False),
        build_plan("zigzag", 2, 0),
        helper_plan(3, 12),
        seal(ring(striped(3, 10), True)),
        build_plan("ring", 32, 4096),
    ],
    ids=lambda plan: f"{plan.name}-{plan.n}-{plan.layout.length}",
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


def test_the_pair_map_shows_which_step_computes_each_pair(tmp_path):
    """Every visible pair gets the step that computes it, every other pair stays blank."""
    import numpy
    from matplotlib import pyplot

    from megatron_longctx.schedules.draw import _pair_map

    for plan in (build_plan("zigzag", 4, 64), build_plan("ring", 3, 10, False), helper_plan(2, 9)):
        figure, axes = pyplot.subplots()
        _pair_map(axes, plan)
        grid = numpy.ma.filled(axes.images[0].get_array().astype(float), numpy.nan)
        pyplot.close(figure)
        length = plan.layout.length
        assert grid.shape == (length, length)
        expected = numpy.full((length, length), numpy.nan)
        held = [list(plan.layout.tokens(rank)) for rank in range(plan.n)]
        for t, step in enumerate(plan.steps):
            for attend in (a for attends in step.attends for a in attends):
                rows = held[attend.queries[0].home][attend.queries[0].start : attend.queries[0].stop]
                columns = [c for key in attend.keys for c in held[key.home][key.start : key.stop]]
                for i, row in enumerate(rows):
                    for column in columns[: i + 1] if attend.causal else columns:
                        expected[row, column] = t
        numpy.testing.assert_array_equal(grid, expected)


def test_a_picture_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError):
        draw(build_plan("ring", 2, 8), tmp_path / "missing" / "plan.png")
