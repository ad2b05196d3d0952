"""Hugging Face `transformers`: models on packed sequences that are sharded over ranks.

    register(attention)
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="longctx")
    loss = model(**shard(batch, documents)).loss  # this rank's share: the sum over ranks is the loss

A call takes everything from its batch: `shard` puts a `ShardedMask` in the place of the attention mask. Only this
attention can use it, so a model that runs another implementation fails at its first call.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..core.attention import ContextParallelAttention
from ..core.comm.collectives import all_reduce_sum
from ..core.errors import refuse
from ..core.plans import Mask
from ..core.plans import mask as masks
from .sharded_mask import LayerMask, ShardedMask, positions_of, short

IGNORED = -100
"""The label of a token that is not predicted."""

_ATTENTIONS: dict[str, ContextParallelAttention] = {}
_SEQUENCES = {"input_ids": 1, "inputs_embeds": 1, "position_ids": 1, "labels": 1, "shift_labels": 1}
# What collators add for FlashAttention's kernels: `documents` says the same.
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Arguments of attention functions that change nothing here. The mask decides about windows.
_HARMLESS = {"position_ids", "position_embeddings", "sliding_window", "shift_labels", "num_items_in_batch"}
_HARMLESS |= {"hidden_states", "output_hidden_states", "return_dict", "cache_position", "layer_idx"}
_LAYERS = {"full_attention", "sliding_attention"}


def register(attention: ContextParallelAttention, name: str = "longctx") -> None:
    """Make `attn_implementation=name` run this attention. Call it before the model is made.

    Args:
        name: several attentions, as over several process groups, need one each.

    Raises:
        ValueError: the name belongs to another implementation, or transformers would read it as a kernel's.
    """
    if name not in _ATTENTIONS:
        taken = name in AttentionInterface._global_mapping or name == "eager"
        if taken or not name.isidentifier() or "flash" in name:
            raise refuse("name", name, "a free name of letters and digits without 'flash'", "Use longctx.")
    AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(name, _layer_mask)
    _ATTENTIONS[name] = attention


def registered(name: str = "longctx") -> ContextParallelAttention:
    """Return the attention of a name.

    Raises:
        ValueError: nothing is registered under it.
    """
    if name not in _ATTENTIONS:
        expected = f"one of {', '.join(_ATTENTIONS) or 'none so far'}"
        raise refuse("name", name, expected, "Call register(attention) before.")
    return _ATTENTIONS[name]


def shard(
    batch: Mapping[str, Any],
    documents: Sequence[int] | None = None,
    *,
    parents: Sequence[int] | None = None,
    name: str = "longctx",
) -> dict[str, Any]:
    """Return the arguments of the model for this rank's tokens of a whole batch, which is equal on all ranks.

    Labels are shifted before the cut, and the first token of a document is never a label. `shift_labels` has them;
    `labels` only says that a loss is wanted. `num_items_in_batch` counts the labels of all ranks, so that the model
    returns this rank's share of the mean.

    Args:
        batch: input_ids or inputs_embeds `[b, S, ...]`, and optionally labels `[b, S]`, position_ids `[b, S]` or
            `[1, S]`, an attention_mask without padding, and what collators add for FlashAttention.
        documents: the number of tokens of each document, the same in every row. None for what the batch says:
            cu_seq_lens_q, position_ids that begin with 0 at every document, seq_idx, or one document.
        parents: see `Mask.packed`; a tree of shared prefixes.
        name: of the attention, as in `register`.

    Raises:
        ValueError: padding, rows with different documents, lengths that do not fit, or tensors with another meaning.
    """
    attention, batch = registered(name), dict(batch)
    words = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(words, Tensor) or words.ndim < 2:
        raise refuse("batch", sorted(batch), "input_ids or inputs_embeds [b, S, ...]", "Give the whole batch.")
    if isinstance(batch.get("attention_mask"), ShardedMask):
        raise refuse("batch", "a batch that shard returned", "a whole batch", "Call shard once.")
    _check_no_padding(batch.pop("attention_mask", None))
    lengths = documents_of(batch, words.shape[1]) if documents is None else tuple(documents)
    mask = masks.documents(lengths, parents=parents)
    if mask.length != words.shape[1]:
        raise refuse("documents", lengths, f"numbers with the sum {words.shape[1]}", "The batch has these tokens.")
    _check_described(batch, lengths)
    for key in _BOUNDARIES:
        batch.pop(key, None)
    batch["position_ids"] = _positions(mask, lengths, batch.get("position_ids"), words)
    if has_labels := batch.get("labels") is not None:
        _shift_labels(batch, mask, words)
    sharded = ShardedMask(name, attention, lengths, parents, words)
    result: dict[str, Any] = {"attention_mask": sharded, "use_cache": False}
    for key, value in batch.items():
        if key in _SEQUENCES:
            result[key] = attention.shard(value, mask, dim=1)
        elif isinstance(value, Tensor) and value.ndim:
            remedy = "Remove it: only text can be sharded."
            raise refuse(f"batch[{key!r}]", f"a tensor {list(value.shape)}", f"only {', '.join(_SEQUENCES)}", remedy)
        else:
            result[key] = value
    if has_labels:
        # A model that reads these instead of shift_labels would predict wrong tokens. So it finds none.
        result["labels"] = torch.full_like(result["labels"], IGNORED)
    return result


def _shift_labels(batch: dict[str, Any], mask: Mask, words: Tensor) -> None:
    """Add the labels of the next tokens, and their number."""
    labels, given = batch["labels"], batch.get("shift_labels")
    if labels.shape != words.shape[:2]:
        raise refuse("labels", list(labels.shape), f"{list(words.shape[:2])}, as the tokens", "Correct them.")
    batch["shift_labels"] = shifted = _shifted(labels, mask)
    if given is not None and not torch.equal(given, shifted):
        raise refuse("shift_labels", "others", "the labels of the next tokens", "Leave them or labels out.")
    batch.setdefault("num_items_in_batch", (shifted != IGNORED).sum())


def _positions(mask: Mask, lengths: Sequence[int], given: Tensor | None, words: Tensor) -> Tensor:
    """Return the positions in documents `[b, S]`, and refuse others."""
    positions = positions_of(mask).to(words.device)
    if given is not None and (given.shape[-1:] != positions.shape or not bool((given == positions).all())):
        expected = f"the positions in documents {short(lengths)}, which begin with 0"
        raise refuse("position_ids", short(given.flatten().tolist()), expected, "Leave them or documents out.")
    return positions.expand(words.shape[0], -1)


def _check_no_padding(mask: Any) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise refuse("attention_mask", shape, "[b, S] without padding, or none", "Give documents instead.")
    if not bool((mask != 0).all()):
        remedy = "Pack documents one after the other, for instance with a padding-free collator."
        raise refuse("attention_mask", f"{int((mask == 0).sum())} padding tokens", "none", remedy)


def documents_of(batch: Mapping[str, Any], length: int) -> tuple[int, ...]:
    """Return the lengths of the documents that a batch describes."""
    ends, numbers, positions = (batch.get(key) for key in ("cu_seq_lens_q", "seq_idx", "position_ids"))
    if ends is None and positions is None and numbers is not None:
        return tuple(numbers[0].unique_consecutive(return_counts=True)[1].tolist())
    if ends is not None:
        return tuple(stop - start for start, stop in pairwise(ends.tolist()))
    if positions is None:
        return (length,)
    if positions.ndim != 2 or positions.shape[1] != length or not bool((positions == positions[:1]).all()):
        remedy = "Pack the rows into one, or give documents."
        raise refuse("position_ids", list(positions.shape), f"[b, {length}], the same in all rows", remedy)
    starts = (positions[0] == 0).nonzero().flatten().tolist()
    return tuple(stop - start for start, stop in pairwise([*starts, length]))


def _check_described(batch: Mapping[str, Any], lengths: Sequence[int]) -> None:
    """Refuse boundaries that are not those of the documents."""
    ends = [0, *accumulate(lengths)]
    for key in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if batch.get(key) is not None and batch[key].tolist() != ends:
            remedy = "Leave them or documents out."
            raise refuse(key, short(batch[key].tolist()), f"{short(ends)}, as the documents", remedy)
    for row in () if batch.get("seq_idx") is None else batch["seq_idx"]:
        if (found := row.unique_consecutive(return_counts=True)[1].tolist()) != list(lengths):
            raise refuse("seq_idx", short(found), f"documents {short(lengths)}", "Leave them or documents out.")


def _shifted(labels: Tensor, mask: Mask) -> Tensor:
    """Return the labels `[b, S]` of the next tokens, none at the end of a document."""
    shifted = torch.full_like(labels, IGNORED)
    shifted[:, :-1] = labels[:, 1:]
    shifted[:, [each.stop - 1 for each in mask.documents]] = IGNORED
    return shifted


def _layer_mask(
    *,
    config: Any,
    attention_mask: Any = None,
    q_length: int,
    kv_length: int,
    allow_is_causal_skip: bool = False,
    local_size: int | None = None,
    **_: Any,
) -> LayerMask | None:
    """Return what a model's layers of one kind see: transformers calls it for each kind of mask."""
    name = config._attn_implementation
    if not isinstance(attention_mask, ShardedMask):
        what = "none" if attention_mask is None else f"a tensor {list(attention_mask.shape)}"
        remedy = "Call model(**shard(batch, documents)). To generate, load the model with another attention."
        raise refuse("attention_mask", what, "a batch that shard returned", remedy)
    if attention_mask.name != name:
        remedy = "Give both calls one name, and every model a config of its own."
        raise refuse("name", attention_mask.name, f"{name!r}, which the model runs", remedy)
    attention_mask.check_equal()
    if kv_length != q_length:
        raise refuse("past_key_values", f"{kv_length} keys", f"{q_length}, as queries", "Leave out the cache.")
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if kinds:
        raise refuse("layer_types", ", ".join(sorted(kinds)), " or ".join(sorted(_LAYERS)), "Use another model.")
    if not allow_is_causal_skip:  # transformers says so for every mask that is more than causal
        raise refuse("mask", "a mask of the model's own", "causal attention, or a window", "Leave out images.")
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        raise refuse("local_size", local_size, "the config's sliding_window", "Use a model without chunks.")
    attention_mask.check_positions(config)
    if local_size == 0:  # Qwen2-MoE without windows asks for a mask that none of its layers uses
        return None
    return attention_mask.of_window(local_size)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend for a layer: query `[b, h, s, d]`, key `[b, g, s, d]`, value `[b, g, s, e]` to `[b, s, h, e]`."""
    if not isinstance(attention_mask, LayerMask):
        what = "none" if attention_mask is None else f"a {type(attention_mask).__name__}"
        raise refuse("attention_mask", what, "a batch that shard returned", "Call model(**shard(batch, documents)).")
    if dropout:
        raise refuse("attention_dropout", dropout, "0", "Set config.attention_dropout=0.")
    if is_causal is False:
        raise refuse("is_causal", is_causal, "True", "Use a decoder.")
    for argument, given in others.items():
        if argument not in _HARMLESS and given is not None and given is not False:
            what = f"a tensor {list(given.shape)}" if isinstance(given, Tensor) else given
            raise refuse(argument, what, "none", "This attention does not have it; use a model or call without it.")
    if torch.is_autocast_enabled(query.device.type):  # norms return fp32, as also other implementations expect
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    q, k, v = (x.permute(2, 0, 1, 3) for x in (query, key, value))
    out = attention_mask.attention(q, k, v, mask=attention_mask.mask, scale=scaling, sink=s_aux)
    return out.transpose(0, 1).contiguous(), None


class Difference(NamedTuple):
    """Relative differences between this attention and eager: of the loss, and of all gradients (Frobenius)."""

    loss: float
    gradients: float


def compare(
    model: PreTrainedModel, batch: Mapping[str, Any], documents: Sequence[int] | None = None, *, name: str = "longctx"
) -> Difference:
    """Compare a batch with transformers' eager attention, which computes it document by document on every rank.

    All ranks call this together. The model is the user's own, as made by `from_pretrained`, or sharded by
    `fully_shard`, and is left without gradients. Eager needs memory for the square of a document's length: give a
    short batch. In bf16, both round: compare with the difference of two other implementations.

    Args:
        batch: input_ids `[b, S]` and labels, as for `shard`.

    Raises:
        ValueError: the model runs another attention, or as for `shard`.
    """
    implementation, attention = model.config._attn_implementation, registered(name)
    if implementation != name:
        raise refuse("attn_implementation", implementation, name, "Make the model from a config of its own.")
    sharded = shard({"labels": batch["input_ids"], **batch}, documents, name=name)
    ends, training = [*accumulate(sharded["attention_mask"].documents)], model.training
    parts = [
        {key: batch.get(key, batch["input_ids"])[:, start:stop] for key in ("input_ids", "labels")}
        | {"num_items_in_batch": sharded["num_items_in_batch"], "use_cache": False}
        for start, stop in pairwise([0, *ends])
    ]
    model.train(False)
    try:
        loss, gradients = _gradients(model, [sharded])
        sharded["attention_mask"].check_asked()
        group = attention._group_to_send()
        for each in (loss, *gradients):
            if isinstance(each, DTensor):
                each.mul_(attention.world)  # fully_shard has averaged over ranks
            else:
                all_reduce_sum(group, each)
        model.set_attn_implementation("eager")
        expected, truth = _gradients(model, parts)
    finally:
        model.set_attn_implementation(name)
        model.train(training)
    off = sum(_square(ours - theirs) for ours, theirs in zip(gradients, truth, strict=True))
    return Difference(abs(float(loss - expected)) / abs(float(expected)), (off / sum(map(_square, truth))) ** 0.5)


def _gradients(model: PreTrainedModel, parts: Sequence[Mapping[str, Any]]) -> tuple[Tensor, list[Tensor]]:
    """Return the sum of the losses of parts, and its gradients."""
    model.zero_grad()
    total = torch.zeros((), device=model.device)
    for each in parts:
        loss = model(**each).loss
        loss.backward()
        total += loss.detach()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    return total, gradients


def _square(x: Tensor) -> float:
    square = x.float().square().sum()
    return float(square.full_tensor() if isinstance(square, DTensor) else square)
