"""Other implementations of context-parallel attention, one file each, to compare this package with.

A file has `contenders(group, kernel)`, which may raise any error if a package is missing, and a `NOTE` about whose
kernels and schedules it runs. `kernel` is the provider for those that call this package's kernels.
"""

import importlib
import importlib.metadata
from typing import NamedTuple

import torch.distributed as dist

from megatron_longctx.core.comm import gather_objects

from ..cases import Case
from ..measure import Contender

_DISTRIBUTIONS = {
    "nccl_ulysses": None,
    "torch_context_parallel": None,
    "ring_flash_attn": "ring-flash-attn",
    "transformer_engine": "transformer-engine",
}
"""The files, with the distribution that they need."""


class Peers(NamedTuple):
    """The peers that can be measured, with a line for each present and for each absent one."""

    contenders: list[Contender]
    notes: list[str]
    absent: list[str]


def peers(group: dist.ProcessGroup, kernel: str) -> Peers:
    """Return the peers that all ranks of `group` can import. All ranks call this together."""
    present = Peers([], [], [])
    for name, distribution in _DISTRIBUTIONS.items():
        reason, contenders = None, []
        try:
            peer = importlib.import_module(f"analysis.benchmarks.peers.{name}")
            contenders = peer.contenders(group, kernel)
        except Exception as error:  # packages with compiled parts raise anything
            reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        reason = next((reason for reason in gather_objects(group, reason) if reason is not None), None)
        if reason is None:
            present.contenders.extend(contenders)
            present.notes.append(f"{distribution or name}{_version(distribution)}: {peer.NOTE}")
        else:
            present.absent.append(f"{distribution or name} is not measured: {reason}")
    return present


def _version(distribution: str | None) -> str:
    try:
        return f" {importlib.metadata.version(distribution)}" if distribution else ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_parts(case: Case, parts: int) -> None:
    """Refuse documents that do not divide into `parts` equal parts, and precisions other than bf16.

    In fp32, ring-flash-attn 0.1.8 accumulates in the buffers that its next kernel call overwrites, so its gradients are
    wrong (observed), and TransformerEngine refuses it.
    """
    if case.element_bytes != 2:
        raise ValueError("fp32: expected bf16")
    uneven = [length for length in case.documents if length % parts]
    if uneven:
        raise ValueError(f"{uneven[0]} tokens: expected a multiple of {parts}")
