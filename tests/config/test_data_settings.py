"""What the configuration says of data: packs, and blends of datasets."""

from __future__ import annotations

import pytest

from megatron_longctx.compose import compose_config
from megatron_longctx.config import validate


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.packing=best_fit", "train.micro_batch_size=2", "train.global_batch_size=2"],
         "train.micro_batch_size=2: expected 1 with data.packing=best_fit. A pack is one sequence"),
        (["data.packing=tight"], "data.packing=tight: expected one of none, documents, best_fit"),
        (["data.prefix=1 a 0 b"], "data.prefix=1 a 0 b: expected weights that are each at least 1/10000 of their sum;"),
        (["data.prefix=0 a 0 b"], "data.prefix=0 a 0 b: expected weights that are each at least 1/10000 of their sum;"),
    ],
)  # fmt: skip
def test_packs_and_blends_that_cannot_be(words: list[str], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        validate(compose_config(words))
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("prefix", "datasets"),
    [
        ("data/a", ((1.0, "data/a"),)),
        ("3 .7 my data", ((1.0, "3 .7 my data"),)),  # a path with spaces
        ("30 days", ((1.0, "30 days"),)),
        ("0.7 data/a .3  b 2. c", ((0.7, "data/a"), (0.3, "b"), (2.0, "c"))),
    ],
)
def test_what_a_blend_is(prefix: str, datasets: object) -> None:
    assert compose_config([f"data.prefix={prefix}"]).data.datasets == datasets
