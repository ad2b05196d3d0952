"""The norms equal their formulas, keep dtypes, and carry the mark that sequence parallelism needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_longctx.mcore.norms import NORMS

HIDDEN = 96
SETTINGS = {
    "params_dtype": torch.float32,
    "sequence_parallel": False,
    "layernorm_zero_centered_gamma": False,
    "use_cpu_initialization": True,
}


def _norm(name: str, size: int = HIDDEN, eps: float = 1e-5, **settings: Any) -> Any:
    return NORMS[name](config=SimpleNamespace(**(SETTINGS | settings)), hidden_size=size, eps=eps)


def _reference(name: str, x: torch.Tensor, norm: Any) -> torch.Tensor:
    x = x.double()
    if name == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    y = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    return y + norm.bias.double() if name == "LayerNorm" else y


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
def test_value_and_dtype(name: str, parameters: torch.dtype, inputs: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = _norm(name, eps=1e-3, params_dtype=parameters)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(HIDDEN))
    # Far from zero mean: statistics in bf16 would be off by far more than one rounding of the output.
    x = (5 * torch.randn(7, 3, HIDDEN) + 2).to(inputs)
    y = norm(x)
    assert y.dtype == inputs
    assert all(parameter.dtype == parameters for parameter in norm.parameters())
    tolerance = 2e-6 if inputs == torch.float32 else 2**-8
    torch.testing.assert_close(y.double(), _reference(name, x, norm), rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_centered_weights(name: str, dtype: torch.dtype) -> None:
    """1 + weight is not rounded to the model's dtype."""
    norm = _norm(name, params_dtype=dtype, layernorm_zero_centered_gamma=True)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain = _norm(name)
    assert torch.equal(norm(x), plain(x.float()).to(dtype)), "all weights are 1 at first"
    with torch.no_grad():
        norm.weight.fill_(2**-10)
        plain.weight.fill_(1 + 2**-10)
    assert torch.equal(norm(x), plain(x.float()).to(dtype)) and norm.weight.dtype == dtype


@pytest.mark.parametrize("name", NORMS)
def test_gradients(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(_norm(name, 6, params_dtype=torch.float64), (x,))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_are_marked(sequence_parallel: bool) -> None:
    for name, count in (("RMSNorm", 1), ("LayerNorm", 2)):
        marks = [p.sequence_parallel for p in _norm(name, sequence_parallel=sequence_parallel).parameters()]
        assert marks == [sequence_parallel] * count
