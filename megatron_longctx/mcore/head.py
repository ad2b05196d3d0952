"""The LM head and its cross-entropy in chunks of tokens: the logits of all tokens never exist at the same time.

At 128 Ki tokens per rank and 128 Ki words, logits alone take 32 GiB in bf16 and another 64 GiB in fp32. Here they are
computed for a chunk of tokens, reduced to three numbers per token, and freed. Backward computes each chunk's again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor

from ..core.comm.collectives import all_gather_single, reduce_scatter_single
from ..core.kernels.no_grad import first_order


@dataclass(frozen=True)
class Head:
    """How ranks and chunks divide the head.

    `chunk_tokens` is the most tokens (times sequences) whose logits exist at the same time on a rank, but at least one
    of every sequence and sequence-parallel rank.
    """

    group: dist.ProcessGroup  # tensor-parallel: the vocabulary is sharded over it
    sequence_parallel: bool  # whether its ranks hold different tokens of the hidden states
    chunk_tokens: int

    @property
    def num_shards(self) -> int:
        """The number of ranks whose hidden states have to be gathered."""
        return self.group.size() if self.sequence_parallel else 1


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, head: Head) -> Tensor:
    """Return the cross-entropy of every token, `[s, b]` in fp32 and the same on all tensor-parallel ranks.

    Softmax and sums are in fp32. A chunk's logits and the gradients that enter matrix products are rounded to the dtype
    of `hidden`, as in Megatron's linear layer. The weight's gradient is summed over chunks in fp32.

    Args:
        hidden: `[s, b, h]`, or with sequence parallelism this rank's `[s / tp, b, h]`.
        weight: this rank's rows of the head, `[vocabulary / tp, h]`.
        labels: `[s, b]`, the same on all tensor-parallel ranks.
    """
    losses: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, labels, head)  # type: ignore[no-untyped-call]
    return losses


def chunked_entropy(hidden: Tensor, weight: Tensor, head: Head) -> Tensor:
    """Return the entropy of every token's prediction over the whole vocabulary, in nats, fp32 `[s, b]`.

    With p the softmax of the logits x, m the largest and z the sum of exp(x - m), it is log z - sum of p (x - m).
    Softmax and sums are in fp32, without a gradient. Arguments are those of `chunked_cross_entropy`.
    """
    shape = (head.num_shards, *hidden.shape[:2])
    found = torch.empty(shape, dtype=torch.float32, device=hidden.device)
    for rows in _chunks(hidden, head):
        logits = _logits(_gather(hidden[rows], head), weight)
        largest = logits.amax(-1)
        if head.group.size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=head.group)
        powers = logits.sub_(largest.unsqueeze(-1)).exp()
        sums = torch.stack((powers.sum(-1), powers.mul_(logits).sum(-1)))
        if head.group.size() > 1:
            dist.all_reduce(sums, group=head.group)
        found[:, rows] = sums[0].log() - sums[1] / sums[0]
        del logits, powers  # free them before the next chunk
    return found.flatten(0, 1)


def with_chunked_head(model: type) -> type:
    """Return a class of Megatron's GPT (`GPTModel`, `HybridModel`) with `ChunkedHead`."""
    return type(f"Chunked{model.__name__}", (ChunkedHead, model), {})


class ChunkedHead(LanguageModule):  # type: ignore[misc]
    """A language model with the loss of `chunked_cross_entropy`. Without labels it returns logits as usual."""

    def __init__(self, *args: Any, chunk_tokens: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head = Head(self.pg_collection.tp, self.config.sequence_parallel, chunk_tokens)

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Run Megatron's model; with labels, its output layer returns losses instead of logits."""
        run = super().forward
        if labels is None or not self.post_process:
            return run(*args, labels=labels, **kwargs)  # type: ignore[no-any-return]

        def losses(hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
            own = self.output_layer.weight if weight is None else weight
            return chunked_cross_entropy(hidden, own, labels.transpose(0, 1).contiguous(), self.head), None

        # The layer is called with another forward: its hooks wait for weights that are gathered during forward.
        self.output_layer.forward = losses
        try:
            return run(*args, labels=labels, **kwargs)  # type: ignore[no-any-return]
        finally:
            del self.output_layer.forward  # uncovers the method of its class

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the losses `[b, s]` that the output layer has returned in the place of logits."""
        return logits.transpose(0, 1).contiguous()


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: Head) -> Tensor:
        tokens = labels.view(head.num_shards, *hidden.shape[:2])
        largest, total, own = (torch.zeros(tokens.shape, dtype=torch.float32, device=hidden.device) for _ in range(3))
        for rows in _chunks(hidden, head):
            _statistics(hidden[rows], weight, tokens[:, rows], head, [x[:, rows] for x in (largest, total, own)])
        lse, own = _reduce_over_vocabulary(largest, total, own, head)
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
            x = _gather(hidden[rows], head)
            grad = _grad_logits(x, weight, tokens[:, rows], lse[:, rows], grad_losses[:, rows], head)
            _reduce_scatter(grad @ weight, grad_hidden[rows], head)
            if ctx.needs_input_grad[1]:
                grad_weight += grad.flatten(0, 2).t() @ x.flatten(0, 2)
            del grad  # free it before the next chunk
        if head.group.size() > 1 and not head.sequence_parallel:
            dist.all_reduce(grad_hidden, group=head.group)
        return grad_hidden, grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None


def _statistics(chunk: Tensor, weight: Tensor, labels: Tensor, head: Head, into: list[Tensor]) -> None:
    """Write the largest logit of this rank's vocabulary, the sum of exp relative to it, and the label's logit."""
    largest, total, own = into
    logits = _logits(_gather(chunk, head), weight)
    index, is_local = _local_labels(labels, weight, head)
    largest.copy_(logits.amax(-1))
    own.copy_(logits.gather(-1, index.unsqueeze(-1)).squeeze(-1) * is_local)
    total.copy_(logits.sub_(largest.unsqueeze(-1)).exp_().sum(-1))


def _grad_logits(x: Tensor, weight: Tensor, labels: Tensor, lse: Tensor, grad_losses: Tensor, head: Head) -> Tensor:
    """Return `(softmax - one_hot(label)) * grad_loss` in the dtype of `x`."""
    grad = _logits(x, weight).sub_(lse.unsqueeze(-1)).exp_()
    index, is_local = _local_labels(labels, weight, head)
    grad.scatter_add_(-1, index.unsqueeze(-1), -is_local.to(grad.dtype).unsqueeze(-1))
    return grad.mul_(grad_losses.unsqueeze(-1)).to(x.dtype)


def _chunks(hidden: Tensor, head: Head) -> Iterator[slice]:
    """Return ranges of this rank's rows of `hidden`; their number is equal on all tensor-parallel ranks."""
    size = max(1, head.chunk_tokens // (head.num_shards * hidden.shape[1]))
    return (slice(start, start + size) for start in range(0, hidden.shape[0], size))


def _gather(chunk: Tensor, head: Head) -> Tensor:
    """Return the chunks of all ranks whose tokens differ, `[shards, c, b, h]`."""
    if head.num_shards == 1:
        return chunk.unsqueeze(0)
    whole = chunk.new_empty(head.num_shards * chunk.shape[0], *chunk.shape[1:])
    all_gather_single(whole, chunk.contiguous(), group=head.group)
    return whole.view(head.num_shards, *chunk.shape)


def _reduce_scatter(partial: Tensor, into: Tensor, head: Head) -> None:
    """Write this rank's rows of the gradient `[shards, c, b, h]`, summed over the vocabulary if rows are sharded."""
    if head.num_shards == 1:
        into.copy_(partial[0])
    else:
        reduce_scatter_single(into, partial.flatten(0, 1), group=head.group)


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return `[..., vocabulary / tp]` in fp32, in new memory."""
    return (x @ weight.t()).float()


def _local_labels(labels: Tensor, weight: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Return each label's row in this rank's shard of the head (0 if another rank has it), and whether it has one."""
    index = labels - dist.get_rank(head.group) * weight.shape[0]
    is_local = (index >= 0) & (index < weight.shape[0])
    return index.where(is_local, torch.zeros_like(index)), is_local


def _reduce_over_vocabulary(largest: Tensor, total: Tensor, own: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp and the label's logit over all shards of the vocabulary."""
    if head.group.size() > 1:
        local = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=head.group)
        both = torch.stack((total * (local - largest).exp(), own))
        dist.all_reduce(both, group=head.group)
        total, own = both.unbind(0)
    return largest + total.log(), own
