"""RoPE for any layout: in core attention, and in Megatron's multi-latent attention (MLA).

Without TransformerEngine, Megatron's own RoPE reads and writes queries and keys five times, and rounds cosines to the
model's dtype. Here core attention applies it in one fused pass, which computes in fp32 and rounds once. MLA keeps
Megatron's code, but gets the angles of the positions that a rank holds.

`rotate` is the rotation itself. `torch.compile` would compile it for one shape, and every prompt has a new one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
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

from ..core.errors import refuse
from ..core.kernels.fused import load_fused
from ..core.kernels.no_grad import first_order
from ..core.plans.mask import Window
from ..models.rope_frequencies import Frequencies
from .pack import UNBOUNDED, Pack
from .sequence import Rope, ShardedSequence
from .version import norms_of_latents


@dataclass(frozen=True)
class Rotation:
    """The rotation of one rank's tokens.

    `cos` and `sin` are fp32 `[s, r / 2]`, for every token and pair of elements, and include the attention factor of the
    scaling. r is at most the head dimension; elements from r on are not rotated.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False  # whether elements (2i, 2i + 1) form a pair; otherwise (i, i + r / 2) do

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate `[s, b, h, d]`, differentiably; return it contiguous, in x's dtype."""
        return _Rotate.apply(x, self.cos, self.sin, self.interleaved)  # type: ignore[no-any-return, no-untyped-call]

    def rotate_both(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys `[s, ..., d]` in one launch, without gradients; return each contiguous."""
        q, k = rotate((q, k), self.cos, self.sin, self.interleaved)
        return q, k

    def rotate_into(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, slots: Tensor | slice) -> Tensor | None:
        """Rotate queries and keys, and store keys and values, in one kernel; None, and nothing is stored, on CPUs.

        Args:
            q: `[s, 1, g, h / g, d]`. k, v: `[s, 1, g, 1, d]`.
            rows: a layer of the cache, `[slots, 2, 1, g, d]` contiguous, of their dtype.
            slots: of the tokens; int64 `[s]` if they are not neighbours.

        Returns:
            the queries, contiguous.
        """
        alike = q.dtype == k.dtype == v.dtype == rows.dtype
        impl = _fused() if q.is_cuda and alike and _fusable((q, k, v), self.cos, self.sin) else None
        if impl is None:
            return None
        into = (rows[slots], None) if isinstance(slots, slice) else (rows, slots)
        return impl.rotate_into(q, k, v, self.cos, self.sin, self.interleaved, *into)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Rotations:
    """The rotations of layers with full attention and of layers with a window, which may differ."""

    full: Rotation
    windowed: Rotation

    def of(self, window: Window) -> Rotation:
        return self.full if window == UNBOUNDED else self.windowed


class ShardedRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc]
    """RoPE for any layout, in place of `GPTModel.rotary_pos_emb`, which supports only zigzag of even lengths.

    It gives the sequence its rotations, which core attention applies. When the model calls it, it returns None, so
    Megatron's layers rotate nothing themselves.

    Args:
        original: the embedding that it replaces.
        full: frequencies of layers with full attention; None for those of `original`.
        windowed: frequencies of layers with a window; None for the same as other layers.

    Raises:
        ValueError: an embedding that overrides the computation of angles (YaRN, multimodal), or a sequence of a model
            with other angles.
    """

    needs_own_batches = True

    def __init__(
        self,
        original: RotaryEmbedding,
        sequence: ShardedSequence,
        full: Frequencies | None = None,
        windowed: Frequencies | None = None,
    ) -> None:
        overridden = ("forward", "get_emb", "get_freqs_non_repeated")
        if any(getattr(type(original), name, None) is not getattr(RotaryEmbedding, name) for name in overridden):
            raise refuse(
                "rotary_pos_emb",
                type(original).__name__,
                "Megatron's RotaryEmbedding (position_embedding_type=rope)",
                "Multimodal positions are not supported. YaRN is, with ShardedRotaryEmbedding's own frequencies "
                "(model.rope_scaling), and so are rope_scaling and seq_len_interpolation_factor.",
            )
        torch.nn.Module.__init__(self)
        self.rotary_interleaved = original.rotary_interleaved
        self.seq_len_interpolation_factor = original.seq_len_interpolation_factor
        self.inv_freq = original.inv_freq
        self.cp_group = original.cp_group
        frequencies = [full or Frequencies(original.inv_freq)]
        if windowed is not None and not frequencies[0].equals(windowed):
            frequencies.append(windowed)
        self._frequencies = tuple(x.to(original.inv_freq.device) for x in frequencies)
        sequence.set_rope(self)

    def equals(self, other: Any) -> bool:
        return (
            isinstance(other, ShardedRotaryEmbedding)
            and len(other._frequencies) == len(self._frequencies)
            and all(x.equals(own) for x, own in zip(other._frequencies, self._frequencies, strict=True))
            and other.rotary_interleaved == self.rotary_interleaved
            and other.seq_len_interpolation_factor == self.seq_len_interpolation_factor
        )

    def rotations_of(self, pack: Pack) -> Rotations:
        """Return the rotations of this rank's tokens, at their positions inside their documents."""
        return self.rotations(pack.positions(self.inv_freq.device))

    def rotations(self, positions: Tensor) -> Rotations:
        """Return the rotations of tokens at these positions, int64 `[s]`."""
        rotations = [self._rotation(positions, frequencies) for frequencies in self._frequencies]
        return Rotations(rotations[0], rotations[-1])

    def _rotation(self, positions: Tensor, frequencies: Frequencies) -> Rotation:
        exact = positions.double()  # at a million tokens, fp32 angles are off by 0.03 rad
        if self.seq_len_interpolation_factor is not None:
            exact = exact * (1 / self.seq_len_interpolation_factor)
        angles = torch.outer(exact, frequencies.inverse.double())
        cos, sin = angles.cos(), angles.sin()
        if frequencies.attention_factor != 1:
            cos, sin = cos * frequencies.attention_factor, sin * frequencies.attention_factor
        return Rotation(cos.float(), sin.float(), self.rotary_interleaved)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> None:
        """Return None: Megatron's layers rotate nothing."""


class _ChecksRope:
    """A self-attention layer that refuses Megatron's own RoPE where it would rotate tokens by wrong positions."""

    core_attention: Any

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """Call Megatron's layer, which gets `rotary_pos_emb` only if the model has Megatron's own RoPE."""
        sequence = getattr(self.core_attention, "sequence", None)  # none if the core attention was replaced again
        if sequence is not None and kwargs.get("rotary_pos_emb") is not None:
            sequence.check_megatrons_rope(kwargs.get("packed_seq_params"))
        return super().forward(hidden_states, attention_mask, *args, **kwargs)  # type: ignore[misc]


@cache
def checking_rope(module: type) -> type:
    """Return a subclass of a self-attention layer that checks its RoPE, under the same name."""
    return (
        module
        if issubclass(module, _ChecksRope)
        else type(module.__name__, (_ChecksRope, module), {"__module__": module.__module__})
    )


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return rotate((x,), cos, sin, interleaved)[0]

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotate(grads[:1], cos, sin, ctx.interleaved, inverse=True)[0], None, None, None


_REFUSED_WITH_LATENTS = {
    "apply_rope_fusion": "Its kernel rotates tokens in Megatron's own zigzag layout.",
    "cache_mla_latents": "It is for Megatron's inference.",
    "mla_down_proj_fusion": "It is another layer.",
}


class LatentSelfAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's MLA over sharded sequences; `spec.with_context_parallel` puts it into a spec.

    Args:
        frequencies: RoPE frequencies; None for Megatron's embedding's.
        The others are Megatron's own.

    Raises:
        ValueError: settings that assume Megatron's layout, or a sequence of a model with other angles.
    """

    def __init__(
        self, *args: Any, sequence: ShardedSequence, frequencies: Frequencies | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        for name, remedy in _REFUSED_WITH_LATENTS.items():
            if getattr(self.config, name, False):
                raise refuse(name, True, "False with context-parallel attention", f"{remedy} Unset it.")
        if self.config.softmax_scale is not None:
            self.softmax_scale = self.core_attention.softmax_scale = self.config.softmax_scale
        self._sequence = sequence
        original: Any = self.rotary_pos_emb
        del self.rotary_pos_emb  # a registered submodule can only be replaced by another module
        frequencies = (frequencies or _frequencies_of(original)).to(original.inv_freq.device)
        self.rotary_pos_emb: Any = _LatentRope(sequence, frequencies, self.config.rope_type != "rope")
        sequence.set_rope(self.rotary_pos_emb)
        if self.tp_group.size() > 1:
            if not self.config.sequence_parallel:
                remedy = "Without it, Megatron sums gradients of norms and of the keys' rotated part incorrectly."
                raise refuse("sequence_parallel", False, "True with MLA and tensor parallelism", remedy)
            self.linear_kv_down_proj.register_forward_hook(self._gather_columns)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        """Run Megatron's layer; `packed_seq_params` are those of `ShardedSequence.pack_of`.

        Raises:
            ValueError: a call of Megatron's inference.
        """
        if kwargs.get("inference_context") is not None or kwargs.get("inference_params") is not None:
            raise refuse("inference_context", "given", "None with MLA", "MLA supports training, but not inference.")
        if (packed := kwargs.get("packed_seq_params")) is not None:
            # For its own parameters, Megatron would lay out the documents itself.
            kwargs["packed_seq_params"] = pack = self._sequence.pack_of(packed)
            self._sequence.check_slices(pack, packed)
        return super().forward(hidden_states, attention_mask, **kwargs)  # type: ignore[no-any-return]

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return norms_of_latents(self.config, submodules)

    def _gather_columns(self, module: torch.nn.Module, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Return all columns of the latent and of the keys' rotated part, for this tensor-parallel rank's rows.

        From these, Megatron gathers the rows of the rotated part, and sums its gradient. Every rank has the part of
        the gradient from its own heads. If Megatron gathers columns itself (local layers), it sums nothing.
        """
        columns, bias = output
        if columns.shape[-1] != self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            columns = gather_from_tensor_model_parallel_region(columns, group=self.tp_group)
            # A view would keep the rows of all ranks alive.
            columns = scatter_to_sequence_parallel_region(columns, group=self.tp_group).clone()
        return columns, bias


@dataclass(frozen=True)
class _Angles:
    """The angles of one rank's tokens."""

    radians: Tensor  # fp32 `[s, r]`, from 0 to 2 pi, for all r elements as in Megatron
    attention_factor: float  # see `Frequencies`

    def of(self, window: Window) -> None:
        """Return None: core attention rotates nothing, because Megatron's layer does."""


class _LatentRope:
    """RoPE of a model with MLA: its `ShardedSequence.rope`, and the `rotary_pos_emb` that Megatron's layers call.

    returns_factor: whether Megatron expects angles and their attention factor.
    """

    needs_own_batches = False

    def __init__(self, sequence: ShardedSequence, frequencies: Frequencies, returns_factor: bool) -> None:
        self._sequence, self._frequencies, self._returns_factor = sequence, frequencies, returns_factor

    def equals(self, other: Rope) -> bool:
        return isinstance(other, _LatentRope) and other._frequencies.equals(self._frequencies)

    def rotations_of(self, pack: Pack) -> _Angles:
        inverse = self._frequencies.inverse.double()  # at a million tokens, fp32 angles are off by 0.03 rad
        angles = torch.outer(pack.positions(inverse.device).double(), inverse).remainder(2 * math.pi).float()
        return _Angles(torch.cat((angles, angles), dim=-1), self._frequencies.attention_factor)

    def get_rotary_seq_len(
        self, context: Any, transformer: Any, hidden: Tensor, config: Any, packed: PackedSeqParams | None
    ) -> tuple[Pack, int]:
        """Return the micro-batch's pack and the number of dimensions of queries.

        Queries are `[s, b, h, d]`; Megatron drops b if a pack has one sequence.
        """
        tokens = hidden.shape[0] * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        return self._sequence.pack_of(packed, tokens), 3 if packed is not None and hidden.shape[1] == 1 else 4

    def __call__(self, pack_and_ndim: tuple[Pack, int], packed_seq: bool = False) -> Any:
        """Return the angles as `[s, 1, r]` or `[s, 1, 1, r]`."""
        pack, ndim = pack_and_ndim
        self._sequence.rotation(pack)
        angles = pack.rotations
        assert isinstance(angles, _Angles), "the sequence belongs to this model"
        radians = angles.radians.view(-1, *(1,) * (ndim - 2), angles.radians.shape[-1])
        return (radians, angles.attention_factor) if self._returns_factor else radians


def _frequencies_of(original: RotaryEmbedding) -> Frequencies:
    """Return the frequencies of Megatron's embedding: its angles at position 1."""
    embedding = original.get_emb(2)
    angles, attention_factor = embedding if isinstance(embedding, tuple) else (embedding, 1.0)
    return Frequencies(angles[1].flatten()[: angles.shape[-1] // 2].clone(), attention_factor)


_fused = partial(load_fused, f"{__package__}.rotate", "RoPE")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def rotate(
    tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool = False, inverse: bool = False
) -> list[Tensor]:
    """Rotate one or two tensors of the same tokens, on GPUs in one kernel.

    Args:
        tensors: one or two `[s, b, h, d]`, or `[s, b, g, h / g, d]` (heads in groups), of one dtype, any strides.
        cos, sin: fp32 `[s, r / 2]`, contiguous, for every token and pair of elements; r <= d, and elements from r on
            are copied unchanged.
        interleaved: elements (2i, 2i + 1) form a pair, otherwise (i, i + r / 2).
        inverse: rotate by the negative angles, as gradients need it.

    Returns:
        contiguous tensors like these, computed in fp32 (or the tensors' precision, if higher) and rounded once.
    """
    x = tensors[0]
    impl = _fused() if x.is_cuda and _fusable(tensors, cos, sin) else None
    rotated: list[Tensor] = (impl.rotate_triton if impl else rotate_torch)(tensors, cos, sin, interleaved, inverse)
    return rotated


def rotate_torch(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> list[Tensor]:
    """Run `rotate` in plain PyTorch: the reference, and the way on CPU."""
    return [_rotated(x, cos, -sin if inverse else sin, interleaved) for x in tensors]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    spread = (slice(None), *[None] * (x.ndim - 2))
    cos, sin = cos[spread], sin[spread]
    front, rest = x[..., : 2 * cos.shape[-1]].to(torch.promote_types(x.dtype, cos.dtype)), x[..., 2 * cos.shape[-1] :]
    if interleaved:
        a, b = front[..., 0::2], front[..., 1::2]
        front = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = front.chunk(2, -1)
        front = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((front.to(x.dtype), rest), -1).contiguous()


def _fusable(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor) -> bool:
    angles = cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
    return angles and all(x.dtype in _DTYPES and x.stride(-1) == 1 and x.numel() for x in tensors)
