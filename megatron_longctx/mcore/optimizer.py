"""Megatron's DDP wrapper, optimizer and learning-rate schedule of a validated configuration, and reduced gradients.

Optimizer states may wait in host memory: the device holds only a few parameters' states, while it steps them.
ZeRO-Offload (arXiv:2101.06840) keeps states and Adam on the host. Here Adam stays on the device and its results are
bit-identical: the states are copied to the device, stepped and copied back piece by piece, on streams beside it.
Megatron's own `optimizer_cpu_offload` steps on the CPU, and its states do not fit other runs' checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    ChainedOptimizer,
    DistributedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..config import OptimConfig
from ..core.errors import refuse
from ..planner.memory import STATES_PIECE
from .experts import expert_name
from .fp8 import fp8_weights

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

    Gradients are accumulated and reduced in fp32. With ``config.fp8_param``, gathers of weights have their FP8 bytes.

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
        fp8_param_gather=config.fp8_param,
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

    Raises:
        ValueError: TransformerEngine has not kept the values that FP8 weights had before they were quantized.
    """
    wrapped, bf16, fp8_param = models[0].ddp_config, models[0].config.bf16, models[0].config.fp8_param
    weights = fp8_weights(models[0])
    for name, weight in weights.items():
        if getattr(weight, "get_high_precision_init_val", lambda: None)() is None:
            expected = f"false with this TransformerEngine, which has lost the values of {name} before quantization"
            raise refuse("train.fp8_param", True, expected, "Install another release of it, or leave it.")
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
        fp8_recipe=models[0].config.fp8_recipe if fp8_param else None,
        overlap_param_gather=wrapped.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(config, list(models), use_gloo_process_groups=False, pg_collection=groups)
    for weight in weights.values():  # Megatron keeps on the host what other ranks have begun with, until the first step
        weight.clear_high_precision_init_val()
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


_BLOCK_BYTES = 2**28  # allocated together, or more for a larger state: torch rounds each allocation to a power of two
_ALIGNMENT = 512


def keep_on_host(optimizer: MegatronOptimizer) -> None:
    """Keep the states of distributed optimizers on the host except during their steps. Call this before any step or
    load."""
    for part in parts_of(optimizer):
        assert isinstance(part, DistributedOptimizer), part
        part.states_on_host = HostStates(part)


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers of a chain, or the optimizer itself as the only one."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def host_states(optimizer: MegatronOptimizer) -> HostStates | None:
    """Return the states of an optimizer that `keep_on_host` was called with; None if they stay on the device."""
    return getattr(optimizer, "states_on_host", None)


@dataclass
class _Piece:
    """Parameters that are stepped together, keyed by the number of their group, and the event after their last copy."""

    groups: dict[int, list[Tensor]] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None

    @property
    def parameters(self) -> Iterator[Tensor]:
        for parameters in self.groups.values():
            yield from parameters


class HostStates:
    """The main parameters of bf16 weights, and the moments, of one distributed optimizer.

    A tensor whose values are on the host has an empty storage on the device, like FSDP's parameters.

    Args:
        optimizer: Megatron's; its inner optimizer is the Adam of torch, TransformerEngine or Apex.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._inner: torch.optim.Optimizer = optimizer.optimizer
        self._weights = {
            main: weight
            for weights, mains in zip(
                optimizer.shard_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True
            )
            for weight, main in zip(weights, mains, strict=True)
        }
        self._host: Any = WeakTensorKeyDictionary()
        self._block = torch.empty(0, dtype=torch.uint8)
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        if any(parameter.is_cuda for group in self._inner.param_groups for parameter in group["params"]):
            self._streams = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._step, self._inner.step = self._inner.step, self._step_in_pieces
        optimizer._copy_model_params_to_main_params = self._read_weights
        optimizer._copy_main_params_to_model_params = lambda: None  # each piece does it
        self.offload()

    def values(self, state: Tensor) -> Tensor:
        """Return the tensor with a state's values, on either device. It may be read and written until the next step."""
        values: Tensor = self._host.get(state, state)
        return values

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Let `new` take over the values of `old`, which are on the host."""
        self._host[new] = self._host.pop(old)
        new.untyped_storage().resize_(0)

    def offload(self) -> None:
        """Copy states that something else, such as a load, has put on the device to the host, and free them."""
        for piece in self._pieces():
            self._send(piece)
            self._free(piece)

    def synchronize(self) -> None:
        """Wait until all copies to the host have ended."""
        for stream in self._streams:
            stream.synchronize()

    def _step_in_pieces(self) -> None:
        groups, pieces = self._inner.param_groups, self._pieces()
        stepped: dict[int, dict[str, Any]] = {}
        self._fetch(pieces[0])
        for index, piece in enumerate(pieces):
            if index > 0:
                self._free(pieces[index - 1])
            if index + 1 < len(pieces):
                self._fetch(pieces[index + 1])
            self._wait(piece)
            # An Adam that counts steps per group starts from the same count in every piece of a group.
            own_groups = {number: groups[number] | {"params": params} for number, params in piece.groups.items()}
            self._inner.param_groups = list(own_groups.values())
            try:
                self._step()
            finally:
                self._inner.param_groups = groups
            stepped |= own_groups
            for parameter in piece.parameters:
                if parameter in self._weights:
                    self._weights[parameter].copy_(parameter.detach())
            self._send(piece)
        self._free(pieces[-1])
        for number, group in stepped.items():
            groups[number].update({key: value for key, value in group.items() if key != "params"})

    @torch.no_grad()
    def _read_weights(self, state_dict: None = None) -> None:
        """Copy weights to their main parameters, of which one piece at a time is on the device."""
        assert state_dict is None, "weights are read from the model alone"
        for piece in self._pieces():
            for main in piece.parameters:
                if main in self._weights:
                    main.untyped_storage().resize_(main.numel() * main.element_size())
                    main.copy_(self._weights[main])
            self._send(piece)
            self._free(piece)

    def _pieces(self) -> list[_Piece]:
        pieces, size = [_Piece()], 0
        for number, group in enumerate(self._inner.param_groups):
            if not group["params"]:  # its parameters are on other ranks; Adam counts its steps here too
                pieces[-1].groups[number] = []
            for parameter in group["params"]:
                if size >= STATES_PIECE:
                    pieces.append(_Piece())
                    size = 0
                pieces[-1].groups.setdefault(number, []).append(parameter)
                size += parameter.numel()
        return pieces

    def _states(self, piece: _Piece) -> Iterator[Tensor]:
        """Yield a piece's tensors that are kept on the host: neither the weights nor step counts are."""
        for parameter in piece.parameters:
            if parameter in self._weights:
                yield parameter
            for key, state in self._inner.state.get(parameter, {}).items():
                if key != "step":
                    yield state

    def _fetch(self, piece: _Piece) -> None:
        on_host = [state for state in self._states(piece) if state in self._host]
        for state in on_host:
            state.untyped_storage().resize_(state.numel() * state.element_size())
        self._copy(piece, [(self._host[state], state) for state in on_host], self._streams[:1])

    def _send(self, piece: _Piece) -> None:
        on_device = [state for state in self._states(piece) if state.untyped_storage().size()]
        for state in on_device:
            if state not in self._host:
                self._host[state] = self._allocate(state)
        self._copy(piece, [(state, self._host[state]) for state in on_device], self._streams[1:])

    def _free(self, piece: _Piece) -> None:
        self._wait(piece)
        for state in self._states(piece):
            state.untyped_storage().resize_(0)

    @torch.no_grad()
    def _copy(self, piece: _Piece, copies: list[tuple[Tensor, Tensor]], streams: tuple[torch.cuda.Stream, ...]) -> None:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]) if streams else nullcontext():
            for source, target in copies:
                target.copy_(source, non_blocking=True)
        for stream in streams:
            piece.copied = stream.record_event()

    @staticmethod
    def _wait(piece: _Piece) -> None:
        if piece.copied is not None:
            torch.cuda.current_stream().wait_event(piece.copied)
            piece.copied = None

    def _allocate(self, like: Tensor) -> Tensor:
        """Return host memory, pinned if there is a GPU. It is never freed: a run's states keep their sizes."""
        size = like.numel() * like.element_size()
        if size > len(self._block):
            self._block = torch.empty(max(size, _BLOCK_BYTES), dtype=torch.uint8, pin_memory=like.is_cuda)
        taken, self._block = self._block[:size], self._block[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return taken.view(like.dtype).view(like.shape)
