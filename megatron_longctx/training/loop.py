"""The training loop: data, step, optimizer, metrics, checkpoints."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import names
from ..comm import on_rank_0
from ..config import Config
from ..mcore import checkpoint, groups, model, optimizer
from ..mcore.data import Batch, TrainingData, shares
from ..mcore.identity import identity
from ..mcore.sequence import build_sequence
from ..mcore.step import LossSum, TrainStep, local_device
from ..mcore.tokenizer import build_tokenizer
from ..metrics import environment
from ..metrics.hardware import current_device_name, peak_tflops
from ..metrics.sinks import ConsoleSink, JsonlSink, Sink
from ..metrics.wandb_run import WandbSink
from . import saved_run
from .heartbeat import at
from .interval import Interval
from .loader import Loader
from .nonfinite import NonFiniteError, dump
from .profiling import profiled
from .run_folder import RunFolder
from .saver import Saver
from .signals import StopRequest
from .tensorboard import TensorBoardSink
from .validation import Validation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What one step gave, equal on all ranks."""

    loss: LossSum
    grad_norm: float | None
    lr: float


class Trainer:
    """One rank's share of a run. Construction is collective, and resumes from the run's latest checkpoint."""

    def __init__(self, config: Config, folder: RunFolder, stop: StopRequest) -> None:
        self.config = config
        self.folder = folder
        self.stop = stop
        self.stopped_by: signal.Signals | None = None
        train = config.train
        self.groups = groups.from_config(config.parallelism, train.seed)
        if config.attention.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
        self.vocab_size = model.padded_vocab_size(config.model, tokenizer.vocab_size)
        self.data = TrainingData(config, tokenizer, self.vocab_size)
        for line in self.data.describe():
            logger.info(line)
        self.identity = on_rank_0(lambda: identity(config, tokenizer))
        self.sequence = build_sequence(config, self.groups.cp)
        self.sequence.attention.measure_times()
        self._build()
        self.sequence.expect(packs=config.data.packing != "none")
        dp_size = self.groups.dp.size()
        self.train_step = TrainStep(
            models=self.models,
            sequence=self.sequence,
            groups=self.groups,
            micro_batch_size=train.micro_batch_size,
            num_micro_batches=train.global_batch_size // train.micro_batch_size // dp_size,
        )
        self.validation = Validation.of(config, tokenizer, self.vocab_size, self.train_step)
        at("loading a checkpoint")
        self.step, self.tokens = self._resume()
        self.interval = Interval()
        self.saver = Saver(self.folder.checkpoints, train, self.step)
        self.loader = Loader(
            self.data,
            shares(config, self.step, self.groups.dp.rank(), dp_size),
            config.data.workers,
            local_device(),
            prepare=self._prepare,
        )
        self.sinks = self._open_sinks() if dist.get_rank() == 0 else []
        self.status = folder.status if dist.get_rank() == 0 else None
        self._tell("running")

    def train(self) -> None:
        """Run to `train.steps`, or to the step in which a stop signal arrives; the last state is checkpointed."""
        train = self.config.train
        begun, since = self.step, time.perf_counter()
        if self.step >= train.steps:
            logger.info("the run is complete at step %d: raise train.steps to go on", self.step)
        try:
            while self.step < train.steps and not self._stopped():
                at(f"step {self.step + 1}")
                first, begin = self.step == begun, time.perf_counter()
                if first:
                    since = begin
                    logger.info("first step: connects the ranks and compiles kernels, which a new machine does once")
                with self._profiled():
                    result = self._one_step()
                if first:
                    logger.info(self._parts(begin))
                self.step += 1
                self.tokens += result.loss.work.tokens
                # From step to step: what the device has left of the optimizer's work, `_stopped` waits for.
                now = time.perf_counter()
                self.interval.seconds += now - since
                since = now
                self.interval.losses.append(result.loss)
                validation_loss = self._validation_loss()
                if validation_loss is not None:
                    since = time.perf_counter()
                if self.step % train.log_interval == 0 or self.step == train.steps or validation_loss is not None:
                    self._log(result, validation_loss)
                self._tell("running")
                if train.save_interval and self.step % train.save_interval == 0 and train.save:
                    self._save()
                    since = time.perf_counter()
            if self.interval.losses:
                self._log(result, None)
            if train.save and self.saver.latest != self.step:
                self._save()
            at("writing the last checkpoint")
            self._finish_save()
            at("ending")
        except NonFiniteError:  # on every rank
            self._finish_save()
            raise
        finally:
            self.loader.close()
            for sink in self.sinks:
                sink.close()
        if self.step >= train.steps:
            self._tell("complete")
        else:
            self._tell("stopped", signal=self.stopped_by and self.stopped_by.name)
            logger.info("stopped at step %d of %d: the same command goes on from here", self.step, train.steps)

    def _build(self) -> None:
        config, par = self.config, self.config.parallelism
        megatron = model.transformer_config(config)
        gpt = model.build_model(config, megatron, self.groups, self.sequence, self.vocab_size)
        if par.overlap_param_gather == "auto" and config.no_param_gather is not None:
            logger.info("parameters are not gathered beside forward, because of %s", config.no_param_gather)
        self.models = optimizer.wrap_ddp(
            [gpt],
            megatron,
            self.groups,
            distributed=config.optim.distributed,
            overlap_grad_reduce=par.overlap_grad_reduce,
            overlap_param_gather=config.overlap_param_gather,
        )
        self.optimizer = optimizer.build_optimizer(self.models, config.optim, self.groups)
        self.scheduler = optimizer.build_scheduler(
            self.optimizer, config.optim, config.train.steps, config.train.global_batch_size
        )
        optimizer.connect(megatron, self.models, self.optimizer)

    def _one_step(self) -> StepResult:
        train = self.config.train
        taken: list[Batch] = []
        for chunk in self.models:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.train_step.run(self._batches(taken))
        self._optimizer_from = time.perf_counter()
        self._require_finite("loss", loss.mean, taken)
        lr = optimizer.learning_rate(self.optimizer)
        at(f"step {self.step + 1}, optimizer")
        self.saver.wait_staged()
        _, grad_norm, _ = self.optimizer.step()
        if grad_norm is not None:
            self._require_finite("gradient norm", float(grad_norm), taken)
        self.scheduler.step(increment=train.global_batch_size)
        return StepResult(loss, None if grad_norm is None else float(grad_norm), lr)

    def _parts(self, begin: float) -> str:
        """Where the time of a step has gone that began then and has just ended."""
        update = time.perf_counter() - self._optimizer_from
        passes = self._optimizer_from - begin - self.interval.data_wait_s
        waited = self.interval.data_wait_s
        return f"first step: {passes:.1f} s forward and backward, {waited:.1f} s data, {update:.1f} s optimizer"

    def _batches(self, taken: list[Batch]) -> Iterator[Batch]:
        """The micro-batches of a step, each noted in `taken`, and how long the step waits for them."""
        for _ in range(self.train_step.num_micro_batches):
            begin = time.perf_counter()
            at(f"step {self.step + 1}, waiting for data", self.config.parallelism.timeout_s)
            batch = next(self.loader)
            at(f"step {self.step + 1}, forward and backward")
            self.interval.data_wait_s += time.perf_counter() - begin
            taken.append(batch)
            if self.sinks:
                self.interval.imbalances_pct.append(self._imbalance_pct(batch))
            yield batch

    def _prepare(self, batch: Batch) -> None:
        """Ahead of the step that takes it, in the loader's thread: what is found here is found again there."""
        self.sequence.prepare(batch.lengths)
        if self.sinks:
            self._imbalance_pct(batch)

    def _imbalance_pct(self, batch: Batch) -> float:
        mask = self.sequence.pack(batch.lengths).mask(window=self.config.model.widest_window)
        return self.sequence.attention.plan(mask).imbalance_pct()

    def _profiled(self) -> AbstractContextManager[None]:
        step = self.step + 1
        if dist.get_rank() != 0 or step != self.config.logging.profile_step:
            return nullcontext()
        return profiled(self.folder.path / "profile", step)

    def _require_finite(self, what: str, value: float, batches: list[Batch]) -> None:
        if not math.isfinite(value):
            path = dump(self.folder.path, self.step + 1, {what: value}, batches, self.models)
            raise NonFiniteError(
                f"{what} is {value} in step {self.step + 1}: expected a finite number. What every rank saw is "
                f"in {path}; "
                f"the last checkpoint is untouched. Lower optim.lr, check the data, or try train.precision=fp32."
            )

    def _log(self, result: StepResult, validation_loss: float | None) -> None:
        """Write the record of the steps since the last; result: of the latest."""
        self.interval.save_stall_s, self.saver.stall_s = self.saver.stall_s, 0.0
        done, self.interval = self.interval, Interval()
        if not self.sinks:
            return
        record = {
            names.STEP: self.step,
            names.TOKENS: self.tokens,
            names.GRAD_NORM: result.grad_norm,
            names.LEARNING_RATE: result.lr,
            names.VALIDATION_LOSS: validation_loss,
            **done.record(self.config.model, self.vocab_size, dist.get_world_size(), self._peak),
            **_memory(),
        }
        for sink in self.sinks:
            sink.write(record)

    def _validation_loss(self) -> float | None:
        """Of the second part of `data.split`, in the steps that `train.eval_interval` asks for it."""
        if self.validation is None or self.step % self.validation.interval:
            return None
        at(f"step {self.step}, validation")
        loss = self.validation.loss()
        self.sequence.attention.times()  # they are no part of the next step
        return loss

    def _open_sinks(self) -> list[Sink]:
        config = self.config
        self._peak = peak_tflops(current_device_name(), config.logging.peak_tflops)
        environment.write(self.folder.path, dist.get_world_size())
        return [
            JsonlSink(self.folder.metrics, self.step),
            WandbSink(self.folder.path, config),
            *([TensorBoardSink(self.folder.path, self.step)] if config.logging.tensorboard else []),
            ConsoleSink(config.train.steps, logger.info),
        ]

    def _state(self) -> checkpoint.TrainingState:
        return checkpoint.TrainingState(
            self.models, self.optimizer, self.scheduler, model.fingerprint(self.config, self.vocab_size)
        )

    def _resume(self) -> tuple[int, int]:
        """Steps and tokens that the run has been trained on."""
        if checkpoint.latest(self.folder.checkpoints) is None:
            self._begin()
            return 0, 0
        loaded = checkpoint.load(self.folder.checkpoints, self._state())
        untold = saved_run.check_resumed(self.config, self.folder.path, loaded, self.identity)
        if untold and dist.get_rank() == 0:
            logger.warning(untold)
        logger.info("resumed from step %d of %s", loaded.iteration, self.folder.checkpoints)
        samples = loaded.extra["consumed_samples"]
        # Earlier versions did not count tokens, and packs may be shorter than this.
        return loaded.iteration, loaded.extra.get("consumed_tokens", samples * self.config.data.seq_length)

    def _begin(self) -> None:
        """With the weights of another run, if `train.init_from` names one."""
        if (run := self.config.train.init_from) is None:
            return
        weights = checkpoint.TrainingState(self.models, fingerprint=model.fingerprint(self.config, self.vocab_size))
        loaded = checkpoint.load(Path(run, "checkpoints"), weights, free=model.RETRAINABLE)
        self.optimizer.reload_model_params()
        logger.info("begins with the weights of step %d of %s", loaded.iteration, run)

    def _save(self) -> None:
        at(f"step {self.step}, saving")
        samples = self.step * self.config.train.global_batch_size
        extra = {"consumed_samples": samples, "consumed_tokens": self.tokens, "data": self.identity}
        self._finish_save()
        self.saver.begin(self.step, self._state(), extra)
        if not self.config.train.async_save:
            self._finish_save()

    def _finish_save(self) -> None:
        if (step := self.saver.finish()) is not None:
            self._tell("running", saved=step)

    def _tell(self, state: str, **more: Any) -> None:
        if self.status is not None:
            self.status.tell(state, self.step, **more)

    def _stopped(self) -> bool:
        """Whether any rank has been asked to stop: all must agree, or some would wait for the others for ever. A
        checkpoint that all ranks have written is made the latest."""
        flags = torch.tensor([float(self.stop.received or 0), float(not self.saver.written)], device=local_device())
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        stop, writing = flags.tolist()
        if not writing:
            self._finish_save()
        self.stopped_by = signal.Signals(int(stop)) if stop else None
        return self.stopped_by is not None


def _memory() -> dict[str, float | None]:
    if not torch.cuda.is_available():
        return {names.PEAK_ACTIVE_GIB: None, names.PEAK_RESERVED_GIB: None}
    stats = torch.cuda.memory_stats()
    return {
        names.PEAK_ACTIVE_GIB: stats["active_bytes.all.peak"] / 2**30,
        names.PEAK_RESERVED_GIB: stats["reserved_bytes.all.peak"] / 2**30,
    }
