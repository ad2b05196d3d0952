"""The chunked LM head against Megatron's: losses, gradients, and the largest logits in memory."""

from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_longctx.mcore import groups
from megatron_longctx.mcore.head import Head, chunked_cross_entropy, chunked_entropy, with_chunked_head
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.tolerances import relative_error
from tests.mcore import tiny_gpt

LENGTH, BATCH, HIDDEN, VOCABULARY = 22, 2, 16, 48
CHUNKS = (1, 8, 12, 1000)
DTYPES = (torch.float32, torch.bfloat16)
Found = dict[str, torch.Tensor]


class LargestLogits(TorchDispatchMode):
    """The most elements of any tensor with a row of the vocabulary for each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.largest = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            weight = isinstance(x, torch.Tensor) and x.shape == (HIDDEN, self.width)  # transposed
            if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[-1] == self.width and not weight:
                self.largest = max(self.largest, x.numel())
        return result


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(LENGTH, BATCH, HIDDEN, generator=generator, dtype=torch.float64).bfloat16()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).bfloat16()
    labels = torch.randint(VOCABULARY, (LENGTH, BATCH), generator=generator)
    grad = torch.rand(LENGTH, BATCH, generator=generator).round(decimals=1)  # some are 0
    return hidden.to(dtype), weight.to(dtype), labels, grad


def _megatron(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, sequence_parallel: bool) -> Any:
    """Return the losses of Megatron's output layer and cross-entropy."""
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as linear

    logits = linear(hidden, weight, None, False, not sequence_parallel, sequence_parallel)
    return tensor_parallel.vocab_parallel_cross_entropy(logits, labels)


def _see(rank: int, world: int, chunk: int | None, dtype: torch.dtype, sequence_parallel: bool) -> Found:
    """Return this rank's losses and gradients: chunked, or Megatron's if `chunk` is None."""
    collection = groups.initialize(tensor=world)
    whole, full_weight, labels, grad = _inputs(dtype)
    tokens = slice(rank * LENGTH // world, (rank + 1) * LENGTH // world) if sequence_parallel else slice(None)
    hidden = whole[tokens].clone().requires_grad_()
    weight = full_weight.chunk(world)[rank].clone().requires_grad_()
    with LargestLogits(VOCABULARY // world) as logits:
        if chunk is None:
            losses = _megatron(hidden, weight, labels, sequence_parallel)
        else:
            losses = chunked_cross_entropy(hidden, weight, labels, Head(collection.tp, sequence_parallel, chunk))
        losses.backward(grad.to(losses.dtype))
    groups.destroy()
    assert hidden.grad is not None and weight.grad is not None
    found = {"losses": losses.detach(), "hidden": hidden.grad, "weight": weight.grad}
    return {**found, "logits": torch.tensor(logits.largest)}


def _run(rank: int) -> dict[tuple[Any, ...], Found]:
    return {
        (tp, chunk, dtype, sequence_parallel): _see(rank % tp, tp, chunk, dtype, sequence_parallel)
        for tp, sequence_parallel in ((1, False), (2, False), (2, True))
        for dtype in DTYPES
        for chunk in (None, *CHUNKS)
    }


def _truth(rank: int, world: int, sequence_parallel: bool) -> Found:
    hidden, weight, labels, grad = _inputs(torch.float64)
    hidden.requires_grad_()
    weight.requires_grad_()
    losses = torch.nn.functional.cross_entropy((hidden @ weight.t()).flatten(0, 1), labels.flatten(), reduction="none")
    losses.backward(grad.flatten().double())
    assert hidden.grad is not None and weight.grad is not None
    mine = hidden.grad.chunk(world)[rank] if sequence_parallel else hidden.grad
    return {"losses": losses.view(labels.shape).detach(), "hidden": mine, "weight": weight.grad.chunk(world)[rank]}


def test_errors_are_megatrons_and_all_logits_never_exist() -> None:
    for rank, seen in enumerate(run_distributed(_run, 2)):
        for (tp, chunk, dtype, sequence_parallel), found in seen.items():
            if chunk is None:
                continue
            where = f"rank {rank}, TP {tp}, chunk {chunk}, {dtype}, sequence parallel {sequence_parallel}"
            truth, theirs = _truth(rank % tp, tp, sequence_parallel), seen[tp, None, dtype, sequence_parallel]
            for name, exact in truth.items():
                own = relative_error(theirs[name], exact)
                assert 0 < own < (1e-5 if dtype is torch.float32 else 2e-2), "Megatron's own error"
                assert relative_error(found[name], exact) < 2 * own + 1e-7, f"{where}: {name}"
            width = VOCABULARY // tp
            parts = tp if sequence_parallel else 1
            most = max(chunk // (parts * BATCH), 1) * parts * BATCH
            assert found["logits"] == min(most, LENGTH * BATCH) * width, where
            assert theirs["logits"] == LENGTH * BATCH * width
            assert found["losses"].dtype == torch.float32 and found["weight"].dtype == dtype


def _entropies(rank: int) -> list[tuple[float, bool]]:
    """Return errors of entropies, whose logits reach 300, and whether no more logits existed than a chunk's."""
    found = []
    hidden, weight, *_ = _inputs(torch.float32)
    weight = 30 * weight
    logs = (hidden.double() @ weight.double().t()).log_softmax(-1)
    expected = -(logs.exp() * logs).sum(-1)
    for tp, sequence_parallel in ((1, False), (2, False), (2, True)):
        collection, at = groups.initialize(tensor=tp), rank % tp
        mine = hidden.chunk(tp)[at] if sequence_parallel else hidden
        for chunk in CHUNKS[1:]:
            with LargestLogits(VOCABULARY // tp) as logits:
                entropies = chunked_entropy(mine, weight.chunk(tp)[at], Head(collection.tp, sequence_parallel, chunk))
            bounded = logits.largest == min(chunk, LENGTH * BATCH) * (VOCABULARY // tp)
            found.append((float((entropies - expected).abs().max()), bounded))
        groups.destroy()
    return found


def test_entropies_are_the_definitions_at_every_division_of_the_head() -> None:
    for errors in run_distributed(_entropies, 2):
        assert len(errors) == 9 and all(error < 1e-4 and bounded for error, bounded in errors), errors


def _trained(rank: int) -> dict[bool, list[float]]:
    """Return losses of steps with one parameter per bucket, keyed by whether communication is overlapped."""
    tiny_gpt.GPTModel = partial(with_chunked_head(GPTModel), chunk_tokens=5)
    losses = {}
    for overlap in (False, True):
        trainer = tiny_gpt.Trainer(tiny_gpt.Layout(overlap=overlap, bucket_size=1))
        losses[overlap] = trainer.train(range(4))
        trainer.close()
    return losses


def test_the_head_waits_for_weights_that_are_gathered_during_forward() -> None:
    for losses in run_distributed(_trained, 2):
        assert losses[True] == losses[False] and losses[True][-1] < losses[True][0]
