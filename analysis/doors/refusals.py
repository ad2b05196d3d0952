"""Wrong combinations, each with the beginning of the message that refuses it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from analysis.doors.layers import CASES, WORLD, Case, compare, config_of, gpt, own_spec, packed
from analysis.doors.slices import share
from megatron_longctx.integrations.megatron_bridge import longctx_layer_spec
from megatron_longctx.mcore import groups


def on_rank(rank: int, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the errors of these cases, and what is said of wrong combinations."""
    return compare(names), refusals()


def refusals() -> dict[str, str]:
    """Return what is said of each wrong combination, keyed by a part of what should be. Collective over two ranks."""
    collection = groups.initialize(context=WORLD, seed=5)
    pack, dense, latent = CASES["packs"], CASES["dense"], CASES["latent attention"]
    turned = replace(pack, documents=pack.documents[:: 1 if collection.cp.rank() else -1])

    def build(case: Case, others: dict[str, Any], **options: Any) -> GPTModel:
        config = config_of(case, WORLD, **others)
        return gpt(config, longctx_layer_spec(lambda: own_spec(config), **options)(config), collection)

    def forward(case: Case, **options: Any) -> None:
        mine = share(case.lengths, collection.cp.rank(), WORLD)
        tokens = torch.zeros(1, len(mine), dtype=torch.long, device=mine.device)
        build(case, {}, **options)(tokens, tokens, None, labels=tokens, packed_seq_params=packed(case))

    calls: dict[str, Callable[[], Any]] = {
        "layout=zigzag: expected per_document": lambda: forward(pack, layout="zigzag"),
        "layout=striped: expected zigzag or per_document": lambda: forward(pack, layout="striped"),
        "batch=other documents on some ranks": lambda: forward(turned, schedule="all_gather"),
        "attention_dropout=0.1: expected 0": lambda: build(dense, {"attention_dropout": 0.1}),
        "deterministic_mode=True: expected False": lambda: build(dense, {"deterministic_mode": True}),
        "fp8_dot_product_attention=True: expected False": lambda: build(dense, {"fp8_dot_product_attention": True}),
        "window_size=(64, 64): expected (64, 0)": lambda: build(dense, {"window_size": (64, 64)}),
        "apply_rope_fusion=True: expected False": lambda: build(
            latent, {"apply_rope_fusion": True, "rope_type": "yarn"}
        ),
    }
    said = {expected: _said(call) for expected, call in calls.items()}
    groups.destroy()
    return said


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"
