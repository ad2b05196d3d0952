"""The LM head and its cross-entropy, chunk by chunk: the logits of all tokens never exist at once.

At 128 Ki tokens a rank and 128 Ki words, logits alone are 32 GiB in bf16 and another 64 GiB in fp32. Here they are
computed for a chunk of tokens, reduced to three numbers a token and dropped; backward computes each chunk's again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from ..kernels.no_grad import first_order


@dataclass(frozen=True)
class Head:
    """How the head is cut.

    group: the tensor-parallel group, over which the vocabulary is sharded. sequence_parallel: its ranks hold different
    tokens of the hidden states. chunk_tokens: most tokens (times sequences) whose logits exist at once on a rank, but
    at least one of every sequence and sequence-parallel rank.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool
    chunk_tokens: int

    @property
    def num_parts(self) -> int:
        """Ranks whose hidden states must come together."""
        return self.group.size() if self.sequence_parallel else 1


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, head: Head) -> Tensor:
    """Cross-entropy of every token, with softmax and sums in fp32.

    A chunk's logits and the gradients that are multiplied with are rounded to the dtype of `hidden`, as Megatron's
    linear layer rounds them; the weight's gradient is summed over chunks in fp32.

    Args:
        hidden: `[s, b, h]`, or with sequence parallelism this rank's `[s / tp, b, h]`.
        weight: this rank's rows of the head, `[vocabulary / tp, h]`.
        labels: `[s, b]`, the same on all tensor-parallel ranks.

    Returns:
        `[s, b]` in fp32, the same on all tensor-parallel ranks.
    """
    losses: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, labels, head)  # type: ignore[no-untyped-call]
    return losses


class ChunkedHeadGPT(GPTModel):  # type: ignore[misc]
    """Megatron's GPT with the loss of `chunked_cross_entropy`; without labels it gives logits as ever.

    Args:
        chunk_tokens: as `Head.chunk_tokens`. The others are Megatron's own.
    """

    def __init__(self, *args: Any, chunk_tokens: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head = Head(self.pg_collection.tp, self.config.sequence_parallel, chunk_tokens)

    def _postprocess(self, *, hidden_states: Tensor, labels: Tensor | None, **others: Any) -> Tensor:
        if labels is None or not self.post_process:
            plain: Tensor = super()._postprocess(hidden_states=hidden_states, labels=labels, **others)
            return plain
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        labels = labels.transpose(0, 1).contiguous()
        with _in_the_place_of(self.output_layer, lambda x: chunked_cross_entropy(x, weight, labels, self._head)):
            # By a call of the layer: its hooks wait for weights that are gathered during the forward pass.
            losses: Tensor = self.output_layer(hidden_states)
        return losses.transpose(0, 1).contiguous()


@contextmanager
def _in_the_place_of(module: torch.nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Calls of the module run this inside, between its hooks."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # that of its class is seen again


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: Head) -> Tensor:
        tokens = labels.view(head.num_parts, *hidden.shape[:2])
        largest, total, own = (torch.zeros(tokens.shape, dtype=torch.float32, device=hidden.device) for _ in range(3))
        for rows in _chunks(hidden, head):
            _statistics(hidden[rows], weight, tokens[:, rows], head, [x[:, rows] for x in (largest, total, own)])
        lse, own = _over_the_vocabulary(largest, total, own, head)
        ctx.head = head
        ctx.save_for_backward(hidden, weight, labels, lse)
        return (lse - own).view(labels.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, lse = ctx.saved_tensors
        head: Head = ctx.head
        tokens = labels.view_as(lse)
        grad_losses = grads[0].reshape(lse.shape).float()
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in _chunks(hidden, head):
            x = _gathered(hidden[rows], head)
            grad = _grad_logits(x, weight, tokens[:, rows], lse[:, rows], grad_losses[:, rows], head)
            _scatter(grad @ weight, grad_hidden[rows], head)
            if ctx.needs_input_grad[1]:
                grad_weight += grad.flatten(0, 2).t() @ x.flatten(0, 2)
            del grad  # before the next chunk's
        if head.group.size() > 1 and not head.sequence_parallel:
            dist.all_reduce(grad_hidden, group=head.group)
        return grad_hidden, grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None


def _statistics(chunk: Tensor, weight: Tensor, labels: Tensor, head: Head, into: list[Tensor]) -> None:
    """Of this rank's shard of the vocabulary: the largest logit, the sum of exp relative to it, the label's logit."""
    largest, total, own = into
    logits = _logits(_gathered(chunk, head), weight)
    index, mine = _rows_of(labels, weight, head)
    largest.copy_(logits.amax(-1))
    own.copy_(logits.gather(-1, index.unsqueeze(-1)).squeeze(-1) * mine)
    total.copy_(logits.sub_(largest.unsqueeze(-1)).exp_().sum(-1))


def _grad_logits(x: Tensor, weight: Tensor, labels: Tensor, lse: Tensor, grad_losses: Tensor, head: Head) -> Tensor:
    """`(softmax - one at the label) * gradient of the loss`, in the dtype of `x`."""
    grad = _logits(x, weight).sub_(lse.unsqueeze(-1)).exp_()
    index, mine = _rows_of(labels, weight, head)
    grad.scatter_add_(-1, index.unsqueeze(-1), -mine.to(grad.dtype).unsqueeze(-1))
    return grad.mul_(grad_losses.unsqueeze(-1)).to(x.dtype)


def _chunks(hidden: Tensor, head: Head) -> Iterator[slice]:
    """Ranges of this rank's rows of `hidden`; equally many on all tensor-parallel ranks."""
    size = max(1, head.chunk_tokens // (head.num_parts * hidden.shape[1]))
    return (slice(start, start + size) for start in range(0, hidden.shape[0], size))


def _gathered(chunk: Tensor, head: Head) -> Tensor:
    """`[parts, c, b, h]`: the chunk of every rank whose tokens differ."""
    if head.num_parts == 1:
        return chunk.unsqueeze(0)
    whole = chunk.new_empty(head.num_parts * chunk.shape[0], *chunk.shape[1:])
    dist.all_gather_into_tensor(whole, chunk.contiguous(), group=head.group)
    return whole.view(head.num_parts, *chunk.shape)


def _scatter(partial: Tensor, into: Tensor, head: Head) -> None:
    """This rank's rows of the gradient `[parts, c, b, h]`, summed over the vocabulary where rows are sharded."""
    if head.num_parts == 1:
        into.copy_(partial[0])
    else:
        dist.reduce_scatter_tensor(into, partial.flatten(0, 1), group=head.group)


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """`[..., vocabulary / tp]` in fp32, a tensor of its own."""
    return (x @ weight.t()).float()


def _rows_of(labels: Tensor, weight: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Which of this rank's rows of the head a label is (0 where it is another's), and whether it is one of them."""
    index = labels - dist.get_rank(head.group) * weight.shape[0]
    mine = (index >= 0) & (index < weight.shape[0])
    return index.where(mine, torch.zeros_like(index)), mine


def _over_the_vocabulary(largest: Tensor, total: Tensor, own: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """(log-sum-exp, logit of the label) over all shards of the vocabulary."""
    if head.group.size() > 1:
        here = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=head.group)
        both = torch.stack((total * (here - largest).exp(), own))
        dist.all_reduce(both, group=head.group)
        total, own = both.unbind(0)
    return largest + total.log(), own
