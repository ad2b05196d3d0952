"""Multi-latent attention (MLA): Megatron's own layer, with RoPE by the positions that a rank holds."""

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
    "apply_rope_fusion": "Its kernel turns tokens as Megatron's own zigzag holds them.",
    "cache_mla_latents": "It is for Megatron's inference.",
    "mla_down_proj_fusion": "It is another layer.",
}

_WITHOUT = "Without it Megatron sums gradients of norms and of the keys' turned part wrongly (0.16.1, 0.19.2)."


class LatentSelfAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's MLA; `spec.with_context_parallel` puts it before any kind of it.

    Args:
        sequence: shared by all layers of the model.
        frequencies: how fast tokens turn; None: as Megatron's embedding says. The others are Megatron's own.

    Raises:
        ValueError: settings that turn tokens as Megatron holds them, or a sequence of a model of other angles.
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
        del self.rotary_pos_emb  # a module's place takes modules alone
        stretched = self.config.rope_type != "rope"
        self.rotary_pos_emb: Any = _Positions(sequence, stretched)
        sequence.turn_by(LatentRope((frequencies or _frequencies(original)).to(original.inv_freq.device)))
        if self.tp_group.size() > 1:
            if not self.config.sequence_parallel:
                raise refuse("sequence_parallel", False, "True with MLA and tensor parallelism", _WITHOUT)
            self.linear_kv_down_proj.register_forward_hook(self._whole)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        """As Megatron's layer. packed_seq_params: as `ShardedSequence.pack_of` takes them.

        Raises:
            ValueError: a call of Megatron's inference.
        """
        if kwargs.get("inference_context") is not None or kwargs.get("inference_params") is not None:
            raise refuse("inference_context", "given", "None with MLA", "MLA is trained here, and not served.")
        if (packed := kwargs.get("packed_seq_params")) is not None:
            # Megatron would lay the documents of its own parameters out itself.
            kwargs["packed_seq_params"] = self._sequence.pack_of(packed)
        return super().forward(hidden_states, attention_mask, **kwargs)  # type: ignore[no-any-return]

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return norms_of_latents(self.config, submodules)

    def _whole(self, module: torch.nn.Module, given: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """All columns of the latent and of the keys' turned part, for the rows that this tensor-parallel rank has.

        Of these Megatron gathers the turned part's rows, and sums its gradient, of which every rank has that of its own
        heads. Where it gathers columns itself (local layers of 0.16.1 and 0.19.2) it sums nothing.
        """
        found, bias = output
        if found.shape[-1] != self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            found = gather_from_tensor_model_parallel_region(found, group=self.tp_group)
            # A copy, since it would keep all ranks' rows.
            found = scatter_to_sequence_parallel_region(found, group=self.tp_group).clone()
        return found, bias


@dataclass(frozen=True)
class _Angles:
    """How one rank's tokens turn. radians: fp32 `[s, r]`, from 0 to 2 pi, as Megatron has them for all r elements."""

    radians: Tensor
    stretch: float

    def of(self, window: Window) -> None:
        """Core attention turns nothing."""


@dataclass(frozen=True)
class LatentRope:
    """`ShardedSequence.rope` of a model with MLA."""

    frequencies: Frequencies

    def equals(self, other: Rope) -> bool:
        return isinstance(other, LatentRope) and other.frequencies.equals(self.frequencies)

    def of_pack(self, pack: Pack) -> _Angles:
        """Worked out in fp64, as in fp32 angles at a million tokens are off by 0.03 rad; whole turns are left out."""
        inverse = self.frequencies.inverse.double()
        angles = torch.outer(pack.positions(inverse.device).double(), inverse).remainder(2 * math.pi).float()
        return _Angles(torch.cat((angles, angles), dim=-1), self.frequencies.stretch)


class _Positions:
    """Takes the place of `MLASelfAttention.rotary_pos_emb`. stretched: Megatron asks for the stretch, too."""

    def __init__(self, sequence: ShardedSequence, stretched: bool) -> None:
        self._sequence, self._stretched = sequence, stretched

    def get_rotary_seq_len(
        self, context: Any, transformer: Any, hidden: Tensor, config: Any, packed: PackedSeqParams | None
    ) -> tuple[Pack, int]:
        """The micro-batch's pack, and the dimensions of queries `[s, b, h, d]`, of which Megatron drops b where a pack
        has one sequence."""
        return self._sequence.pack_of(packed), 3 if packed is not None and hidden.shape[1] == 1 else 4

    def __call__(self, found: tuple[Pack, int], packed_seq: bool = False) -> Any:
        """`[s, 1, r]` or `[s, 1, 1, r]`."""
        pack, ndim = found
        self._sequence.rotation(pack)
        angles = pack.rotations
        assert isinstance(angles, _Angles), "the sequence is of this model"
        radians = angles.radians.view(-1, *(1,) * (ndim - 2), angles.radians.shape[-1])
        return (radians, angles.stretch) if self._stretched else radians


def _frequencies(original: RotaryEmbedding) -> Frequencies:
    """Of Megatron's embedding: what a token at position 1 turns by."""
    found = original.get_emb(2)
    angles, stretch = found if isinstance(found, tuple) else (found, 1.0)
    return Frequencies(angles[1].flatten()[: angles.shape[-1] // 2].clone(), stretch)
