"""Dense bf16/fp16 peak of one GPU by its CUDA device name, for MFU.

The figures are the makers' data-sheet numbers without sparsity, at the boost clock. For fp32 training they are not the
right peak: give the device's own through `logging.peak_tflops`.
"""

from __future__ import annotations

import re

# (words that must all occur in the device name, TFLOP/s). The first match counts, so variants come before their family.
# A word matches whole ("H20" is not in "NVIDIA H200").
_PEAKS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("GB300",), 2500.0),
    (("GB200",), 2500.0),
    (("B300",), 2250.0),
    (("B200",), 2250.0),
    (("B100",), 1750.0),
    (("GH200",), 989.0),
    (("H200", "NVL"), 835.0),
    (("H200",), 989.0),
    (("H100", "PCIE"), 756.0),
    (("H100", "NVL"), 835.0),
    (("H100",), 989.0),
    (("H800", "PCIE"), 756.0),
    (("H800",), 989.0),
    (("H20",), 148.0),
    (("A100",), 312.0),
    (("A800",), 312.0),
    (("A40",), 149.7),
    (("A30",), 165.0),
    (("A10",), 125.0),
    (("L40S",), 362.0),
    (("L40",), 181.0),
    (("L4",), 121.0),
    (("V100",), 125.0),
)


def peak_tflops(device_name: str | None, override: float | None = None) -> float | None:
    """Dense peak of one device in TFLOP/s, or None when it is not known.

    Args:
        device_name: what `torch.cuda.get_device_name()` says, e.g. `NVIDIA H100 80GB HBM3`; None on CPU.
        override: `logging.peak_tflops`, taken as it is when given.
    """
    if override is not None or device_name is None:
        return override
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    return next((peak for needed, peak in _PEAKS if words.issuperset(needed)), None)


def current_device_name() -> str | None:
    """Name of the current CUDA device; None without one."""
    import torch  # here, so that the formulas and sinks need no torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
