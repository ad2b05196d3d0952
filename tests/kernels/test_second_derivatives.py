"""Gradients of gradients are refused, by every autograd function of the package: none drops them silently."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import megatron_longctx
from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.testing.references import random_qkv

ROOT = Path(megatron_longctx.__file__).parent


def functions() -> list[type[torch.autograd.Function]]:
    """All of them, found by their modules' text."""
    found = {}
    for path in ROOT.rglob("*.py"):
        if "autograd" in path.read_text():
            name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
            for value in vars(importlib.import_module(name)).values():
                if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                    found[value.__qualname__, value.__module__] = value
    return list(found.values())


def test_the_functions_are_found() -> None:
    assert {"Attend", "_Rotate", "_ChunkedCrossEntropy", "_Tiled"} <= {function.__name__ for function in functions()}


@pytest.mark.parametrize("function", functions(), ids=lambda function: function.__qualname__)
def test_a_backward_that_would_need_a_graph_raises(function: type[torch.autograd.Function]) -> None:
    """Before it looks at anything: autograd runs it with gradients on if it is to be differentiated again."""
    with torch.enable_grad(), pytest.raises(RuntimeError, match="gradients of gradients are not computed"):
        function.backward(None)


@pytest.mark.parametrize("graph_of_the_incoming", [False, True])
def test_second_derivatives_of_attention_raise(graph_of_the_incoming: bool) -> None:
    q, k, v, _ = random_qkv(8, 1, 2, 1, 8, torch.float32)
    q.requires_grad_()
    out = ContextParallelAttention()(q, k, v, length=8)
    loss = (out**2).sum() if graph_of_the_incoming else out.sum()
    with pytest.raises(RuntimeError, match="gradients of gradients are not computed"):
        torch.autograd.grad(loss, q, create_graph=True)
    assert torch.autograd.grad(ContextParallelAttention()(q, k, v, length=8).sum(), q)[0].norm() > 0
