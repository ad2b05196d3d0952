"""The core attention that Megatron's self-attention layers call, and what a TransformerConfig requires of it.

Core attention either applies a setting of Megatron's TransformerConfig or refuses it; it ignores none. Most fields
concern Megatron's layers around core attention, which work token by token. `tests/mcore/test_settings.py` lists every
field, and fails when Megatron adds one.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from ..core.errors import refuse
from ..core.kernels.no_grad import first_order
from ..core.plans.mask import Mask, Window
from .pack import Pack, attend_rows, padded_mask, read_spans
from .sequence import ShardedSequence
from .stores import AttentionTape

logger = logging.getLogger(__name__)

_PADDED = {AttnMaskType.padding_causal: True, AttnMaskType.padding: False}
_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False} | _PADDED

_NO_MAXIMA = "Unset it; no kernel here returns the maxima of logits."
_ZIGZAG = "Megatron's own zigzag layout; a ShardedSequence without a length, where Megatron slices, accepts it"
_PRECISION = "Attention is computed in the model's precision; unset it."
_OWN_TOKENS = "Which tokens are dropped would depend on how ranks divide the sequence; unset it."
_BALANCING = ("none", "aux_loss", "seq_aux_loss")  # `experts.SummedLossRouter` computes both losses
REFUSED: dict[str, tuple[Any, str]] = {
    "experimental_attention_variant": (None, "These are other kinds of attention; unset it."),
    "mtp_num_layers": (None, f"Unset it: it shifts tokens in {_ZIGZAG}."),
    "is_hybrid_model": (False, "Give with_context_parallel the spec of the whole stack, not of a layer."),
    "hybrid_context_parallel": (False, "It packs sequences that have no plan; unset it."),
    "mrope_section": (None, "Tokens have one position here; unset it."),
    "fused_single_qkv_rope": (False, "RoPE is applied in core attention; unset it."),
    "flash_decode": (False, "It bypasses core attention; unset it."),
    "batch_invariant_mode": (False, "Plans merge results in an order that depends on lengths; unset it."),
    "fp8_dot_product_attention": (False, _PRECISION),
    "fp8_multi_head_attention": (False, _PRECISION),
    "use_kitchen_attention": (False, _PRECISION),
    "qk_clip": (False, _NO_MAXIMA),
    "log_max_attention_logit": (False, _NO_MAXIMA),
    "moe_expert_capacity_factor": (None, _OWN_TOKENS),
    "moe_expert_rank_capacity_factor": (None, _OWN_TOKENS),
}
"""The only supported value of each field, and the remedy for other values."""
OF_LAYOUT = (*("mtp_num_layers", "mrope_section"), *("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"))
"""The fields that are refused for the layout alone: where Megatron slices, ranks have Megatron's own equal shares."""


def _check_supported(config: TransformerConfig, deterministic: bool, megatron_slices: bool, in_stack: bool) -> None:
    """Raise ValueError for a setting that would make results differ from Megatron's."""
    for name, (supported, remedy) in REFUSED.items():
        if megatron_slices and name in OF_LAYOUT:
            continue
        value = getattr(config, name, supported)
        if value != supported and not (in_stack and name == "is_hybrid_model"):
            expected = "null" if supported is None else supported
            raise refuse(name, value, f"{expected} with context-parallel attention", remedy)
    if config.deterministic_mode and not deterministic:
        remedy = "Set deterministic=True in ContextParallelAttention, too."
        raise refuse("deterministic_mode", True, "False with kernels that need not be deterministic", remedy)
    if config.num_moe_experts is not None and not megatron_slices:
        _check_experts(config)


def _check_experts(config: TransformerConfig) -> None:
    """Refuse experts whose results would depend on how ranks divide a sequence."""
    balancing = config.moe_router_load_balancing_type
    if not {*([balancing] if isinstance(balancing, str) else balancing)} <= {*_BALANCING}:
        remedy = "Other balancing counts the tokens of one rank, or of all micro-batches so far."
        raise refuse("moe_router_load_balancing_type", balancing, f"one of {', '.join(_BALANCING)}", remedy)
    dispatcher = config.moe_token_dispatcher_type
    if dispatcher == "allgather" and config.expert_model_parallel_size > 1 and config.context_parallel_size > 1:
        expected = "alltoall with context and expert parallelism"
        raise refuse("moe_token_dispatcher_type", dispatcher, expected, "Ranks may hold unequal shares of a sequence.")


def layer_window(config: TransformerConfig, layer_number: int) -> Window:
    """Return how many tokens before and after itself a token sees in a layer, by Megatron's own rule; None means all.

    layer_number: counts from 1 over all pipeline stages.

    Raises:
        ValueError: a negative size: TransformerEngine sees all tokens with it, Megatron's own attention other tokens.
    """
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None, None
    before, after = config.window_size
    if before < 0 or after < 0:
        remedy = "Unset it, or let window_attn_skip_freq leave this layer out, if the layer sees all tokens."
        raise refuse("window_size", config.window_size, "numbers of tokens from 0 on", remedy)
    return before, after


def _check_window(window: Window, causal: bool) -> None:
    """Refuse a window over later tokens in a causal layer: Megatron's own attention shows them there."""
    before, after = window
    if causal and after:
        expected = f"({before}, 0) with a causal mask"
        raise refuse("window_size", window, expected, "Set the second number to 0, or attn_mask_type to no_mask.")


def _padding_tensor(
    attention_mask: Tensor | None, mask_type: AttnMaskType, params: PackedSeqParams | None
) -> Tensor | None:
    """Return the mask tensor if it says which tokens are padding, or None if the layer needs none."""
    if attention_mask is None:
        if mask_type in _PADDED and params is None:
            remedy = "Pass the mask, or set attn_mask_type to causal or no_mask."
            raise refuse("attention_mask", None, f"a mask tensor or packed documents with {mask_type.name}", remedy)
        return None
    if mask_type in _PADDED and (params is None or isinstance(params, Pack)):
        return attention_mask
    if not _CAUSAL[mask_type]:
        remedy = "Leave it out, or set attn_mask_type=AttnMaskType.padding for padding of a plain sequence."
        raise refuse("attention_mask", "given", f"None with {mask_type.name} of these tokens", remedy)
    _say_that_masks_are_ignored()
    return None


@cache
def _say_that_masks_are_ignored() -> None:
    """Say once that a causal model needs no mask, which takes memory that is quadratic in the length."""
    logger.warning(
        "attention_mask: ignored in causal layers, as by TransformerEngine. To save its memory, start Megatron-LM with "
        "--no-create-attention-mask-in-dataloader."
    )


class _SinksInFp32(torch.autograd.Function):
    """Learnable sinks of 16 bits, in fp32. Their gradient is added to DDP's fp32 sum: otherwise the part of every rank
    and micro-batch would be rounded to 16 bits."""

    @staticmethod
    def forward(ctx: Any, sinks: torch.nn.Parameter) -> Tensor:
        ctx.sinks = sinks
        return sinks.float()

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        sinks, (grad,) = ctx.sinks, grads
        if getattr(sinks, "main_grad", None) is None:
            return grad.to(sinks.dtype)
        sinks.main_grad.add_(grad)
        sinks.grad_added_to_main_grad = True
        return torch.zeros_like(sinks)  # DDP's hook needs a gradient, which it ignores


class ContextParallelCoreAttention(MegatronModule):  # type: ignore[misc]
    """Context-parallel attention with the interface of Megatron's `core_attention`.

    Args:
        sequence: shared by all layers of the model; pass it through the spec (see `spec.with_context_parallel`).
        in_stack: whether the layer is in a stack that refuses unsupported layers (see `stack.with_layers`).
        The others are Megatron's own.

    Attributes:
        window: see `layer_window`.
        rotates: whether this layer applies RoPE (`no_rope_freq`).
        softmax_offset: the sinks `[h/tp]` that `softmax_type` requires, or None. With `learnable` it is a parameter
            with Megatron's name and sharding. Every context-parallel rank holds the gradient of its own queries, as
            for any other weight.

    Raises:
        ValueError: a setting of the model whose results would depend on how ranks divide a sequence, or heads that the
            schedule cannot divide among the ranks.
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
        in_stack: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        del cp_comm_type  # TransformerEngine's mode; the schedule of `sequence` decides here
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if attention_type != "self":
            raise refuse("attention_type", attention_type, "self", "Use it for self-attention only.")
        if dropout != 0:
            raise refuse("attention_dropout", dropout, "0 with context-parallel attention", "Set it to 0.")
        _check_supported(config, sequence.attention.deterministic, sequence.megatron_slices, in_stack)
        world = pg_collection.cp.size() if pg_collection is not None else sequence.attention.world
        if world != sequence.attention.world:
            expected = f"the sequence's {sequence.attention.world}"
            raise refuse("context-parallel size", world, expected, "Build the sequence over pg_collection.cp.")
        tensor_parallel, heads = config.tensor_model_parallel_size, config.num_attention_heads
        groups = heads if config.multi_latent_attention else config.num_query_groups or heads
        sequence.attention.check_heads(heads // tensor_parallel, max(1, groups // tensor_parallel))
        self.layer_number = layer_number
        self.window = layer_window(config, layer_number)
        _check_window(self.window, _CAUSAL.get(attn_mask_type, False))
        sequence.windows.add(self.window)
        self._tp = getattr(pg_collection, "tp", None) or parallel_state.get_tensor_model_parallel_group(False)
        self._make_sinks(config)
        self.rotates = not (config.no_rope_freq and config.no_rope_freq[layer_number - 1])
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.sequence = sequence
        self._tape: AttentionTape | None = None

    def _make_sinks(self, config: TransformerConfig) -> None:
        self.softmax_offset: Tensor | None
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
            return
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        heads = torch.zeros(config.num_attention_heads, device=device, dtype=config.params_dtype)
        if config.softmax_type == "learnable" and config.perform_initialization:
            config.init_method(heads)  # all heads, so that values are the same at every tensor-parallel size
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
        """Return learnable sinks, sharded by heads, as Megatron does."""
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
        """Record calls on `tape`, or replay them from it."""
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
        """Compute attention of this rank's queries over the whole sequence.

        Args:
            query: `[s, b, h/tp, d]`, or `[s, h/tp, d]` from Megatron's layers for packed (thd) documents.
            key, value: `[s, b, g/tp, d]` and `[s, b, g/tp, e]`, or without b.
            attention_mask: with the mask types padding and padding_causal of a plain sequence, which keys are padding
                (see `pack.read_spans`). It is ignored in causal layers, as by TransformerEngine, otherwise None.
            packed_seq_params: a `ShardedSequence.pack`; or Megatron's own, with `cu_seqlens_q` of the whole sequence
                and not of one rank; or None for a plain sequence. Padding between documents attends to itself only,
                and no other token attends to it.

        Returns:
            `[s, b, h/tp * e]`; b is 1 for packed documents.

        Raises:
            ValueError: tokens that are not this rank's, a mask tensor that is no padding, a bias, unsupported packed
                documents, the mask type arbitrary, a padded one with neither a mask tensor nor packed documents, or a
                causal one for a layer whose window includes later tokens.
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if mask_type not in _CAUSAL:
            expected = ", ".join(each.name for each in _CAUSAL)
            raise refuse("attn_mask_type", mask_type, f"one of {expected}", "Pass documents, windows or padding.")
        if attention_bias is not None:
            raise refuse("attention_bias", "given", "None", "Plans have no biases; leave it out.")
        causal, hidden = _CAUSAL[mask_type], _padding_tensor(attention_mask, mask_type, packed_seq_params)
        _check_window(self.window, causal)
        sequence = self.sequence
        pack = sequence.pack_of(packed_seq_params, query.shape[0])
        sequence.check_slices(pack, packed_seq_params)
        if query.ndim == 3:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        self._check_tokens(query, pack)
        rotation = sequence.rotation(pack, self.window)
        if rotation is not None and self.rotates:
            query, key = rotation(query), rotation(key)
        mask = pack.mask(causal, self.window)
        if hidden is None:
            return self._attend(query, key, value, mask).flatten(2)
        spans = read_spans(hidden, pack, sequence.attention, query.shape[1], causal)
        masks = [padded_mask(mask, span, causal, self.window) for span in spans]
        return attend_rows(self._attend, query, key, value, masks).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        attention, scale, sink = self.sequence.attention, self.softmax_scale, self.softmax_offset
        if sink is not None and sink.requires_grad and sink.dtype.itemsize < 4:
            sink = _SinksInFp32.apply(sink)  # type: ignore[no-untyped-call]
        if self._tape is not None:
            return self._tape.attend(attention, (query, key, value), mask=mask, scale=scale, sink=sink)
        return attention(query, key, value, mask=mask, scale=scale, sink=sink, inference=not self.training)

    def _check_tokens(self, query: Tensor, pack: Pack) -> None:
        attention = self.sequence.attention
        if len(query) != pack.num_local_tokens:
            raise ValueError(
                f"query has {len(query)} tokens: expected {pack.num_local_tokens}, the share of rank "
                f"{attention.rank} of {attention.world} in {pack.length}. Pass the model what "
                "sequence.shard_batch(batch) returns; for another length, pass a sequence.pack([length]) to both."
            )
