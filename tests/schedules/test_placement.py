"""Where the documents of a pack lie, and how even that is."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_longctx.layout import LAYOUTS
from megatron_longctx.schedules import build_plan
from megatron_longctx.schedules.mask import documents
from megatron_longctx.schedules.placement import pieces


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 5), st.sampled_from([*LAYOUTS]))
def test_every_token_of_every_document_lies_somewhere(lengths, n, layout):
    plan = build_plan("all_gather", n, documents(lengths), layout=layout)
    of = [number for number, length in enumerate(lengths) for _ in range(length)]
    expected = {
        (rank, number, tokens, tokens == lengths[number])
        for rank in range(n)
        for number, tokens in Counter(of[token] for token in plan.queries.tokens(rank)).items()
    }
    assert set(pieces(plan)) == expected


def test_imbalance_of_attention_and_of_all_work():
    plan = build_plan("ring", 2, documents([100]))
    assert plan.imbalance_pct() == pytest.approx(100 * (3775 / 2525 - 1))
    assert plan.imbalance_pct(pairs_per_token=1000.0) == pytest.approx(100 * (53775 / 52525 - 1))
    assert build_plan("ring", 2, 0).imbalance_pct() == 0.0
    pack = documents([300, 20, 20, 60, 40, 200])
    assert build_plan("zigzag", 4, pack, layout="zigzag").imbalance_pct() > 5
    for pairs_per_token in (0.0, 10.0, 1e6):
        assert build_plan("zigzag", 4, pack).imbalance_pct(pairs_per_token) < 1.5
