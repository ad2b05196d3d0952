"""The core attention that Megatron's self-attention layer calls: our executor behind Megatron's signature."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from ..errors import refuse
from ..recompute import AttentionTape
from .sequence import ShardedSequence
from .settings import layer_window, refuse_unless_served, skips_rope

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}
_PACKED = _CAUSAL | {AttnMaskType.padding_causal: True, AttnMaskType.padding: False}
"""As TransformerEngine calls them where documents are packed."""


class ContextParallelCoreAttention(MegatronModule):  # type: ignore[misc]
    """Takes the place of `core_attention` in a self-attention spec.

    Args:
        sequence: shared by all layers of the model; give it through the spec (see `spec.with_context_parallel`).
        The others are Megatron's own.

    Attributes:
        window: tokens that each sees before and after itself (`settings.layer_window`).
        softmax_offset: `[h/tp]`, the sinks that `softmax_type` says, or None; with `learnable` a parameter, called and
            sharded as Megatron's. Every context-parallel rank has the gradient of its own queries, as of any weight.

    Raises:
        ValueError: a setting of the model that exact sharded attention does not serve, or heads that the schedule
            cannot share among the ranks.
    """

    def __init__(
        self,
        *,
        sequence: ShardedSequence,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        del cp_comm_type  # TransformerEngine's choice of mode; ours is the schedule of `sequence`
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if attention_type != "self":
            raise refuse("attention_type", attention_type, "self", "Use it for self-attention.")
        if dropout != 0:
            raise refuse("attention_dropout", dropout, "0 with context-parallel attention", "Set it to 0.")
        refuse_unless_served(config, sequence.attention.deterministic)
        world = pg_collection.cp.size() if pg_collection is not None else sequence.attention.world
        if world != sequence.attention.world:
            expected = f"the sequence's {sequence.attention.world}"
            raise refuse("context-parallel size", world, expected, "Build the sequence over pg_collection.cp.")
        tensor_parallel, heads = config.tensor_model_parallel_size, config.num_attention_heads
        groups = heads if config.multi_latent_attention else config.num_query_groups or heads
        sequence.attention.check_heads(heads // tensor_parallel, max(1, groups // tensor_parallel))
        self.layer_number = layer_number
        self.window = layer_window(config, layer_number)
        sequence.windows.add(self.window)
        self._tp = getattr(pg_collection, "tp", None) or parallel_state.get_tensor_model_parallel_group(False)
        self._make_sinks(config)
        self.rotates = not skips_rope(config, layer_number)
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self._sequence = sequence
        self._tape: AttentionTape | None = None

    def _make_sinks(self, config: TransformerConfig) -> None:
        self.softmax_offset: Tensor | None
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
            return
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        heads = torch.zeros(config.num_attention_heads, device=device, dtype=config.params_dtype)
        if config.softmax_type == "learnable" and config.perform_initialization:
            config.init_method(heads)  # of all ranks, so that they are the same at every tensor-parallel size
        tp, rank = (1, 0) if self._tp is None else (self._tp.size(), self._tp.rank())
        own = heads.chunk(tp)[rank].clone()
        if config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(own)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        else:
            self.register_buffer("softmax_offset", own, persistent=False)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """As Megatron's: learnable sinks, sharded by heads."""
        if not self._parameters:
            return {}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tp,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    @contextmanager
    def taped(self, tape: AttentionTape) -> Iterator[None]:
        """Calls inside are recorded on `tape`, or replayed from it."""
        outer, self._tape = self._tape, tape
        try:
            yield
        finally:
            self._tape = outer

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention of this rank's queries over the whole sequence.

        Args:
            query: `[s, b, h/tp, d]`, or `[s, h/tp, d]` as Megatron's layers give packed (thd) documents.
            key, value: `[s, b, g/tp, d]` and `[s, b, g/tp, e]`, or without b.
            attention_mask: must be None: masks need no tensor.
            packed_seq_params: a `ShardedSequence.pack`; Megatron's own, with `cu_seqlens_q` of the whole sequence, not
                of a rank's share; or None for a plain sequence. Padding between documents attends its own padding
                alone, and nothing attends it.

        Returns:
            `[s, b, h/tp * e]`; b is 1 for packed documents.

        Raises:
            ValueError: other tokens than this rank's, a mask tensor, a bias, packed documents that are not served, or a
                mask type other than causal and no_mask (for Megatron's packed documents also padding_causal, padding).
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        served = _PACKED if query.ndim == 3 else _CAUSAL
        if mask_type not in served:
            raise ValueError(f"attn_mask_type={mask_type}: expected causal or no_mask. Give sequences without padding.")
        for name, given in (("attention_mask", attention_mask), ("attention_bias", attention_bias)):
            if given is not None:
                raise ValueError(
                    f"{name}={type(given).__name__}: expected None. Documents, windows and causal or full attention "
                    "need no tensor."
                )
        sequence = self._sequence
        pack = sequence.pack_of(packed_seq_params)
        if query.ndim == 3:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        if query.shape[0] != pack.num_local_tokens:
            raise ValueError(
                f"query has {query.shape[0]} tokens: expected {pack.num_local_tokens}, what rank "
                f"{sequence.attention.rank} of {sequence.attention.world} holds of {pack.length}. Give the model "
                "what sequence.shard_batch(batch) returns; where the length changes, a sequence.pack([length]) to both."
            )
        rotation = sequence.rotation(pack, self.window)
        if rotation is not None and self.rotates:
            query, key = rotation(query), rotation(key)
        attention, mask = sequence.attention, pack.mask(served[mask_type], self.window)
        scale, sink = self.softmax_scale, self.softmax_offset
        if self._tape is not None:
            out = self._tape.attend(attention, (query, key, value), mask=mask, scale=scale, sink=sink)
        else:
            out = attention(query, key, value, mask=mask, scale=scale, sink=sink, inference=not self.training)
        return out.flatten(2)
