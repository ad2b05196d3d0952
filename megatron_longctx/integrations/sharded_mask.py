"""The mask of a sharded batch for `transformers`, and which positional embeddings are exact on shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ..core.attention import ContextParallelAttention
from ..core.attention.sharding import check_equal_batches, checksum
from ..core.errors import refuse
from ..core.plans import Mask
from ..core.plans import mask as masks

# Positions in these models' embeddings do not begin with 0, or are counted by the model itself.
_OTHER_POSITIONS = ("roberta", "camembert", "data2vec-text", "xmod", "whisper")


class LayerMask(NamedTuple):
    """What a layer's tokens see of the whole sequence, and the attention that knows which rank has which."""

    attention: ContextParallelAttention
    mask: Mask


class ShardedMask:
    """The documents of a sharded batch, in the place of its attention mask `[b, s]`.

    It has what transformers asks of a mask before it makes those of the layers. What another implementation asks is
    refused.
    """

    ndim = 2

    def __init__(
        self,
        name: str,
        attention: ContextParallelAttention,
        documents: tuple[int, ...],
        parents: Sequence[int] | None,
        words: Tensor,
    ) -> None:
        self.name, self._attention, self.documents, self._parents = name, attention, documents, parents
        self._device, layout = words.device, attention.layout(masks.documents(documents, parents=parents))
        self._masks: dict[int | None, LayerMask] = {}
        self._layout = layout
        self._words = words
        self.shape = torch.Size([words.shape[0], layout.num_tokens(attention.rank)])

    @_disable_dynamo  # a compiler would trace the planning
    def of_window(self, window: int | None) -> LayerMask:
        """Return what layers see whose tokens see `window` tokens, themselves among them; None for no bound."""
        if window not in self._masks:
            bounds = (None, None) if window is None else (window - 1, 0)
            # Layouts do not depend on windows, so all layers have the same tokens.
            mask = masks.documents(self.documents, parents=self._parents, window=bounds)
            self._masks[window] = LayerMask(self._attention, mask)
        return self._masks[window]

    def check_equal(self) -> None:
        """Refuse a batch of which ranks gave `shard` different ones."""
        check_equal_batches(self._attention, self.of_window(None).mask, lambda: checksum(self._words))

    def check_asked(self) -> None:
        """Refuse the model that has computed the batch if it has not asked what its tokens see."""
        if not self._masks:
            expected = "attention that transformers dispatches"
            raise refuse("model", "no layer asked for the mask", expected, "Use another model: it ignores masks.")

    @_disable_dynamo
    def check_positions(self, config: Any) -> None:
        """Refuse positional embeddings that would not be those of each document alone, on one rank.

        transformers takes the frequencies of dynamic RoPE and of LongRoPE from the last position of a call.
        """
        if any(each in config.model_type for each in _OTHER_POSITIONS):
            raise refuse("model_type", config.model_type, "positions that begin with 0", "Use another model.")
        given = getattr(config, "rope_parameters", None) or {}
        for rope in (given, *given.values()):  # of all layers, or by the kind of layer
            kind = rope.get("rope_type", "") if isinstance(rope, dict) else ""
            if "dynamic" in kind:
                self._check_ends(kind, config.max_position_embeddings, math.inf)
            elif kind == "longrope":
                self._check_ends(kind, most := rope["original_max_position_embeddings"], most)

    def _check_ends(self, kind: str, most: int, least: float) -> None:
        """Refuse documents with more than `most` tokens, unless all have more than `least`, and on every rank."""
        mask = self.of_window(None).mask
        ends = [each.position + each.stop - each.start for each in mask.documents]
        if max(ends) <= most:
            return
        positions = positions_of(mask)
        for rank in range(self._attention.world):
            spans = [positions[span.start : span.stop] for _, span in self._layout.slot_spans(rank)]
            ends += [1 + max(int(each.max()) for each in spans)] if spans else []
        if min(ends) <= least:
            remedy = "Shorten them, or use RoPE whose frequencies depend on no length."
            raise refuse(f"rope_type {kind}", short(ends), f"documents of at most {most} tokens", remedy)

    def to(self, *_: Any, **__: Any) -> ShardedMask:
        return self

    def sum(self) -> Tensor:
        """Return the number of this rank's tokens, which trainers count."""
        return torch.tensor(self.shape.numel(), device=self._device)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        remedy = (
            "Make each model from a config of its own, with attn_implementation as it was registered, and leave out "
            "what needs the mask (output_router_logits, recurrent layers)."
        )
        raise refuse("attention_mask", "used by another implementation", f"that of {self.name!r} alone", remedy)

    __getitem__ = __eq__ = __invert__ = __mul__ = __rsub__ = _refuse
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(each for each in args if isinstance(each, cls))._refuse()

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        self._refuse()


def positions_of(mask: Mask) -> Tensor:
    """Return the position of every token in its document, or on its branch, `[S]`."""
    return torch.cat([torch.arange(each.stop - each.start) + each.position for each in mask.documents])


def short(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers[:8]))}{', …' * (len(numbers) > 8)}]"
