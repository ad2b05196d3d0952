"""Rounding of sums over tensor-parallel ranks, in plain PyTorch and for any group size.

It covers what the package's kernels do (`kernels.quantize`) and what the Flash Communication paper compares with it:
floating formats, whole tokens as one group, and a Hadamard transform before rounding.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

TOKEN = 0
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP8_MOST = 448.0
_H12 = """
+-----------
++-+---+++-+
+++-+---+++-
+-++-+---+++
++-++-+---++
+++-++-+---+
++++-++-+---
+-+++-++-+--
+--+++-++-+-
+---+++-++-+
++---+++-++-
+-+---+++-++
"""
"""Paley's matrix of order 12."""


@dataclass(frozen=True)
class Rounding:
    """One way of rounding."""

    form: str = "none"  # none, int8, int6, int4, fp8, fp6 or fp4; 6 means 4 bits to sum and 8 bits to gather
    group: int = 128  # neighbouring values with a common range, or `TOKEN` for all values of a token
    symmetric: bool = False  # ranges around zero; floating formats have no others
    hadamard: bool = False  # every token is transformed before rounding, and back afterwards
    only: str = ""  # `output` or `down` for one kind of layer alone

    @property
    def steps(self) -> tuple[str, str]:
        """The formats of the summands and of the sums."""
        kind, bits = self.form[:-1], self.form[-1]
        return (f"{kind}4", f"{kind}8") if bits == "6" else (self.form, self.form)

    def __str__(self) -> str:
        if self.form == "none":
            return "none"
        ranges = "" if self.form.startswith("fp") else " symmetric" if self.symmetric else " asymmetric"
        text = f"{self.form}{ranges}, groups of {self.group or 'a token'}"
        return text + (", Hadamard" if self.hadamard else "") + (f", {self.only} alone" if self.only else "")


def rounded(x: Tensor, form: str, rounding: Rounding) -> Tensor:
    """Return `x`, `[tokens, hidden]`, as it is received."""
    if not rounding.hadamard:
        return _groups(x, form, rounding)
    transform = hadamard(x.shape[-1], x.dtype, x.device)
    return torch.matmul(_groups(x @ transform, form, rounding), transform.T)


def _groups(x: Tensor, form: str, rounding: Rounding) -> Tensor:
    flat, group = x.flatten(), rounding.group or x.shape[-1]
    missing = -flat.numel() % group
    padded = torch.cat([flat, flat[-1:].expand(missing)]) if missing else flat
    groups = padded.view(-1, group)
    bits = int(form[-1])
    if form.startswith("fp"):
        rounded_groups = _float(groups, bits)
    elif rounding.symmetric:
        levels = (1 << (bits - 1)) - 1
        step = groups.abs().amax(-1, keepdim=True) / levels
        rounded_groups = (groups / step.clamp_min(1e-30)).round() * step
    else:
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        step = (high - low) / ((1 << bits) - 1)
        rounded_groups = ((groups - low) / step.clamp_min(1e-30)).round() * step + low
    return rounded_groups.flatten()[: flat.numel()].view_as(x)


def _float(groups: Tensor, bits: int) -> Tensor:
    most = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    if bits == 8:
        return (groups * (_FP8_MOST / most)).to(torch.float8_e4m3fn).to(groups.dtype) * (most / _FP8_MOST)
    scaled = groups.abs() * (6.0 / most)
    values = _FP4.to(groups)
    between = (values[1:] + values[:-1]) / 2
    return values[torch.bucketize(scaled, between)] * groups.sign() * (most / 6.0)


@cache
def hadamard(size: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """Return an orthogonal `[size, size]` matrix with entries of equal magnitude, from those of order 2 and 12."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    twelve = torch.tensor([[1.0 if c == "+" else -1.0 for c in row] for row in _H12.split()])
    matrix, left = torch.ones(1, 1), size
    while left > 1:
        factor = twelve if (left % 12 == 0 and (left // 12) % 3 != 0) or left % 36 == 0 else two
        if left % len(factor):
            raise ValueError(f"size={size}: expected a product of 12s and 2s. Choose another model.")
        matrix, left = torch.kron(matrix, factor), left // len(factor)
    result: Tensor = (matrix / size**0.5).to(device, dtype)
    return result
