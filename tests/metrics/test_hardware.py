"""Peaks by device name, including names that contain one another."""

from __future__ import annotations

import pytest

from megatron_longctx.metrics.hardware import peak_tflops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
    ],
)
def test_known_devices(name: str, peak: float) -> None:
    assert peak_tflops(name) == peak


@pytest.mark.parametrize("name", [None, "", "NVIDIA GeForce GT 710", "NVIDIA H2000"])
def test_unknown_devices_have_no_peak(name: str | None) -> None:
    assert peak_tflops(name) is None


def test_override_wins() -> None:
    assert peak_tflops("NVIDIA H100 PCIe", 700.0) == 700.0
    assert peak_tflops(None, 1.5) == 1.5


def test_override_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"logging\.peak_tflops=0"):
        peak_tflops("NVIDIA H200", 0)
