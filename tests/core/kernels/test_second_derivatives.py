"""Every autograd function of the package refuses gradients of gradients, rather than drop them silently."""

import importlib
from pathlib import Path

import pytest
import torch

import megatron_longctx
from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.testing.references import random_qkv

ROOT = Path(megatron_longctx.__file__).parent


MODULES = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    for path in sorted(ROOT.rglob("*.py"))
    if "autograd.Function)" in path.read_text()
]


def test_modules_with_functions_are_found() -> None:
    assert {f"megatron_longctx.mcore.{name}" for name in ("head", "recompute", "rope")} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_a_backward_that_would_need_a_graph_raises(module: str) -> None:
    """It raises before it reads anything: autograd enables gradients in a backward that it will differentiate again."""
    values = vars(importlib.import_module(module)).values()
    functions = [x for x in values if isinstance(x, type) and issubclass(x, torch.autograd.Function)]
    assert functions
    for function in functions:
        with torch.enable_grad(), pytest.raises(RuntimeError, match="gradients of gradients are not computed"):
            function.backward(None)


@pytest.mark.parametrize("incoming_has_graph", [False, True])
def test_second_derivatives_of_attention_raise(incoming_has_graph: bool) -> None:
    q, k, v, _ = random_qkv(8, 1, 2, 1, 8, torch.float32)
    q.requires_grad_()
    out = ContextParallelAttention()(q, k, v, mask=8)
    loss = (out**2).sum() if incoming_has_graph else out.sum()
    with pytest.raises(RuntimeError, match="gradients of gradients are not computed"):
        torch.autograd.grad(loss, q, create_graph=True)
    assert torch.autograd.grad(ContextParallelAttention()(q, k, v, mask=8).sum(), q)[0].norm() > 0
