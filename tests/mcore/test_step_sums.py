"""What a step sums up over ranks."""

import pytest

from megatron_longctx.mcore.step import LossSum
from megatron_longctx.metrics.flops import Work


def test_measured_imbalance_is_that_of_the_worst_group() -> None:
    even, uneven = [2.0, 2.0], [1.0, 3.0]
    assert LossSum(0, 0, Work(0, 0, 0), computed_s=[even, uneven]).imbalance_pct == pytest.approx(50)
    assert LossSum(0, 0, Work(0, 0, 0), computed_s=[even]).imbalance_pct == pytest.approx(0)
    assert LossSum(0, 0, Work(0, 0, 0), computed_s=[[0.0, 0.0]]).imbalance_pct is None, "nothing was measured"
