"""Gradients reduced behind backward and parameters gathered behind forward: the same numbers, to the last bit."""

from typing import Any

import pytest
import torch

from megatron_longctx.testing.distributed import run_distributed
from tests.mcore.tiny_gpt import Layout, Trainer

STEPS = range(3)


def _trained(overlap: bool, **sizes: Any) -> tuple[int, list[float], list[float], list[torch.Tensor]]:
    """How many buckets there were, losses, gradient norms, and parameters behind the last step."""
    trainer = Trainer(Layout(overlap=overlap, clip_grad=1e9, **sizes))
    (model,) = trainer.models
    losses = trainer.train(STEPS)
    if overlap and sizes.get("distributed", True):
        model.disable_forward_pre_hook()  # gathers what the last step has changed
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    count = sum(len(buffer.buckets) for buffer in model.buffers)
    trainer.close()
    return count, losses, trainer.gradient_norms, parameters


def _compare(rank: int, cases: list[dict[str, Any]]) -> None:
    for sizes in cases:
        _, losses, norms, parameters = _trained(False, **sizes)
        count, *found = _trained(True, **sizes)
        assert found[0] == losses and len(set(losses)) == len(losses), sizes
        # Ranks sum the squares of what they own, which depends on the buckets; nothing is clipped by it here.
        assert found[1] == (pytest.approx(norms, rel=1e-6) if "bucket_size" in sizes else norms), sizes
        assert all(map(torch.equal, found[2], parameters)), sizes
        assert (count > 2) == ("bucket_size" in sizes), "one bucket has nothing to overlap"


def test_two_ranks() -> None:
    """A sum of two does not depend on which rank owns it, so neither on the buckets."""
    small = {"bucket_size": 4000}
    cases: list[dict[str, Any]] = [{**small}, {**small, "context": 2}, {**small, "distributed": False}]
    run_distributed(_compare, 2, cases)


def test_four_ranks() -> None:
    run_distributed(_compare, 4, [{"context": 2}, {"pipeline": 2}])
