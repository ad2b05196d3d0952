"""Evidence of a step whose numbers are not finite."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .. import files
from ..mcore.data import Batch


class NonFiniteError(ArithmeticError):
    """Training met NaN or infinity and stopped."""


def dump(
    folder: Path,
    step: int,
    values: Mapping[str, float],
    batches: Sequence[Batch],
    models: Sequence[torch.nn.Module],
) -> Path:
    """Write what this rank saw: the values, its micro-batches, and which parameters and gradients are not finite.

    Every rank of the job calls this, since all of them know the same loss.

    Returns:
        the folder, which holds `rank_<k>.json` and `rank_<k>_batches.pt`.
    """
    target = folder / "nonfinite" / f"step_{step}"
    target.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank()
    bad: dict[str, dict[str, int]] = {}
    for index, chunk in enumerate(models):
        for name, parameter in chunk.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            counts = {"parameter": _nonfinite(parameter), "gradient": 0 if gradient is None else _nonfinite(gradient)}
            if any(counts.values()):
                bad[f"{index}.{name}"] = counts
    facts = {"step": step, "values": {k: str(v) for k, v in values.items()}, "nonfinite_elements": bad}
    files.write_text(target / f"rank_{rank}.json", json.dumps(facts, indent=2) + "\n")
    torch.save([vars(batch) for batch in batches], target / f"rank_{rank}_batches.pt")
    return target


def _nonfinite(tensor: Tensor) -> int:
    return int((~torch.isfinite(tensor.detach())).sum())
