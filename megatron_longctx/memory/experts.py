"""What a layer of experts holds and keeps on one rank, tokens being spread evenly over experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .shapes import Job

FC1_COLUMNS = {"swiglu": 2, "geglu": 2, "swiglu_oai": 2, "gelu": 1}
"""Columns of an MLP's first matrix, in units of its width."""


def expert_parameters(job: Job) -> int:
    """Of the experts of one layer that a rank holds."""
    model, par = job.config.model, job.config.parallelism
    assert model.num_moe_experts is not None
    columns = FC1_COLUMNS[model.activation]
    sharded = (columns + 1) * model.hidden_size * model.expert_width
    biases = columns * model.expert_width + model.hidden_size if model.bias else 0
    return model.num_moe_experts // par.expert_model_parallel_size * (sharded // par.tensor_size_of_experts + biases)


def router_parameters(job: Job) -> int:
    """Of what else is in the place of a layer's MLP: the router, and this rank's part of shared experts."""
    model, tp = job.config.model, job.config.parallelism.tensor_parallel_size
    assert model.num_moe_experts is not None
    shared = (FC1_COLUMNS[model.activation] + 1) * model.hidden_size * (model.moe_shared_expert_intermediate_size or 0)
    return model.num_moe_experts * (model.hidden_size + model.bias) + shared // tp


def routed_tokens(job: Job) -> int:
    """Rows that go through the experts of a rank."""
    return job.hidden_tokens * job.config.model.moe_router_topk * job.config.parallelism.tensor_size_of_experts


def expert_bytes(job: Job) -> tuple[int, int]:
    """Activations of a layer's experts on one rank, and of them what their first products give."""
    model, par, e = job.config.model, job.config.parallelism, job.element_bytes
    columns, rows = FC1_COLUMNS[model.activation], routed_tokens(job)
    width = model.expert_width // par.tensor_size_of_experts
    fc1 = e * rows * columns * width
    # The input of both products; of a gate also its two halves and their product, before it is weighted.
    inside = e * rows * model.hidden_size + fc1 + e * rows * width
    if not (job.fused and model.activation == "swiglu"):
        inside += e * rows * width * (3 if columns == 2 else 1)
    routing = job.hidden_tokens * (model.num_moe_experts or 0) * 4
    shared = (model.moe_shared_expert_intermediate_size or 0) // par.tensor_parallel_size
    return inside + routing + e * job.tokens * shared * (columns + (3 if columns == 2 else 1)), fc1
