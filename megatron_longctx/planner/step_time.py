"""The simulated time of a training step: attention by its plans, all else by measured rates of the device."""

from ..config import cluster_of, configured_plan
from ..config.cluster import GIB, Cluster
from ..core.plans import backward_plan
from ..core.plans.mask import documents
from .cost import Costs
from .flops import head_flops, layer_flops
from .memory.model import own_parameters
from .memory.shapes import Job, stage_parameters
from .simulate import simulate

_LOGIT_BYTES = 100
"""What a logit's softmax and cross-entropy read and write, forward and backward, in chunks or not. It is what the head
took on H200s beside its products, in two runs that differ in their layers alone (training_dense_128k_h200_x2,
training_fp8_h200_x2)."""
_GRADIENT_BYTES, _STATE_BYTES = 16, 34
"""What a step reads and writes of a gradient (cleared, added to), and of the states of a parameter that this rank
updates."""


def predicted_step_s(job: Job) -> float | None:
    """Return the simulated seconds of a training step on `parallelism.cluster`.

    It leaves out the messages of gradients and weights, which overlap with computation, and of tensor and expert
    parallelism, the bubbles of pipelines, and that documents do not see each other. None without a cluster, or if the
    cluster's device has no rate for `train.fp8`.
    """
    config, model, par, train = job.config, job.config.model, job.config.parallelism, job.config.train
    if (cluster := cluster_of(par)) is None:
        return None
    exact, reduced = cluster.device.layer_tflops("none"), cluster.device.layer_tflops(train.fp8)
    if exact is None or reduced is None:
        return None
    again = 1 if config.recompute.mode == "none" else 4 / 3  # forward a second time
    layers = sum(
        products / (reduced if in_fp8 else exact) + others / exact
        for in_fp8, (products, others) in zip(job.fp8_layers, layer_flops(model), strict=True)
    )
    head = head_flops(model, job.vocab_size) * (1 if config.recompute.head_chunk_tokens is None else 4 / 3) / exact
    costs, stages = Costs.of_cluster(cluster), range(par.pipeline_parallel_size)
    updated = max(_GRADIENT_BYTES * stage_parameters(job, s) + _STATE_BYTES * own_parameters(job, s) for s in stages)
    ranks = par.model_parallel_size * job.data_parallel_size
    tokens = train.global_batch_size * config.data.seq_length / ranks
    micro_batches = train.global_batch_size // (train.micro_batch_size * job.data_parallel_size)
    return (
        micro_batches * _attention_s(job, cluster, costs) / len(stages)
        + 3 * tokens * (layers * again + head) / 1e12
        + (tokens * job.vocab_size * _LOGIT_BYTES + updated) / (costs.merge_gibps * GIB)
    )


def _attention_s(job: Job, cluster: Cluster, costs: Costs) -> float:
    """Return the seconds of attention in all layers, forward and backward, of one micro-batch."""
    config, model, mode = job.config, job.config.model, job.config.recompute.mode
    again = 1.0 if mode == "layer" else 0.0 if mode == "none" else 1 - job.kept_results
    seconds = 0.0
    for window, layers in model.layer_windows.items():
        plan = configured_plan(config, documents([config.data.seq_length], window=window))
        forward, backward = (simulate(each, cluster, job.target, costs).seconds for each in (plan, backward_plan(plan)))
        seconds += layers * (forward * (1 + again) + backward)
    return seconds
