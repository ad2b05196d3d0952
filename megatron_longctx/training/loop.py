"""The training loop: data, steps, optimizer, metrics, checkpoints."""

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..config import Config, environment, names
from ..core.comm import on_rank_0
from ..mcore import checkpoint, groups, model, optimizer
from ..mcore.checkpoint_folder import iteration_directory
from ..mcore.data import Identity, TrainingBatch, TrainingData, deal_rule, identity, micro_batches
from ..mcore.objectives import make_objective
from ..mcore.sequence import ShardedSequence, build_sequence
from ..mcore.step import LossSum, TrainStep, local_device
from ..mcore.tokenizer import build_tokenizer
from ..planner.describe import imbalance_pct
from ..planner.flops import peak_tflops
from . import heartbeat, preflight
from .loader import Loader
from .metrics import ConsoleSink, JsonlSink, Sink, WandbSink
from .monitoring import (
    Interval,
    NonFiniteError,
    Saver,
    TensorBoardSink,
    Validation,
    dump_nonfinite,
    memory_peaks,
    profiled,
)
from .run_folder import RunFolder
from .signals import StopRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """The results of one step, equal on all ranks."""

    loss: LossSum
    grad_norm: float | None
    lr: float


class Trainer:
    """One rank's part of a run. Construction is collective, and resumes from the run's latest checkpoint.

    `data` is the identity of the run's data, if it is known already.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        stop: StopRequest,
        data: Identity | None = None,
        build_sequence: Callable[[Config, dist.ProcessGroup], ShardedSequence] = build_sequence,
    ) -> None:
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
        self.identity = data or on_rank_0(lambda: identity(config, tokenizer))
        self.sequence = build_sequence(config, self.groups.cp)
        self.sequence.attention.measure_times()
        self._build()
        self.sequence.announce(packs=config.data.packing != "none")
        dp_size = self.groups.dp.size()
        self.train_step = TrainStep(
            models=self.models,
            sequence=self.sequence,
            groups=self.groups,
            micro_batch_size=train.micro_batch_size,
            num_micro_batches=train.global_batch_size // train.micro_batch_size // dp_size,
            objective=make_objective(train),
        )
        self.validation = None
        if train.eval_interval is not None:
            self.validation = Validation(config, tokenizer, self.vocab_size, self.train_step)
        heartbeat.begin("loading a checkpoint")
        self.step, self.tokens = self._resume()
        self.interval = Interval()
        self.validated = -1, math.nan  # the last step with a validation loss, and that loss
        self.saver = Saver(self.folder.checkpoints, train, self.step)
        self.loader = Loader(
            self.data,
            micro_batches(config, self.step, self.groups.dp.rank(), dp_size, self.data.dealer(config, self.order)),
            config.data.workers,
            local_device(),
            prepare=self._prepare,
        )
        self.sinks = self._open_sinks() if dist.get_rank() == 0 else []
        self._update_status("running")

    def train(self) -> None:
        """Train to `train.steps`, or to the step in which a stop signal arrives, and save the last state."""
        train = self.config.train
        begun, since = self.step, time.perf_counter()
        if self.step >= train.steps:
            logger.info("the run is complete at step %d: raise train.steps to go on", self.step)
        try:
            while self.step < train.steps and not self._stopped():
                heartbeat.begin(f"step {self.step + 1}")
                first, begin = self.step == begun, time.perf_counter()
                if first:
                    since = begin
                    logger.info("first step: connects the ranks and compiles kernels, which a new machine does once")
                with self._profiled():
                    result = self._one_step()
                if first:
                    logger.info(self._first_step_parts(begin))
                self.step += 1
                self.tokens += result.loss.work.tokens
                # Measured from step to step: `_stopped` waits for the rest of the optimizer's work on the device.
                now = time.perf_counter()
                self.interval.seconds += now - since
                since = now
                self.interval.losses.append(result.loss)
                validation_loss = self._validation_loss()
                if validation_loss is not None:
                    self.validated = self.step, validation_loss
                    since = time.perf_counter()
                if self.step % train.log_interval == 0 or self.step == train.steps or validation_loss is not None:
                    self._log(result, validation_loss)
                self._update_status("running")
                at_interval = train.save_interval is not None and self.step % train.save_interval == 0
                if train.save and (at_interval or self._save_now):
                    self._save()
                    since = time.perf_counter()
                elif self._save_now:
                    logger.info("a signal asked for a checkpoint, but none is written with train.save=false")
            if self.interval.losses:
                self._log(result, None)
            if train.save and self.saver.latest != self.step:
                self._save()
            heartbeat.begin("writing the last checkpoint")
            self._finish_save()
            heartbeat.begin("ending")
        except NonFiniteError:  # all ranks raise it
            self._finish_save()
            raise
        finally:
            self.loader.close()
            for sink in self.sinks:
                sink.close()
        if self.step >= train.steps:
            self._update_status("complete")
        else:
            self._update_status("stopped", signal=self.stopped_by and self.stopped_by.name)
            here = "here" if self.saver.latest == self.step else f"step {self.saver.latest} (train.save=false)"
            logger.info("stopped at step %d of %d: the same command goes on from %s", self.step, train.steps, here)

    def _build(self) -> None:
        config, par, train = self.config, self.config.parallelism, self.config.train
        megatron = model.transformer_config(config)
        gpt = model.build_model(config, megatron, self.groups, self.sequence, self.vocab_size)
        if par.overlap_param_gather == "auto" and config.no_param_gather is not None:
            logger.info("parameters are not gathered during forward, because of %s", config.no_param_gather)
        overlaps = {"overlap_grad_reduce": par.overlap_grad_reduce, "overlap_param_gather": config.overlap_param_gather}
        self.models = optimizer.wrap_ddp([gpt], megatron, self.groups, distributed=config.optim.distributed, **overlaps)
        self.optimizer = optimizer.build_optimizer(self.models, config.optim, self.groups)
        steps, batch = train.steps, train.global_batch_size
        self.scheduler = optimizer.build_scheduler(self.optimizer, config.optim, steps, batch)
        optimizer.connect(megatron, self.models, self.optimizer)

    def _one_step(self) -> StepResult:
        train = self.config.train
        batches: list[TrainingBatch] = []
        for chunk in self.models:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.train_step.run(self._next_batches(batches))
        self._optimizer_began = time.perf_counter()
        self._require_finite("loss", loss.mean, batches)
        lr = optimizer.learning_rate(self.optimizer)
        heartbeat.begin(f"step {self.step + 1}, optimizer")
        self.saver.wait_staged()
        self._before_optimizer_step()
        _, grad_norm, _ = self.optimizer.step()
        if grad_norm is not None:
            self._require_finite("gradient norm", float(grad_norm), batches)
        self.scheduler.step(increment=train.global_batch_size)
        return StepResult(loss, None if grad_norm is None else float(grad_norm), lr)

    def _before_optimizer_step(self) -> None:
        """Hook for subclasses, which every rank calls when gradients are complete."""

    def _first_step_parts(self, begin: float) -> str:
        """Describe the parts of the first step, which began at `begin` and has just ended."""
        update = time.perf_counter() - self._optimizer_began
        waited = self.interval.data_wait_s
        passes = self._optimizer_began - begin - waited
        return f"first step: {passes:.1f} s forward and backward, {waited:.1f} s data, {update:.1f} s optimizer"

    def _next_batches(self, taken: list[TrainingBatch]) -> Iterator[TrainingBatch]:
        """Yield the step's micro-batches, append them to `taken`, and measure how long the step waits for them."""
        for _ in range(self.train_step.num_micro_batches):
            begin = time.perf_counter()
            heartbeat.begin(f"step {self.step + 1}, waiting for data", self.config.parallelism.timeout_s)
            batch = next(self.loader)
            heartbeat.begin(f"step {self.step + 1}, forward and backward")
            self.interval.data_wait_s += time.perf_counter() - begin
            taken.append(batch)
            if self.sinks:
                self.interval.imbalances_pct.append(self._imbalance_pct(batch))
            yield batch

    def _prepare(self, batch: TrainingBatch) -> None:
        """Fill the caches of plans ahead of the step that uses the batch, in the loader's thread."""
        self.sequence.prepare(batch.lengths, batch.parents)
        if self.sinks:
            self._imbalance_pct(batch)

    def _imbalance_pct(self, batch: TrainingBatch) -> float:
        mask = self.sequence.pack(batch.lengths, batch.parents).mask(window=self.config.model.widest_window)
        return imbalance_pct(self.sequence.attention.plan(mask))

    def _profiled(self) -> AbstractContextManager[None]:
        step = self.step + 1
        if dist.get_rank() != 0 or step != self.config.logging.profile_step:
            return nullcontext()
        return profiled(self.folder.path / "profile", step)

    def _require_finite(self, what: str, value: float, batches: list[TrainingBatch]) -> None:
        if not math.isfinite(value):
            path = dump_nonfinite(self.folder.path, self.step + 1, what, value, batches, self.models)
            raise NonFiniteError(
                f"{what} is {value} in step {self.step + 1}: expected a finite number. What every rank saw is "
                f"in {path}; the last checkpoint is unchanged. Lower optim.lr, check the data, or try "
                f"train.precision=fp32."
            )

    def _log(self, result: StepResult, validation_loss: float | None) -> None:
        """Write one record of the steps since the previous record; `result` is that of the latest step."""
        self.interval.save_stall_s, self.saver.stall_s = self.saver.stall_s, 0.0
        interval, self.interval = self.interval, Interval()
        if not self.sinks:
            return
        record = {
            names.STEP: self.step,
            names.TOKENS: self.tokens,
            names.GRAD_NORM: result.grad_norm,
            names.LEARNING_RATE: result.lr,
            names.VALIDATION_LOSS: validation_loss,
            **interval.record(self.config, self.vocab_size, dist.get_world_size(), self._peak_tflops),
            **memory_peaks(),
        }
        for sink in self.sinks:
            sink.write(record)

    def _validation_loss(self) -> float | None:
        """Return the validation loss if this step has one."""
        if self.validation is None or self.step % (self.config.train.eval_interval or 1):
            return None
        heartbeat.begin(f"step {self.step}, validation")
        loss = self.validation.loss()
        self.sequence.attention.times()  # discarded, so that the next step does not count them
        return loss

    def _open_sinks(self) -> list[Sink]:
        config = self.config
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self._peak_tflops = peak_tflops(device, config.logging.peak_tflops)
        environment.write(self.folder.path, dist.get_world_size())
        return [
            JsonlSink(self.folder.metrics, self.step),
            WandbSink(self.folder.path, config, logger.info),
            *([TensorBoardSink(self.folder.path, self.step)] if config.logging.tensorboard else []),
            ConsoleSink(config.train.steps, logger.info),
        ]

    def _state(self) -> checkpoint.TrainingState:
        return checkpoint.TrainingState(
            self.models, self.optimizer, self.scheduler, model.fingerprint(self.config, self.vocab_size)
        )

    def _resume(self) -> tuple[int, int]:
        """Load the latest checkpoint, if any. Return the steps and tokens that the run has been trained on."""
        self.order = deal_rule(self.config, self.vocab_size)
        if checkpoint.latest(self.folder.checkpoints) is None:
            self._init_weights()
            return 0, 0
        loaded = checkpoint.load(self.folder.checkpoints, self._state())
        warning = preflight.check_resumed(self.config, self.folder.path, loaded, self.identity)
        if warning and dist.get_rank() == 0:
            logger.warning(warning)
        logger.info("resumed from step %d of %s", loaded.iteration, self.folder.checkpoints)
        wanted, self.order = self.order, deal_rule(self.config, self.vocab_size, loaded.extra)
        if wanted and not self.order:
            logger.info("packs stay in the random order with which an earlier version began: data.max_wait_steps waits")
        samples = loaded.extra["consumed_samples"]
        # Earlier versions did not count tokens; packs may have fewer than this.
        return loaded.iteration, loaded.extra.get("consumed_tokens", samples * self.config.data.seq_length)

    def _init_weights(self) -> None:
        """Load the weights of the run that `train.init_from` names, if any."""
        if (run := self.config.train.init_from) is None:
            return
        weights = replace(self._state(), optimizer=None, scheduler=None, main=self.optimizer)
        loaded = checkpoint.load(Path(run, "checkpoints"), weights, ignore=model.RETRAINABLE)
        logger.info("begins with the weights of step %d of %s", loaded.iteration, run)

    def _save(self) -> None:
        heartbeat.begin(f"step {self.step}, saving")
        samples = self.step * self.config.train.global_batch_size
        extra = {"consumed_samples": samples, "consumed_tokens": self.tokens, "data": self.identity}
        extra["order"] = self.order and list(self.order)
        self._finish_save()
        step, loss = self.validated
        validation_loss = loss if step == self.step else None
        self.saver.begin(self.step, self._state(), extra, validation_loss)
        if not self.config.train.async_save:
            self._finish_save()

    def _finish_save(self) -> None:
        if (step := self.saver.finish()) is not None:
            self._update_status("running", saved=step)
            path = iteration_directory(self.folder.checkpoints, step)
            for sink in self.sinks:
                if isinstance(sink, WandbSink):
                    sink.checkpoint(path, step)

    def _update_status(self, state: str, **more: Any) -> None:
        if dist.get_rank() == 0:
            self.folder.status.update(state, self.step, **more)

    def _stopped(self) -> bool:
        """Whether any rank received a stop signal. Also finishes a checkpoint that all ranks have written.

        Ranks agree on both, and on whether the next step is saved because a rank received the save signal or
        `train.save_minutes` have passed: a rank that goes on alone would wait for the others forever.
        """
        own = [float(self.stop.received or 0), float(not self.saver.written), float(self.stop.save or self.saver.due)]
        flags = torch.tensor(own, device=local_device())
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        stop, writing, save_now = flags.tolist()
        self._save_now = bool(save_now)
        if save_now:
            self.stop.save = False  # also if its signal came to this rank while all agreed
        if not writing:
            self._finish_save()
        self.stopped_by = signal.Signals(int(stop)) if stop else None
        return self.stopped_by is not None
