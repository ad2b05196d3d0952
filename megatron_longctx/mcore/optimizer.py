"""Megatron's DDP wrapper, optimizer and learning-rate schedule from one small set of settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root")


@dataclass(frozen=True)
class OptimizerSettings:
    """Adam with decoupled weight decay, and its schedule in optimizer steps.

    The learning rate rises linearly from 0 to ``lr`` over ``warmup_steps`` and falls to ``min_lr`` at ``decay_steps``
    (warm-up included). Biases and norm weights are not decayed. ``clip_grad`` 0 means no clipping. ``distributed``
    shards the optimizer's state over the data- and context-parallel ranks. ``bf16`` keeps fp32 main parameters beside
    bf16 model parameters.
    """

    lr: float
    min_lr: float = 0.0
    warmup_steps: int = 0
    decay_steps: int = 1
    decay_style: str = "cosine"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    distributed: bool = True
    bf16: bool = False

    def __post_init__(self) -> None:
        if self.decay_style not in DECAY_STYLES:
            raise ValueError(
                f"decay_style is {self.decay_style!r}, expected one of {', '.join(DECAY_STYLES)}: choose one of these"
            )
        if not 0.0 <= self.min_lr <= self.lr:
            raise ValueError(
                f"min_lr is {self.min_lr} and lr {self.lr}, expected 0 <= min_lr <= lr: lower min_lr or raise lr"
            )
        if not 0 <= self.warmup_steps < self.decay_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and decay_steps {self.decay_steps}, expected "
                "0 <= warmup_steps < decay_steps: shorten the warm-up or decay later"
            )


def wrap_ddp(
    model_chunks: Sequence[MegatronModule],
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    *,
    distributed: bool,
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
) -> list[DistributedDataParallel]:
    """Move model chunks to this rank's device, to bf16 if the configuration says so, and into Megatron's DDP.

    Gradients are accumulated and reduced in fp32.

    Args:
        model_chunks: one model per virtual pipeline stage of this rank.
        config: the models' configuration (``bf16`` is read).
        groups: as ``groups.initialize`` returns them.
        distributed: whether the distributed optimizer will be used; must equal ``OptimizerSettings.distributed``.
        overlap_grad_reduce: reduce gradients during the backward pass.
        overlap_param_gather: gather parameters during the next forward pass.

    Returns:
        The wrapped chunks, in order.

    Raises:
        ValueError: if ``overlap_param_gather`` is asked for without the other two.
    """
    if overlap_param_gather and not (distributed and overlap_grad_reduce):
        raise ValueError(
            f"overlap_param_gather is True with distributed {distributed} and overlap_grad_reduce "
            f"{overlap_grad_reduce}, expected both True: set them, or leave overlap_param_gather off"
        )
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        use_distributed_optimizer=distributed,
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
    model_chunks: Sequence[DistributedDataParallel], settings: OptimizerSettings, groups: ProcessGroupCollection
) -> MegatronOptimizer:
    """Megatron's optimizer over wrapped chunks: fused Adam of TransformerEngine or Apex if installed, else torch's.

    Collective: every rank of the world must call it.

    Raises:
        ValueError: if the chunks were wrapped for another kind of optimizer.
    """
    wrapped_for = model_chunks[0].ddp_config.use_distributed_optimizer
    if wrapped_for != settings.distributed:
        raise ValueError(
            f"settings.distributed is {settings.distributed}, expected {wrapped_for}, the value given to wrap_ddp: "
            "pass the same value to both"
        )
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=settings.bf16,
        params_dtype=torch.bfloat16 if settings.bf16 else torch.float32,
        use_distributed_optimizer=settings.distributed,
        overlap_param_gather=model_chunks[0].ddp_config.overlap_param_gather,
    )
    return get_megatron_optimizer(config, list(model_chunks), use_gloo_process_groups=False, pg_collection=groups)


def build_scheduler(
    optimizer: MegatronOptimizer, settings: OptimizerSettings, global_batch_size: int
) -> OptimizerParamScheduler:
    """The learning-rate schedule, which counts in samples: call ``step(increment=global_batch_size)`` after each step.

    After a checkpoint is loaded the position comes from the checkpoint and everything else from ``settings``.

    Args:
        optimizer: whose parameter groups get the rate.
        settings: the schedule in optimizer steps.
        global_batch_size: samples per optimizer step, over all ranks.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps * global_batch_size,
        lr_decay_steps=settings.decay_steps * global_batch_size,
        lr_decay_style=settings.decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=settings.decay_steps * global_batch_size,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
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
