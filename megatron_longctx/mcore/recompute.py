"""Megatron layers that are recomputed in backward, all but their attention."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from ..errors import refuse
from ..recompute import AttentionTape, Store
from .core_attention import ContextParallelCoreAttention
from .norms import PostNormAdd
from .tiles import TiledMLP, unread_output


class RecomputedLayer(TransformerLayer):  # type: ignore[misc]
    """Keeps its input and what attention gave, and nothing else; `with_recompute` puts it before any kind of layer.

    Backward runs the layer again, with the random states of the first run, up to the attention's inputs and from its
    kept output on; attention itself and its communication run once (DistFlashAttn, section 3.3).

    Raises:
        ValueError: another attention than ours, or settings of Megatron's that keep or recompute activations, too.
    """

    def __init__(self, config: TransformerConfig, *args: Any, store: Store, **kwargs: Any) -> None:
        _refuse_other_savings(config)
        super().__init__(config, *args, **kwargs)
        self._store = store
        core = getattr(self.self_attention, "core_attention", None)
        if not isinstance(core, ContextParallelCoreAttention):
            raise refuse(
                "recompute.mode",
                "attention_output",
                "context-parallel core attention in every layer",
                f"This layer has {type(core).__name__}: apply with_context_parallel to its spec first.",
            )

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """As Megatron's layer: `[s, b, h]` to the same, and no cross-attention context."""
        run = super().forward
        if not (self.training and torch.is_grad_enabled()):
            return run(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        tape = AttentionTape(self._store)
        core: ContextParallelCoreAttention = self.self_attention.core_attention

        def taped(hidden: Tensor) -> Tensor:
            with core.taped(tape), self._output_unread() if tape.replaying else nullcontext():
                output, _ = run(hidden, *args, **kwargs)
            tape.rewind()
            return output  # type: ignore[no-any-return]

        with tape.keeping(hidden_states):
            return tensor_parallel.checkpoint(taped, False, hidden_states), None

    def _output_unread(self) -> AbstractContextManager[None]:
        """Nobody reads the repetition's output: tiles of the MLP are computed once more in backward only, and of a
        whole MLP the last product is left out. A norm behind the MLP does read it."""
        if isinstance(self.mlp_bda, PostNormAdd):
            return nullcontext()
        if isinstance(self.mlp, TiledMLP):
            return self.mlp.shape_only()
        return unread_output(getattr(self.mlp, "linear_fc2", None))


def with_recompute(layer: ModuleSpec, store: Store) -> ModuleSpec:
    """A copy of a transformer layer's spec whose layers recompute everything but attention.

    Args:
        layer: its core attention is ours (`spec.with_context_parallel`).
        store: where layers' inputs and attention's results wait for backward; shared by all layers of a model.

    Raises:
        ValueError: a spec of something that is no TransformerLayer.
    """
    if not (isinstance(layer.module, type) and issubclass(layer.module, TransformerLayer)):
        raise refuse(
            "recompute.mode",
            "attention_output",
            "a spec of a TransformerLayer",
            f"This one is of {layer.module}: use recompute=layer or none with it.",
        )
    recomputed = copy.copy(layer)
    recomputed.module = type(f"Recomputed{layer.module.__name__}", (RecomputedLayer, layer.module), {})
    recomputed.params = {**layer.params, "store": store}
    return recomputed


def _refuse_other_savings(config: TransformerConfig) -> None:
    for name, plain in (
        ("recompute_granularity", (None,)),
        ("fp8", (None, False)),
        ("fp4", (None, False)),
        ("cpu_offloading", (False,)),
        ("fine_grained_activation_offloading", (False,)),
        ("cuda_graph_impl", (None, "none")),
    ):
        value = getattr(config, name, plain[0])
        if value not in plain:
            raise refuse(
                name,
                value,
                f"{plain[0]} with recompute.mode=attention_output",
                f"Unset it, or take recompute=none and let Megatron's {name} decide alone.",
            )
