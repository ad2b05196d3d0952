"""Megatron's DDP wrapper, optimizer and learning-rate schedule of a validated configuration, and reduced gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.utils import unwrap_model
from torch import Tensor

from ..config import OptimConfig
from .experts import expert_name
from .optimizer_host import keep_on_host

_LAYERS = "decoder.layers."


def wrap_ddp(
    models: Sequence[MegatronModule],
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    *,
    distributed: bool,
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
) -> list[DistributedDataParallel]:
    """Move models to this rank's device, to bf16 if ``config.bf16`` is set, and into Megatron's DDP.

    Gradients are accumulated and reduced in fp32.

    Args:
        distributed: shard the optimizer's state over the data- and context-parallel ranks.
        overlap_grad_reduce: reduce gradients during the backward pass.
        overlap_param_gather: gather parameters during the next forward pass; requires the other two.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        use_distributed_optimizer=distributed,
    )
    if torch.cuda.is_available():
        models = [model.cuda(torch.cuda.current_device()) for model in models]
    if config.bf16:
        models = [Float16Module(config, model) for model in models]
    return [DistributedDataParallel(config, ddp_config, model, pg_collection=groups) for model in models]


def build_optimizer(
    models: Sequence[DistributedDataParallel], optim: OptimConfig, groups: ProcessGroupCollection
) -> MegatronOptimizer:
    """Return Megatron's optimizer: fused Adam of TransformerEngine or Apex if installed, else torch's.

    Biases and norm weights have no weight decay; bf16 parameters have fp32 main parameters. Collective over the world.
    """
    wrapped, bf16 = models[0].ddp_config, models[0].config.bf16
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=wrapped.use_distributed_optimizer,
        overlap_param_gather=wrapped.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(config, list(models), use_gloo_process_groups=False, pg_collection=groups)
    if optim.states_on_host:
        keep_on_host(optimizer)
    return optimizer


def build_scheduler(
    optimizer: MegatronOptimizer, optim: OptimConfig, steps: int, global_batch_size: int
) -> OptimizerParamScheduler:
    """Return the learning-rate schedule, which counts samples: call ``step(increment=global_batch_size)`` per step.

    The rate rises linearly from 0 to ``lr`` over ``warmup_steps`` and falls to ``min_lr`` at ``decay_steps``, which
    include the warm-up, in the form of ``decay_style``. After a load, only the position comes from the checkpoint.

    steps: the run's steps, the default of ``optim.decay_steps``.
    """
    decay_samples = (optim.decay_steps or steps) * global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=optim.warmup_steps * global_batch_size,
        lr_decay_steps=decay_samples,
        lr_decay_style=optim.decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=decay_samples,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=None if optim.wsd_decay_steps is None else optim.wsd_decay_steps * global_batch_size,
        lr_wsd_decay_style=optim.wsd_decay_style,
    )


def connect(config: TransformerConfig, models: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Set the hooks on ``config`` with which Megatron's schedules reduce gradients and scale the loss.

    Call this once, before the first ``forward_backward_func``. A training step then calls ``zero_grad_buffer()`` of
    every model, ``optimizer.zero_grad()``, ``forward_backward_func(...)``, ``optimizer.step()`` and
    ``scheduler.step(...)``.
    """
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    (model,) = models
    if model.ddp_config.overlap_grad_reduce:
        config.no_sync_func = model.no_sync


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """Return the rate that the next ``optimizer.step()`` will use."""
    rate: float | None = get_canonical_lr_for_logging(optimizer.param_groups)
    assert rate is not None, "every optimizer of this module has a default parameter group"
    return rate


def named_parameters(models: Sequence[DistributedDataParallel]) -> dict[str, Any]:
    """Return this rank's parameters. Their names count layers over all pipeline stages, and experts over all ranks."""
    (gpt,) = unwrap_model(list(models))
    before = gpt.decoder.layers[0].layer_number - 1
    parameters = {}
    for name, parameter in gpt.named_parameters():
        if name.startswith(_LAYERS):
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            name = f"{_LAYERS}{before + int(number)}.{rest}"
            name = expert_name(name, getattr(gpt.decoder.layers[int(number)].mlp, "local_expert_indices", [0])[0])
        parameters[name] = parameter
    return parameters


def whole_gradients(
    models: Sequence[DistributedDataParallel], groups: ProcessGroupCollection, distributed: bool
) -> dict[str, Tensor]:
    """Return copies of the reduced gradients (`main_grad`) of this rank's parameters. Collective over the world.

    distributed: whether the optimizer is distributed: each rank has then reduced only its piece of every bucket.
    """
    if distributed:
        for model in models:
            for buffers, group in ((model.buffers, groups.dp_cp), (model.expert_parallel_buffers, groups.expt_dp)):
                for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
                    pieces = bucket.grad_data.chunk(group.size())
                    dist.all_gather(list(pieces), pieces[group.rank()].clone(), group=group)
    return {name: x.main_grad.clone() for name, x in named_parameters(models).items()}
