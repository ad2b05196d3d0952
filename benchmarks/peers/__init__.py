"""What this package is measured against, one file each: other context-parallel attention, and one device alone.

A file has `contenders(group, kernel)`, which may fail where a package is not there, and a `NOTE` on whose kernels and
schedules these are. kernel: what is called where it calls this package's kernels.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import NamedTuple

import torch.distributed as dist

from megatron_longctx.comm import gather_objects

from ..measure import Contender

PEERS = {
    "nccl_ulysses": None,
    "torch_context_parallel": None,
    "ring_flash_attn": "ring-flash-attn",
    "transformer_engine": "transformer-engine",
}
"""Files, with the distribution that they need."""


class Found(NamedTuple):
    """What can be measured. notes: a line for each peer that is here. absent: one for each that is not."""

    contenders: list[Contender]
    notes: list[str]
    absent: list[str]


def peers(group: dist.ProcessGroup, kernel: str) -> Found:
    """What all ranks of `group` can import; all call this together."""
    found = Found([], [], [])
    for name, distribution in PEERS.items():
        reason, contenders = None, []
        try:
            peer = importlib.import_module(f"benchmarks.peers.{name}")
            contenders = peer.contenders(group, kernel)
        except Exception as error:  # packages with compiled parts fail in many ways
            reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        reason = next((reason for reason in gather_objects(group, reason) if reason is not None), None)
        if reason is None:
            found.contenders.extend(contenders)
            found.notes.append(f"{distribution or name}{_version(distribution)}: {peer.NOTE}")
        else:
            found.absent.append(f"{distribution or name} is not measured: {reason}")
    return found


def _version(distribution: str | None) -> str:
    try:
        return f" {importlib.metadata.version(distribution)}" if distribution else ""
    except importlib.metadata.PackageNotFoundError:
        return ""
