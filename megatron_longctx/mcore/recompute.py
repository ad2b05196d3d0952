"""Layers that store few activations: their attention's results alone, or no activations of their MLP.

- `RecomputedLayer` stores a layer's input and attention's results, and computes everything else again in backward.
- `TiledMLP` runs an MLP in tiles of the sequence, so the wide activations of only one tile exist at a time. In a
  Llama-3-8B layer the MLP's own activations take 84 KiB per token, five times as much as a hidden state of 8 KiB and
  its norm. They are not stored at all: backward computes each tile's again.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from ..core.errors import refuse
from ..core.kernels.no_grad import first_order
from .core_attention import ContextParallelCoreAttention
from .fp8 import Rerun
from .norms import PostNormAdd
from .recurrent import RecurrentMixer
from .stores import AttentionTape, Store
from .version import as_builder, copy_spec, mlp_spec

_Run = Callable[[Tensor], tuple[Tensor, Tensor | None]]

_OTHER_SAVINGS: dict[str, tuple[Any, ...]] = {
    "recompute_granularity": (None,),
    "fp4": (None, False),
    "cpu_offloading": (False,),
    "fine_grained_activation_offloading": (False,),
    "cuda_graph_impl": (None, "none"),
}
"""Megatron's settings that store or recompute activations themselves, with the values that do not."""


class RecomputedLayer(TransformerLayer):  # type: ignore[misc]
    """A layer that stores its input and attention's results, and nothing else; a recurrent layer its input alone.

    Backward runs the layer again with the random states of the first run: up to the attention's inputs, and from its
    stored output on. Attention itself and its communication run once (DistFlashAttn, section 3.3). `with_recompute`
    derives a class from this one and any kind of layer.

    Raises:
        ValueError: another core attention than `ContextParallelCoreAttention`, or other settings of Megatron's that
            store or recompute activations.
    """

    def __init__(self, config: TransformerConfig, *args: Any, store: Store, **kwargs: Any) -> None:
        for name, plain in _OTHER_SAVINGS.items():
            if (value := getattr(config, name, plain[0])) not in plain:
                expected = f"{plain[0]} with recompute.mode=attention_output"
                remedy = f"Unset it, or set recompute=none and let Megatron's {name} decide alone."
                raise refuse(name, value, expected, remedy)
        super().__init__(config, *args, **kwargs)
        self._store = store
        core = getattr(self.self_attention, "core_attention", None)
        known = isinstance(core, ContextParallelCoreAttention)
        if not known and not isinstance(self.self_attention, IdentityOp | RecurrentMixer):
            expected = "context-parallel core attention in every layer"
            remedy = f"This layer has {type(core).__name__}: apply with_context_parallel to its spec first."
            raise refuse("recompute.mode", "attention_output", expected, remedy)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Run Megatron's layer: `[s, b, h]` to the same, and no cross-attention context."""
        run = super().forward
        if not (self.training and torch.is_grad_enabled()):
            return run(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        tape, quantized = AttentionTape(self._store), Rerun(self.config.fp8)
        core: ContextParallelCoreAttention | None = getattr(self.self_attention, "core_attention", None)
        # MLPs of a stack and recurrent layers have none.
        recording = nullcontext if core is None else lambda: core.taped(tape)

        def taped(hidden: Tensor) -> Tensor:
            again, rest = tape.replaying, self._skip_unread_output() if tape.replaying else nullcontext()
            with recording(), rest, quantized.again() if again else quantized.first():
                output, _ = run(hidden, *args, **kwargs)
            tape.rewind()
            return output  # type: ignore[no-any-return]

        with tape.storing_input(hidden_states):
            return tensor_parallel.checkpoint(taped, False, hidden_states), None

    def _skip_unread_output(self) -> AbstractContextManager[None]:
        """Skip the MLP's output in the second run, where only a norm behind the MLP reads it.

        Tiles then run once more, in the MLP's own backward, and a whole MLP skips its last product.
        """
        if isinstance(self.mlp_bda, PostNormAdd):
            return nullcontext()
        if isinstance(self.mlp, TiledMLP):
            return self.mlp.shape_only()
        return unread_output(getattr(self.mlp, "linear_fc2", None))


def with_recompute(layer: ModuleSpec, store: Store) -> ModuleSpec:
    """Return a copy of a TransformerLayer's spec whose layers recompute everything but attention.

    layer: a spec made by `spec.with_context_parallel`.
    store: holds layers' inputs and attention's results until backward; all layers of a model share it.
    """
    if not (isinstance(layer.module, type) and issubclass(layer.module, TransformerLayer)):
        remedy = f"This one is of {layer.module}: use recompute=layer or none with it."
        raise refuse("recompute.mode", "attention_output", "a spec of a TransformerLayer", remedy)
    recomputed = copy_spec(layer)
    recomputed.module = type(f"Recomputed{layer.module.__name__}", (RecomputedLayer, layer.module), {})
    recomputed.params = {**layer.params, "store": store}
    return recomputed


class TiledMLP(MLP):  # type: ignore[misc]
    """Megatron's MLP with the same parameters, run tile by tile. `with_mlp_tiles` derives a class from it and any MLP.

    Attributes:
        tile_tokens: the most tokens (times sequences) in a tile, but at least one of every sequence and
            sequence-parallel rank. It belongs to the class, because Megatron builds an MLP with its own arguments only.
    """

    tile_tokens: int

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        assert not config.gradient_accumulation_fusion, "tiles accumulate gradients themselves"
        assert not (config.fp8 and config.fp8_recipe == "delayed"), "a delayed scale is of whole tensors"
        super().__init__(config, *args, **kwargs)
        self._shape_only = False

    @contextmanager
    def shape_only(self) -> Iterator[None]:
        """Make forward return zeros with correct gradients, for a second run whose output nobody reads."""
        self._shape_only = True
        try:
            yield
        finally:
            self._shape_only = False

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run Megatron's MLP: `[s, b, h]` to the same, and the last bias if the caller is to add it."""
        biases: list[Tensor | None] = []
        plain = super().forward

        def run(tile: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = plain(tile, *args, **kwargs)
            biases.append(bias)
            return output, bias

        def rerun(tile: Tensor) -> tuple[Tensor, Tensor | None]:
            with unread_output(self.linear_fc2):
                return plain(tile, *args, **kwargs)  # type: ignore[no-any-return]

        ranks = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        rows = max(1, self.tile_tokens // (ranks * hidden_states.shape[1]))
        parameters = tuple(p for p in self.parameters() if p.requires_grad)
        quantized = Rerun(self.config.fp8)
        output = _Tiled.apply((run, rerun), quantized, rows, self._shape_only, hidden_states, *parameters)  # type: ignore[no-untyped-call]
        bias = biases[0] if biases else self.linear_fc2.bias if self.linear_fc2.skip_bias_add else None
        return output, bias


def with_mlp_tiles(layer: ModuleSpec, tile_tokens: int) -> ModuleSpec:
    """Return a copy of a transformer layer's spec whose MLP, which must be Megatron's dense one, runs in tiles."""
    mlp = mlp_spec(layer)
    if not (isinstance(mlp, ModuleSpec) and isinstance(mlp.module, type) and issubclass(mlp.module, MLP)):
        expected = "null for layers without Megatron's dense MLP"
        remedy = f"This layer has {getattr(mlp, 'module', mlp)}: leave it null."
        raise refuse("recompute.mlp_tile_tokens", tile_tokens, expected, remedy)
    module = type(f"Tiled{mlp.module.__name__}", (TiledMLP, mlp.module), {"tile_tokens": tile_tokens})
    tiled = copy_spec(layer)
    tiled.submodules.mlp = as_builder(ModuleSpec(module=module, params=mlp.params, submodules=mlp.submodules))
    return tiled


class _Tiled(torch.autograd.Function):
    """Applies the first of two `runs` to tiles of rows; backward applies the second, which may skip its output.

    The weights' gradients are summed over tiles in fp32 and reach autograd once, as DDP expects.
    """

    @staticmethod
    def forward(
        ctx: Any,
        runs: tuple[_Run, _Run],
        quantized: Rerun,
        rows: int,
        shape_only: bool,
        hidden: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        run, ctx.rerun = runs
        ctx.rows, ctx.quantized = rows, quantized
        ctx.save_for_backward(hidden, *parameters)
        output = torch.zeros_like(hidden)
        with quantized.first():
            for tile in () if shape_only else _tiles(hidden, rows):
                output[tile] = run(hidden[tile])[0]
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *parameters = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        sums: list[Tensor | None] = [None] * len(parameters)
        for tile in _tiles(hidden, ctx.rows):
            x = hidden[tile].detach().requires_grad_()
            with torch.enable_grad(), ctx.quantized.again():
                output, _ = ctx.rerun(x)
            grad_x, *tile_grads = torch.autograd.grad(output, (x, *parameters), grads[0][tile], allow_unused=True)
            del output
            grad_hidden[tile] = grad_x
            for i, grad in enumerate(tile_grads):
                if grad is not None:
                    total = sums[i]
                    sums[i] = grad.float() if total is None else total.add_(grad)
        totals = (None if x is None else x.to(p.dtype) for x, p in zip(sums, parameters, strict=True))
        return None, None, None, None, grad_hidden, *totals


def _tiles(hidden: Tensor, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, hidden.shape[0], rows))


@contextmanager
def unread_output(linear: Any) -> Iterator[None]:
    """Make `linear` return zeros, with correct gradients and messages, while its layer runs again for gradients.

    The last product of the MLP, a quarter of the layer's matrix work, would only compute the next layer's input again.
    Layers other than Megatron's own row-parallel layer, with gradients that autograd accumulates, run unchanged.
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
    return _UnreadProduct.apply(input, weight)  # type: ignore[no-any-return, no-untyped-call]


class _UnreadProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_zeros(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradients as Megatron does, bit for bit."""
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        return grad.matmul(weight), grad.flatten(0, -2).t().matmul(x.flatten(0, -2))
