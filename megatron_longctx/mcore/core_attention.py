"""The core attention that Megatron's self-attention layer calls: our executor behind Megatron's signature."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from ..recompute import AttentionTape
from ..schedules.mask import causal, full
from .sequence import ShardedSequence
from .settings import refuse_unless_served, skips_rope

_MASKS = {AttnMaskType.causal: causal, AttnMaskType.no_mask: full}


class ContextParallelCoreAttention(MegatronModule):  # type: ignore[misc]
    """Takes the place of `core_attention` in a self-attention spec.

    Args:
        sequence: shared by all layers of the model; give it through the spec (see `spec.with_context_parallel`).
        The others are Megatron's own.

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
        **head_sizes: Any,
    ) -> None:
        super().__init__(config=config)
        del cp_comm_type  # TransformerEngine's choice of mode; ours is the schedule of `sequence`
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _refuse_unless(attention_type == "self", "attention_type", attention_type, "self", "Use it for self-attention.")
        _refuse_unless(dropout == 0, "attention_dropout", dropout, "0", "Set attention_dropout to 0.")
        refuse_unless_served(config, sequence.attention.deterministic)
        k_channels, v_channels = head_sizes.get("k_channels"), head_sizes.get("v_channels")
        _refuse_unless(
            k_channels == v_channels,
            "v_channels",
            v_channels,
            f"k_channels={k_channels}",
            "Heads of keys and values are of one size here.",
        )
        world = pg_collection.cp.size() if pg_collection is not None else sequence.attention.world
        _refuse_unless(
            world == sequence.attention.world,
            "context-parallel size",
            world,
            f"the sequence's {sequence.attention.world}",
            "Build the sequence over pg_collection.cp.",
        )
        tensor_parallel, heads = config.tensor_model_parallel_size, config.num_attention_heads
        groups = config.num_query_groups or heads
        sequence.attention.check_heads(heads // tensor_parallel, max(1, groups // tensor_parallel))
        self.layer_number = layer_number
        self.rotates = not skips_rope(config, layer_number)
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self._sequence = sequence
        self._tape: AttentionTape | None = None

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
            query: `[s, b, h/tp, d]`.
            key, value: `[s, b, g/tp, d]`.
            attention_mask: must be None: causal and full masks need no tensor.

        Returns:
            `[s, b, h/tp * d]`.

        Raises:
            ValueError: other tokens than this rank's, a mask tensor, a bias, packed sequences, or a mask type other
                than causal and no_mask.
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if mask_type not in _MASKS:
            raise ValueError(f"attn_mask_type={mask_type}: expected causal or no_mask. Give sequences without padding.")
        for name, given in (
            ("attention_mask", attention_mask),
            ("attention_bias", attention_bias),
            ("packed_seq_params", packed_seq_params),
        ):
            if given is not None:
                raise ValueError(
                    f"{name}={type(given).__name__}: expected None. The plans here know causal and full masks."
                )
        sequence = self._sequence
        if query.shape[0] != sequence.num_local_tokens:
            raise ValueError(
                f"query has {query.shape[0]} tokens: expected {sequence.num_local_tokens}, what rank "
                f"{sequence.attention.rank} of {sequence.attention.world} holds of {sequence.length}. Give the model "
                "what sequence.shard_batch(batch) returns, and set sequence.length first where it changes."
            )
        rotation = sequence.rotation
        if rotation is not None and self.rotates:
            query, key = rotation(query), rotation(key)
        attention, mask = sequence.attention, _MASKS[mask_type](sequence.length)
        if self._tape is not None:
            qkv = (query, key, value)
            out = self._tape.attend(attention, qkv, mask=mask, scale=self.softmax_scale)
        else:
            out = attention(
                *(query, key, value),
                mask=mask,
                scale=self.softmax_scale,
                inference=not self.training,
            )
        return out.flatten(2)


def _refuse_unless(ok: bool, name: str, value: object, expected: str, remedy: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value}: expected {expected} with context-parallel attention. {remedy}")
