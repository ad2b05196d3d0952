"""The MLP in tiles of the sequence: of its wide activations only one tile's exist at a time.

For a Llama-3-8B layer the MLP's own activations are 84 KiB a token, five times as much as a hidden state of 8 KiB and
its norm. They are not kept at all: backward computes each tile's again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from ..errors import refuse
from ..kernels.no_grad import first_order
from .version import builder_of, copied, mlp_of

_Run = Callable[[Tensor], tuple[Tensor, Tensor | None]]


class TiledMLP(MLP):  # type: ignore[misc]
    """Megatron's MLP, with the same parameters, run tile by tile; `with_mlp_tiles` puts it before any kind of MLP.

    Attributes:
        tile_tokens: most tokens (times sequences) in a tile, but at least one of every sequence and sequence-parallel
            rank. Of the class, since Megatron builds an MLP with arguments of its own alone.

    Raises:
        ValueError: gradients that the linear layers add up themselves.
    """

    tile_tokens: int

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.gradient_accumulation_fusion:
            raise refuse(
                "gradient_accumulation_fusion", True, "False with recompute.mlp_tile_tokens", "Set it to False."
            )
        super().__init__(config, *args, **kwargs)
        self._shape_only = False

    @contextmanager
    def shape_only(self) -> Iterator[None]:
        """Forward inside gives zeros, whose gradients are right: for a repetition whose output nobody reads."""
        self._shape_only = True
        try:
            yield
        finally:
            self._shape_only = False

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As Megatron's MLP: `[s, b, h]` to the same, and the last bias where the caller is to add it."""
        biases: list[Tensor | None] = []
        plain = super().forward

        def run(tile: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = plain(tile, *args, **kwargs)
            biases.append(bias)
            return output, bias

        def again(tile: Tensor) -> tuple[Tensor, Tensor | None]:
            with unread_output(self.linear_fc2):
                return plain(tile, *args, **kwargs)  # type: ignore[no-any-return]

        ranks = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        rows = max(1, self.tile_tokens // (ranks * hidden_states.shape[1]))
        parameters = tuple(p for p in self.parameters() if p.requires_grad)
        output = _Tiled.apply((run, again), rows, self._shape_only, hidden_states, *parameters)  # type: ignore[no-untyped-call]
        bias = biases[0] if biases else self.linear_fc2.bias if self.linear_fc2.skip_bias_add else None
        return output, bias


def with_mlp_tiles(layer: ModuleSpec, tile_tokens: int) -> ModuleSpec:
    """A copy of a transformer layer's spec whose MLP runs in tiles.

    Raises:
        ValueError: a layer without Megatron's dense MLP.
    """
    mlp = mlp_of(layer)
    if not (isinstance(mlp, ModuleSpec) and isinstance(mlp.module, type) and issubclass(mlp.module, MLP)):
        raise refuse(
            "recompute.mlp_tile_tokens",
            tile_tokens,
            "null for layers without Megatron's dense MLP",
            f"This layer has {getattr(mlp, 'module', mlp)}: leave it null.",
        )
    module = type(f"Tiled{mlp.module.__name__}", (TiledMLP, mlp.module), {"tile_tokens": tile_tokens})
    tiled = copied(layer)
    tiled.submodules.mlp = builder_of(ModuleSpec(module=module, params=mlp.params, submodules=mlp.submodules))
    return tiled


class _Tiled(torch.autograd.Function):
    """The first of `runs` by rows, in backward the second, which need not compute its output.

    Weights' gradients are summed over tiles in fp32, and reach autograd once, as DDP expects.
    """

    @staticmethod
    def forward(
        ctx: Any, runs: tuple[_Run, _Run], rows: int, shape_only: bool, hidden: Tensor, *parameters: Tensor
    ) -> Tensor:
        run, ctx.again = runs
        ctx.rows = rows
        ctx.save_for_backward(hidden, *parameters)
        output = torch.zeros_like(hidden)
        if not shape_only:
            for part in _parts(hidden, rows):
                output[part] = run(hidden[part])[0]
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *parameters = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        sums: list[Tensor | None] = [None] * len(parameters)
        for part in _parts(hidden, ctx.rows):
            tile = hidden[part].detach().requires_grad_()
            with torch.enable_grad():
                output, _ = ctx.again(tile)
            found = torch.autograd.grad(output, (tile, *parameters), grads[0][part], allow_unused=True)
            del output
            grad_hidden[part] = found[0]
            for i, grad in enumerate(found[1:]):
                if grad is not None:
                    total = sums[i]
                    sums[i] = grad.float() if total is None else total.add_(grad)
        totals = (None if x is None else x.to(p.dtype) for x, p in zip(sums, parameters, strict=True))
        return None, None, None, grad_hidden, *totals


def _parts(hidden: Tensor, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, hidden.shape[0], rows))


@contextmanager
def unread_output(linear: Any) -> Iterator[None]:
    """Inside, `linear` gives zeros, with the right gradients and messages; layers other than Megatron's own
    row-parallel one, whose gradients autograd adds up, run as they are.

    For a layer that is run again for its gradients: the last product of its MLP, a quarter of the layer's matrix work,
    would only give what is known already to be the next layer's input.
    """
    plain = (
        isinstance(linear, RowParallelLinear)
        and not linear.gradient_accumulation_fusion
        and linear.weight.requires_grad
    )
    if not plain:
        yield
        return
    linear._forward_impl = _zeros  # hides the method
    try:
        yield
    finally:
        del linear._forward_impl


def _zeros(input: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return _Unread.apply(input, weight)  # type: ignore[no-any-return, no-untyped-call]


class _Unread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_zeros(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """As Megatron computes them, to the bit."""
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        return grad.matmul(weight), grad.flatten(0, -2).t().matmul(x.flatten(0, -2))
