"""Megatron's DDP wrapper, optimizer and learning-rate schedule, as a configuration says that is `config.validate`d; and
the gradients between backward and the optimizer."""

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
    model_chunks: Sequence[MegatronModule],
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    *,
    distributed: bool,
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
    bucket_size: int | None = None,
) -> list[DistributedDataParallel]:
    """Move model chunks to this rank's device, to bf16 if the configuration says so, and into Megatron's DDP.

    Gradients are accumulated and reduced in fp32.

    Args:
        model_chunks: one model per virtual pipeline stage of this rank.
        config: the models' configuration (``bf16`` is read).
        groups: as ``groups.initialize`` returns them.
        distributed: shard the optimizer's state over the data- and context-parallel ranks.
        overlap_grad_reduce: reduce gradients during the backward pass.
        overlap_param_gather: gather parameters during the next forward pass; needs the other two.
        bucket_size: parameters that are reduced and gathered together, where that is overlapped; None: Megatron's own.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        use_distributed_optimizer=distributed,
        bucket_size=bucket_size,
    )
    wrapped = []
    for index, chunk in enumerate(model_chunks):
        if torch.cuda.is_available():
            chunk = chunk.cuda(torch.cuda.current_device())
        if config.bf16:
            chunk = Float16Module(config, chunk)
        # Buckets serve overlap; later chunks run when the first ones' communication already fills the time.
        ddp = DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0, pg_collection=groups)
        wrapped.append(ddp)
    return wrapped


def build_optimizer(
    model_chunks: Sequence[DistributedDataParallel], optim: OptimConfig, groups: ProcessGroupCollection
) -> MegatronOptimizer:
    """Megatron's optimizer over wrapped chunks: fused Adam of TransformerEngine or Apex if installed, else torch's.

    Biases and norm weights are not decayed; bf16 parameters have fp32 main parameters beside them. Collective: every
    rank of the world must call it.
    """
    wrapped, bf16 = model_chunks[0].ddp_config, model_chunks[0].config.bf16
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
    found = get_megatron_optimizer(config, list(model_chunks), use_gloo_process_groups=False, pg_collection=groups)
    if optim.states_on_host:
        keep_on_host(found)
    return found


def build_scheduler(
    optimizer: MegatronOptimizer, optim: OptimConfig, steps: int, global_batch_size: int
) -> OptimizerParamScheduler:
    """The learning-rate schedule, which counts in samples: call ``step(increment=global_batch_size)`` after each step.

    The rate rises linearly from 0 to ``lr`` over ``warmup_steps`` and falls to ``min_lr`` at ``decay_steps`` (warm-up
    included), as ``decay_style`` says. After a checkpoint is loaded the position comes from the checkpoint and all else
    from ``optim``.

    Args:
        optimizer: whose parameter groups get the rate.
        optim: the schedule, in optimizer steps.
        steps: of the run, which the decay takes where ``optim.decay_steps`` is null.
        global_batch_size: samples per optimizer step, over all ranks.
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


def connect(
    config: TransformerConfig, model_chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> None:
    """Set on ``config`` the hooks by which Megatron's schedules reduce gradients and scale the loss.

    Call it once, before the first ``forward_backward_func``. Then a training step is: ``zero_grad_buffer()`` of every
    chunk, ``optimizer.zero_grad()``, ``forward_backward_func(...)``, ``optimizer.step()``, ``scheduler.step(...)``.
    """
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if model_chunks[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in model_chunks]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """The rate that the next ``optimizer.step()`` will use."""
    rate: float | None = get_canonical_lr_for_logging(optimizer.param_groups)
    assert rate is not None, "every optimizer of this module has a default parameter group"
    return rate


def named_parameters(models: Sequence[DistributedDataParallel]) -> dict[str, Any]:
    """This rank's parameters, to which DDP gives `main_grad`, by names that count layers over all pipeline
    stages, and experts over all ranks."""
    (gpt,) = unwrap_model(list(models))
    before = gpt.decoder.layers[0].layer_number - 1
    found = {}
    for name, parameter in gpt.named_parameters():
        if name.startswith(_LAYERS):
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            name = f"{_LAYERS}{before + int(number)}.{rest}"
            name = expert_name(name, getattr(gpt.decoder.layers[int(number)].mlp, "local_expert_indices", [0])[0])
        found[name] = parameter
    return found


def whole_gradients(
    models: Sequence[DistributedDataParallel], groups: ProcessGroupCollection, distributed: bool
) -> dict[str, Tensor]:
    """A copy of the gradients of this rank's parameters, reduced over data- and context-parallel ranks. All call it.

    distributed: whether the optimizer is; each of these ranks has then reduced one piece of each bucket.
    """
    if distributed:
        for model in models:
            for buffers, group in (
                (model.buffers, groups.dp_cp),
                (model.expert_parallel_buffers, groups.expt_dp),
            ):
                for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
                    pieces = bucket.grad_data.chunk(group.size())
                    dist.all_gather(list(pieces), pieces[group.rank()].clone(), group=group)
    return {name: x.main_grad.clone() for name, x in named_parameters(models).items()}
