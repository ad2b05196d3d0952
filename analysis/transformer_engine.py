"""TransformerEngine's context-parallel attention in place of ours, in the same layers, steps and data, to compare.

`analysis.training_cases` trains with it: a case with the word `baseline=te_p2p`, `te_all_gather` or `te_a2a`.
"""

import importlib
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.config import Config, token_unit
from megatron_longctx.core.attention import AttentionResult, ContextParallelAttention
from megatron_longctx.core.errors import refuse
from megatron_longctx.core.plans import Mask
from megatron_longctx.core.plans import mask as masks
from megatron_longctx.core.plans.slices import FAR
from megatron_longctx.mcore.sequence import ShardedSequence

BASELINES = ("te_p2p", "te_all_gather", "te_a2a")

_MAX_PACKS = 64
"""The most packs whose lengths stay on the device."""


def build_sequence(baseline: str, config: Config, group: dist.ProcessGroup) -> ShardedSequence:
    """Build the trainer's sequence of `config.data.seq_length` tokens with TransformerEngine's attention."""
    kind, unit = baseline.removeprefix("te_"), token_unit(config)
    return ShardedSequence(TransformerEngineAttention(group, kind, unit=unit), config.data.seq_length)


class TransformerEngineAttention(ContextParallelAttention):
    """TransformerEngine's attention, with every document in zigzag order over all ranks.

    TransformerEngine requires documents of a multiple of 2n tokens.

    Args:
        kind: TransformerEngine's `cp_comm_type`: p2p, all_gather or a2a.
        group, unit: as in `ContextParallelAttention`.
    """

    def __init__(self, group: dist.ProcessGroup | None, kind: str, *, unit: int = 1) -> None:
        super().__init__(group, schedule="all_gather", layout="per_document", unit=unit)
        self._kind = kind
        self._modules: dict[tuple[Any, ...], Any] = {}
        self._lengths: OrderedDict[Mask, dict[str, Any]] = OrderedDict()
        self._stream: torch.cuda.Stream | None = None

    def prepare(self, mask: Mask) -> None:
        """Plan which rank holds which token; TransformerEngine does the rest in every call."""
        self.plan(mask)

    def check_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """Refuse heads that a2a cannot divide among the ranks."""
        if self._kind == "a2a" and (num_heads % self.world or num_kv_heads % self.world):
            expected = f"a divisor of the heads of queries ({num_heads}) and keys ({num_kv_heads})"
            raise refuse("parallelism.context_parallel_size", self.world, expected, "Choose te_p2p or te_all_gather.")

    def measure_times(self) -> None:
        """Do nothing: TransformerEngine reports neither waiting nor computing time."""

    def times(self) -> None:
        return None

    def forward(self, *_: Any, **__: Any) -> AttentionResult:
        remedy = "Set recompute=none or recompute=layer."
        raise refuse("recompute.mode", "attention_output", "a mode that runs attention again", remedy)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | int,
        scale: float | None = None,
        sink: Tensor | None = None,
        result: AttentionResult | None = None,
        inference: bool = False,
    ) -> Tensor:
        """Compute attention of q `[s, b, h, d]` to k and v `[s, b, g, d]`, as `[s, b, h, d]`.

        Raises:
            ValueError: a document whose length is not a multiple of 2n, sinks, or windows with p2p.
        """
        mask = masks.causal(mask) if isinstance(mask, int) else mask
        packed = len(mask.documents) > 1
        self.check_mask(mask, sink)
        attention = self._module(q, k, mask, packed, scale)
        if not packed:
            out: Tensor = attention(q, k, v)  # [s, b, h * d]
            return out.view(q.shape)
        if q.shape[1] != 1:
            raise refuse("batch", q.shape[1], "1 with packed documents", "Use one pack per micro-batch.")
        out = attention(q[:, 0], k[:, 0], v[:, 0], **self._packed_arguments(mask, q.device))
        return out.view(q.shape)

    def check_mask(self, mask: Mask, sink: Tensor | None = None) -> None:
        """Raise ValueError for what TransformerEngine does not support."""
        if sink is not None:
            raise refuse("model.sinks", "set", "none", "TransformerEngine's attention is compared without sinks.")
        if self._kind == "p2p" and mask.has_windows and self.world > 1:
            remedy = "TransformerEngine's p2p has no windows: choose te_all_gather or te_a2a."
            raise refuse("baseline", "te_p2p", "one that supports model.window", remedy)
        unit = 2 * self.world
        if self.world > 1 and (odd := [stop - start for start, stop, _ in mask.documents if (stop - start) % unit]):
            expected = f"documents of a multiple of 2 x {self.world} ranks, for TransformerEngine"
            remedy = "Pad them with Megatron's PackedSeqParams, or leave out the baseline: ours supports any."
            raise refuse("document", f"{odd[0]} tokens", expected, remedy)

    def _module(self, q: Tensor, k: Tensor, mask: Mask, packed: bool, scale: float | None) -> Any:
        causal = all(each.hi == 0 for each in mask.slices if each.num_keys > 1)
        lowest = min((each.lo for each in mask.slices if each.lo != -FAR), default=None)
        highest = 0 if causal else max((each.hi for each in mask.slices if each.hi != FAR), default=-1)
        key = q.shape[2], k.shape[2], q.shape[3], packed, causal, lowest, highest, scale
        if key not in self._modules:
            window = {} if lowest is None else {"window_size": (-lowest, highest)}
            module = importlib.import_module("transformer_engine.pytorch").DotProductAttention(
                q.shape[2],
                q.shape[3],
                num_gqa_groups=k.shape[2],
                attention_dropout=0.0,
                qkv_format="thd" if packed else "sbhd",
                attn_mask_type=("padding_" * packed) + "causal" if causal else ("padding" if packed else "no_mask"),
                softmax_scale=scale,
                **window,
            )
            if self.world > 1:
                if q.is_cuda:
                    self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
                group = self._group_to_send()
                ranks = dist.get_process_group_ranks(group)
                module.set_context_parallel_group(group, ranks, self._stream, self._kind)
            self._modules[key] = module
        return self._modules[key]

    def _packed_arguments(self, mask: Mask, device: torch.device) -> dict[str, Any]:
        """Return TransformerEngine's arguments for the unpadded documents of all ranks."""
        if mask not in self._lengths:
            stops = [stop for _, stop, _ in mask.documents]
            starts = torch.tensor([0, *stops], dtype=torch.int32, pin_memory=device.type == "cuda")
            starts = starts.to(device, non_blocking=True)
            longest = -(-max(stop - start for start, stop, _ in mask.documents) // 64) * 64
            names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
            self._lengths[mask] = dict.fromkeys(names, starts) | {"max_seqlen_q": longest, "max_seqlen_kv": longest}
            if len(self._lengths) > _MAX_PACKS:
                self._lengths.popitem(last=False)
        return self._lengths[mask]
