"""Kernels launched without Triton's look at their arguments: what is told apart is what Triton tells apart."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from megatron_longctx.kernels import fused

_SPACE = torch.zeros(64, dtype=torch.uint8)
_TENSORS = [_SPACE[at : at + 32].view(dtype) for at in (0, 4, 8, 16) for dtype in (torch.float32, torch.int32)]
_NUMBERS = [n + by for n in (0, 16, -16, 2**31, -(2**31), 2**40) for by in (-1, 0, 1, 2)]


def test_kinds_are_those_that_triton_compiles_for() -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    nvidia = pytest.importorskip("triton.backends.nvidia.compiler")
    arguments = [*_TENSORS, *_NUMBERS]
    of_triton = [jit.native_specialize_impl(nvidia.CUDABackend, x, False, True, True) for x in arguments]
    ours = [fused.specialization_of(x) for x in arguments]
    for (one, other), (mine, yours) in zip(product(of_triton, repeat=2), product(ours, repeat=2), strict=True):
        assert (one == other) == (mine == yours), (one, other)


class StandIn:
    """Notes whether it was launched as `triton.jit`'s kernels are, or as what these return."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(*arguments: Any, **constants: int) -> Compiled:
            self.launches.append(("first", (grid, arguments, constants)))
            return Compiled(self)

        return first


class Compiled:
    def __init__(self, kernel: StandIn) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self._kernel.launches.append(("again", (grid, arguments)))


def test_each_kind_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_compiled", {})
    kernel = StandIn()
    for number, constants in ((32, {"ROWS": 4}), (48, {"ROWS": 4}), (33, {"ROWS": 4}), (32, {"ROWS": 8})):
        fused.launch(kernel, (3,), (number,), constants, fused.specialization_of(number), num_warps=8)
    assert kernel.launches == [
        ("first", ((3,), (32,), {"ROWS": 4, "num_warps": 8})),
        ("again", ((3, 1, 1), (48, 4))),
        ("first", ((3,), (33,), {"ROWS": 4, "num_warps": 8})),
        ("first", ((3,), (32,), {"ROWS": 8, "num_warps": 8})),
    ]
