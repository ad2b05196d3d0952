"""Compiled models: a call is opaque to the compiler, and losses and gradients are those of the uncompiled model."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_longctx import ContextParallelAttention, Mask
from megatron_longctx.testing.distributed import run_distributed

HIDDEN, HEADS = 16, 4
MASK = Mask.packed([9, 14], window=(6, 0))  # ranks have different numbers of tokens


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


def _difference(group: dist.ProcessGroup | None, backend: str) -> float:
    """Return the largest difference of the loss and gradients that compilation makes."""
    torch.manual_seed(1)
    model = Model(ContextParallelAttention(group, schedule="zigzag"))
    whole = torch.randn(MASK.length, 2, HIDDEN, generator=torch.Generator().manual_seed(2))
    x = model.attention.shard(whole, MASK)
    results: list[list[Tensor]] = []
    for each in (model, torch.compile(model, backend=backend)):
        loss = each(x, MASK)
        results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """The compiler, which the tests' conftest.py switches off."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(disable=False):
        yield


def _of_ranks(rank: int) -> float:
    torch._dynamo.config.disable = False
    return _difference(dist.group.WORLD, "eager")


def test_compiled_models_are_exact() -> None:
    assert _difference(None, "aot_eager") == 0.0
    assert run_distributed(_of_ranks, 2) == [0.0, 0.0]


def test_the_compiler_does_not_look_into_a_call() -> None:
    """It makes two graphs of a layer, before and after the call, which have only the layer's own code."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = torch.compile(Model(ContextParallelAttention()), backend=backend)
    model(torch.randn(23, 1, HIDDEN), MASK).backward()
    called = [{node.name for node in graph.graph.nodes if node.op.startswith("call")} for graph in graphs]
    assert 2 <= len(graphs) <= 4, "each layer once, or one for both"
    assert all(names <= {"linear", "view", "unbind", "q", "k", "v"} for names in called[::2]), called
    assert all(names <= {"flatten", "tanh", "add"} for names in called[1::2]), called


def test_a_whole_graph_is_refused_by_the_compiler() -> None:
    model = torch.compile(Model(ContextParallelAttention()), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"(?i)graph|disable"):
        model(torch.randn(23, 1, HIDDEN), MASK)
