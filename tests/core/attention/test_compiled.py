"""Compiled models: a call is opaque to the compiler, and losses and gradients are those of the uncompiled model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_longctx import ContextParallelAttention, Mask
from megatron_longctx.testing.distributed import run_distributed

HIDDEN, HEADS = 16, 4
MASKS = Mask.causal(23), Mask.packed([9, 14], window=(6, 0))  # ranks have different numbers of tokens


class Layer(nn.Module):
    def __init__(self, attention: ContextParallelAttention) -> None:
        super().__init__()
        self.attention, self.qkv = attention, nn.Linear(HIDDEN, 3 * HIDDEN)
        self.sink = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).unbind(2)
        return x + torch.tanh(self.attention(q, k, v, mask=mask, sink=self.sink).flatten(2))


class Model(nn.Module):
    def __init__(self, attention: ContextParallelAttention) -> None:
        super().__init__()
        self.attention = attention
        self.layers = nn.ModuleList([Layer(attention) for _ in range(2)])

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x.square().mean()


def _differences(rank: int) -> list[float]:
    """Return the largest differences of the loss and gradients that compilation makes, of each mask."""
    torch.manual_seed(1)
    model = Model(ContextParallelAttention(dist.group.WORLD, schedule="zigzag"))
    compiled = torch.compile(model, backend="aot_eager")
    found = []
    for mask in MASKS:
        whole = torch.randn(mask.length, 2, HIDDEN, generator=torch.Generator().manual_seed(2))
        x = model.attention.shard(whole, mask)
        results: list[list[Tensor]] = []
        for each in (model, compiled):
            loss = each(x, mask)
            results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
        found.append(max(float((a - b).abs().max()) for a, b in zip(*results, strict=True)))
    return found


def test_compiled_models_are_exact() -> None:
    assert run_distributed(_differences, 2) == [[0.0] * len(MASKS)] * 2


def test_the_compiler_does_not_look_into_a_call() -> None:
    """It makes two graphs of a layer, before and after the call, in little time, of the layer's own code alone."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = torch.compile(Model(ContextParallelAttention()), backend=backend)
    model(torch.randn(23, 1, HIDDEN), MASKS[0]).backward()
    called = [{node.name for node in graph.graph.nodes if node.op.startswith("call")} for graph in graphs]
    assert 2 <= len(graphs) <= 4, "each layer once, or one for both"
    assert all(names <= {"linear", "view", "unbind", "q", "k", "v"} for names in called[::2]), called
    assert all(names <= {"flatten", "tanh", "add"} for names in called[1::2]), called


def test_a_whole_graph_is_refused_by_the_compiler() -> None:
    model = torch.compile(Model(ContextParallelAttention()), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"(?i)graph|disable"):
        model(torch.randn(23, 1, HIDDEN), MASKS[0])
