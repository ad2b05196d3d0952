"""Multi-latent attention (MLA): Megatron's own layer, with RoPE at the positions that a rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from ..errors import refuse
from ..models.rope import Frequencies
from ..schedules.mask import Window
from .pack import Pack
from .sequence import Rope, ShardedSequence
from .version import norms_of_latents

_REFUSED = {
    "apply_rope_fusion": "Its kernel rotates tokens in Megatron's own zigzag layout.",
    "cache_mla_latents": "It is for Megatron's inference.",
    "mla_down_proj_fusion": "It is another layer.",
}


class LatentSelfAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's MLA over sharded sequences; `spec.with_context_parallel` puts it into a spec.

    Args:
        sequence: shared by all layers of the model.
        frequencies: RoPE frequencies; None for those of Megatron's embedding.
        The others are Megatron's own.

    Raises:
        ValueError: settings that assume Megatron's layout, or a sequence of a model with other angles.
    """

    def __init__(
        self, *args: Any, sequence: ShardedSequence, frequencies: Frequencies | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        for name, remedy in _REFUSED.items():
            if getattr(self.config, name, False):
                raise refuse(name, True, "False with context-parallel attention", f"{remedy} Unset it.")
        if self.config.softmax_scale is not None:
            self.softmax_scale = self.core_attention.softmax_scale = self.config.softmax_scale
        self._sequence = sequence
        original: Any = self.rotary_pos_emb
        del self.rotary_pos_emb  # a registered submodule can only be replaced by another module
        self.rotary_pos_emb: Any = _LatentEmbedding(sequence, returns_stretch=self.config.rope_type != "rope")
        sequence.set_rope(LatentRope((frequencies or _frequencies_of(original)).to(original.inv_freq.device)))
        if self.tp_group.size() > 1:
            if not self.config.sequence_parallel:
                remedy = (
                    "Without it, Megatron sums gradients of norms and of the keys' rotated part incorrectly (0.16.1, "
                    "0.19.2)."
                )
                raise refuse("sequence_parallel", False, "True with MLA and tensor parallelism", remedy)
            self.linear_kv_down_proj.register_forward_hook(self._gather_columns)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        """Run Megatron's layer.

        Args:
            packed_seq_params: see `ShardedSequence.pack_of`.

        Raises:
            ValueError: a call of Megatron's inference.
        """
        if kwargs.get("inference_context") is not None or kwargs.get("inference_params") is not None:
            raise refuse("inference_context", "given", "None with MLA", "MLA supports training, but not inference.")
        if (packed := kwargs.get("packed_seq_params")) is not None:
            # For its own parameters, Megatron would lay out the documents itself.
            kwargs["packed_seq_params"] = self._sequence.pack_of(packed)
        return super().forward(hidden_states, attention_mask, **kwargs)  # type: ignore[no-any-return]

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return norms_of_latents(self.config, submodules)

    def _gather_columns(self, module: torch.nn.Module, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Return all columns of the latent and of the keys' rotated part, for this tensor-parallel rank's rows.

        From these, Megatron gathers the rows of the rotated part, and sums its gradient, of which every rank has the
        part of its own heads. If Megatron gathers columns itself (local layers of 0.16.1 and 0.19.2), it sums nothing.
        """
        columns, bias = output
        if columns.shape[-1] != self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            columns = gather_from_tensor_model_parallel_region(columns, group=self.tp_group)
            # A view would keep the rows of all ranks alive.
            columns = scatter_to_sequence_parallel_region(columns, group=self.tp_group).clone()
        return columns, bias


@dataclass(frozen=True)
class _Angles:
    """The angles of one rank's tokens.

    Attributes:
        radians: fp32 `[s, r]`, from 0 to 2 pi, for all r elements as in Megatron.
        stretch: see `Frequencies`.
    """

    radians: Tensor
    stretch: float

    def of(self, window: Window) -> None:
        """Return None: core attention rotates nothing, because Megatron's layer does."""


@dataclass(frozen=True)
class LatentRope:
    """The `ShardedSequence.rope` of a model with MLA."""

    frequencies: Frequencies

    def equals(self, other: Rope) -> bool:
        return isinstance(other, LatentRope) and other.frequencies.equals(self.frequencies)

    def rotations_of(self, pack: Pack) -> _Angles:
        inverse = self.frequencies.inverse.double()  # at a million tokens, fp32 angles are off by 0.03 rad
        angles = torch.outer(pack.positions(inverse.device).double(), inverse).remainder(2 * math.pi).float()
        return _Angles(torch.cat((angles, angles), dim=-1), self.frequencies.stretch)


class _LatentEmbedding:
    """The rotary embedding of `LatentSelfAttention`, with the two calls that Megatron makes.

    Args:
        returns_stretch: whether Megatron expects angles and their stretch.
    """

    def __init__(self, sequence: ShardedSequence, returns_stretch: bool) -> None:
        self._sequence, self._returns_stretch = sequence, returns_stretch

    def get_rotary_seq_len(
        self, context: Any, transformer: Any, hidden: Tensor, config: Any, packed: PackedSeqParams | None
    ) -> tuple[Pack, int]:
        """Return the micro-batch's pack and the number of dimensions of queries.

        Queries are `[s, b, h, d]`; Megatron drops b if a pack has one sequence.
        """
        return self._sequence.pack_of(packed), 3 if packed is not None and hidden.shape[1] == 1 else 4

    def __call__(self, pack_and_ndim: tuple[Pack, int], packed_seq: bool = False) -> Any:
        """Return the angles as `[s, 1, r]` or `[s, 1, 1, r]`."""
        pack, ndim = pack_and_ndim
        self._sequence.rotation(pack)
        angles = pack.rotations
        assert isinstance(angles, _Angles), "the sequence belongs to this model"
        radians = angles.radians.view(-1, *(1,) * (ndim - 2), angles.radians.shape[-1])
        return (radians, angles.stretch) if self._returns_stretch else radians


def _frequencies_of(original: RotaryEmbedding) -> Frequencies:
    """Return the frequencies of Megatron's embedding: its angles at position 1."""
    embedding = original.get_emb(2)
    angles, stretch = embedding if isinstance(embedding, tuple) else (embedding, 1.0)
    return Frequencies(angles[1].flatten()[: angles.shape[-1] // 2].clone(), stretch)
