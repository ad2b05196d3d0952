"""Qwen3.5 with experts in every layer, and one that all tokens share."""

from functools import partial
from typing import Any

from ...config import ModelConfig
from ..family import Family
from ..fields import Fields
from ..weights import SEPARATE_DELTA
from . import qwen3_5, qwen3_next


def _read(fields: Fields) -> dict[str, Any]:
    qwen3_5.check(fields)
    fields.ignore("intermediate_size")  # of dense MLPs, which no layer has
    fields.expect("norm_topk_prob", True)
    fields.expect("decoder_sparse_step", 1)
    return qwen3_next.read(fields, width="moe_intermediate_size")


def _write(model: ModelConfig) -> dict[str, Any]:
    return {name: value for name, value in qwen3_next.write(model).items() if name != "intermediate_size"}


FAMILY = Family(
    "qwen3_5_moe_text", ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), _read, _write,
    partial(qwen3_next.weights, projections=qwen3_5.PROJECTIONS, form=SEPARATE_DELTA),
    constants=qwen3_next.FAMILY.constants, keys=qwen3_next.FAMILY.keys, dropped=qwen3_5.DROPPED,
)  # fmt: skip
