"""Other packages' context-parallel attention, where they can be imported: ring-flash-attn and TransformerEngine."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import Layout
from . import ring_package
from .attention import Call, Case, Contender
from .whole_parts import batch_first, whole_parts

ENGINE = "transformer_engine.pytorch"

_ENGINE_NOTE = "It calls cuDNN by itself (NVTE_FLASH_ATTN=0 unless set otherwise), through its own build."


class Found(NamedTuple):
    """What can be measured. notes: a line for each package about whose kernels and schedules these are. absent: a line
    for each package that is not here."""

    contenders: list[Contender]
    notes: list[str]
    absent: list[str]


def packages(group: dist.ProcessGroup, kernel: str) -> Found:
    """What all ranks of `group` can import; all call this together. `kernel`: what ring-flash-attn is to call."""
    os.environ.setdefault("NVTE_FLASH_ATTN", "0")  # TransformerEngine is to take cuDNN's kernels, as we do
    found = Found([], [], [])
    for name, make, note in (
        ("ring-flash-attn", partial(ring_package.ring_flash_attn, group, kernel), ring_package.NOTE),
        ("TransformerEngine", partial(_transformer_engine, group), _ENGINE_NOTE),
    ):
        contenders, reason = _made(make)
        reasons: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(reasons, reason, group=group)
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None:
            found.contenders.extend(contenders)
            found.notes.append(f"{name}{_version(name)}: {note}")
        else:
            found.absent.append(f"{name} is not measured: it cannot be imported ({reason})")
    return found


def _made(make: Callable[[], list[Contender]]) -> tuple[list[Contender], str | None]:
    """What `make` gives, or why a package cannot be imported."""
    try:
        return make(), None
    except Exception as error:  # packages with compiled parts fail in many ways
        return [], f"{type(error).__name__}: {error}".split("\n", 1)[0]


def _version(name: str) -> str:
    try:
        return " " + importlib.metadata.version({"TransformerEngine": "transformer-engine"}.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _transformer_engine(group: dist.ProcessGroup) -> list[Contender]:
    importlib.import_module(ENGINE)
    return [
        Contender(f"TransformerEngine, {kind}", partial(_engine, group, kind)) for kind in ("p2p", "all_gather", "a2a")
    ]


def _engine(group: dist.ProcessGroup, kind: str, case: Case) -> tuple[Call, Layout]:
    """All kinds take head-tail halves, as Megatron shards sequences for them."""
    layout, n = whole_parts(group, "zigzag", case), dist.get_world_size(group)
    if kind == "a2a" and (case.num_heads % n or case.num_kv_heads % n):
        raise ValueError(f"{case.num_heads}:{case.num_kv_heads} heads: expected multiples of {n} ranks")
    attention = importlib.import_module(ENGINE).DotProductAttention(
        case.num_heads,
        case.head_dim,
        num_gqa_groups=case.num_kv_heads,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal",
    )
    stream = torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    attention.set_context_parallel_group(group, dist.get_process_group_ranks(group), stream, kind)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(*map(batch_first, (q, k, v)))  # [b, s, heads * d]
        return out.reshape(*out.shape[:2], *q.shape[2:]).transpose(0, 1)

    return call, layout
