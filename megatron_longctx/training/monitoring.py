"""What the loop measures and writes: metrics, validation, profiles, dumps of non-finite steps, and checkpoints."""

import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ..config import Config, TrainConfig, files, names
from ..mcore import checkpoint, checkpoint_folder
from ..mcore.data import TrainingBatch, TrainingData
from ..mcore.step import EvalStep, LossSum, TrainStep
from ..planner.flops import Work, imbalance, performance, training_flops
from .metrics import Value

logger = logging.getLogger(__name__)

_PROFILED_ROWS = 20


@dataclass
class Interval:
    """Measurements of the steps since the last record. Seconds are those of the wall clock, of all steps together."""

    seconds: float = 0.0
    data_wait_s: float = 0.0
    save_stall_s: float = 0.0
    imbalances_pct: list[float] = field(default_factory=list)  # planned, of each micro-batch of this rank
    losses: list[LossSum] = field(default_factory=list)  # one per step

    def record(self, config: Config, vocab_size: int, num_devices: int, peak_tflops: float | None) -> dict[str, Any]:
        """Return the metrics: means over the steps, the loss per token; the save stall is a sum.

        For the arguments, see `performance` and `training_flops`.
        """
        model, fp8 = config.model, config.train.fp8 != "none"
        work = sum((loss.work for loss in self.losses), Work(0, 0, 0))
        total = LossSum(sum(loss.loss_sum for loss in self.losses), sum(loss.num_tokens for loss in self.losses), work)
        flops, steps = training_flops(model, vocab_size, work), len(self.losses)
        return {
            names.LOSS: total.mean,
            **performance(flops, work.tokens, self.seconds, num_devices, peak_tflops, fp8),
            names.IMBALANCE_DP: fmean(imbalance(model, vocab_size, loss.replicas) for loss in self.losses),
            names.STEP_S: self.seconds / steps,
            names.DATA_WAIT_S: self.data_wait_s / steps,
            names.SAVE_STALL_S: self.save_stall_s,
            names.IMBALANCE_PCT: fmean(self.imbalances_pct),
            names.MEASURED_IMBALANCE_PCT: _mean(loss.imbalance_pct for loss in self.losses),
            names.EXPOSED_COMM_S: _mean(loss.waited_s for loss in self.losses),
        }


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean, or None if a value is unknown."""
    known = list(values)
    return None if None in known else fmean(value for value in known if value is not None)


def memory_peaks() -> dict[str, float | None]:
    """Return the allocator's peaks since the process started, in GiB; None without a GPU."""
    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    peaks = {names.PEAK_ACTIVE_GIB: "active_bytes.all.peak", names.PEAK_RESERVED_GIB: "reserved_bytes.all.peak"}
    return {name: stats[key] / 2**30 if stats else None for name, key in peaks.items()}


class TensorBoardSink:
    """TensorBoard events in `<folder>/tensorboard`, keyed by `names`. Events of steps trained again are hidden."""

    def __init__(self, folder: Path, resumed_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an optional package, which takes seconds to import

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1)

    def write(self, record: Mapping[str, Value]) -> None:
        """Add one record at its `train/step`. None values are omitted."""
        for key, value in record.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, record[names.STEP])

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class Validation:
    """The loss of the model that `step` trains, on the first samples of the second part of `data.split`."""

    def __init__(self, config: Config, tokenizer: Any, vocab_size: int, step: TrainStep) -> None:
        self._data = TrainingData(config, tokenizer, vocab_size, part=1)
        self._step = EvalStep(step.models, step.sequence, step.groups, step.micro_batch_size)
        self._num_batches = config.train.eval_samples // step.micro_batch_size
        self._edges = (0, config.data.seq_length)

    def loss(self) -> float:
        """Return the mean loss per token, the same on every rank.

        It does not depend, bit for bit, on the data- and pipeline-parallel sizes.
        """
        group, rows = self._step.groups.dp, self._step.micro_batch_size

        def batch(number: int) -> TrainingBatch:
            return self._data[range(number * rows, (number + 1) * rows)]

        numbers = range(group.rank(), self._num_batches, group.size())
        table = self._step.run(batch, numbers, self._num_batches, self._edges)
        loss_sum, num_tokens = table.sum((0, 1)).tolist()
        return loss_sum / num_tokens if num_tokens > 0 else 0.0


@contextmanager
def profiled(folder: Path, step: int) -> Iterator[None]:
    """Profile the context and write `step_N.txt` and `step_N.trace.json.gz` into `folder`.

    The text has the operations that took longest: on GPUs kernels and copies, on CPUs torch's operators. Perfetto and
    chrome://tracing show the trace, with streams and gaps.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        yield
        if device == "cuda":
            torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"step_{step}.trace.json.gz"))
    table = profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=_PROFILED_ROWS)
    files.write_text(folder / f"step_{step}.txt", table + "\n")
    logger.info("profile of step %d in %s\n%s", step, folder, table)


class NonFiniteError(ArithmeticError):
    """A loss or gradient norm is NaN or infinite, and training stopped."""


def dump_nonfinite(
    folder: Path,
    step: int,
    what: str,
    value: float,
    batches: Sequence[TrainingBatch],
    models: Sequence[torch.nn.Module],
) -> Path:
    """Write what this rank saw of a non-finite step: values, micro-batches, non-finite parameters and gradients.

    Every rank of the job calls this. All know the same loss. Return the folder, which has `rank_<k>.json` and
    `rank_<k>_batches.pt`.
    """
    target = folder / "nonfinite" / f"step_{step}"
    target.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank()
    affected: dict[str, dict[str, int]] = {}
    for index, chunk in enumerate(models):
        for name, parameter in chunk.named_parameters():
            grad = getattr(parameter, "main_grad", None)
            counts = {"parameter": _num_nonfinite(parameter), "gradient": 0 if grad is None else _num_nonfinite(grad)}
            if any(counts.values()):
                affected[f"{index}.{name}"] = counts
    facts = {"step": step, "values": {what: str(value)}, "nonfinite_elements": affected}
    files.write_text(target / f"rank_{rank}.json", json.dumps(facts, indent=2) + "\n")
    torch.save([vars(batch) for batch in batches], target / f"rank_{rank}_batches.pt")
    return target


def _num_nonfinite(tensor: Tensor) -> int:
    return int((~torch.isfinite(tensor.detach())).sum())


class Saver:
    """Saves one checkpoint at a time. All methods but `wait_staged` and `written` are collective.

    Attributes:
        stall_s: seconds that training has waited for checkpoints.
        latest: the step of the newest checkpoint that has been begun.
        best: the lowest validation loss among the run's checkpoints, and its step (`train.keep_best`).
    """

    def __init__(self, directory: Path, train: TrainConfig, step: int) -> None:
        self.stall_s, self.latest = 0.0, step
        self.best = checkpoint_folder.best(directory) if train.keep_best else None
        if self.best is not None and self.best[1] > step:  # of steps that the run trains again
            self.best = None
        self._minutes, self._keep_best = train.save_minutes, train.keep_best
        self._directory = directory
        self._copies = checkpoint.HostCopies() if train.async_save else None
        self._retention = checkpoint.Retention(train.keep_checkpoints, train.keep_every)
        self._saving: checkpoint.PendingSave | None = None
        self._began = time.perf_counter()
        self._validation_loss: float | None = None

    @property
    def due(self) -> bool:
        """Whether `train.save_minutes` have passed since the last checkpoint was begun. The clocks of ranks differ."""
        return self._minutes is not None and time.perf_counter() - self._began >= 60 * self._minutes

    def begin(
        self, step: int, state: checkpoint.TrainingState, extra: Mapping[str, Any], validation_loss: float | None = None
    ) -> None:
        """Begin to save this step, with its validation loss if it has one. The previous checkpoint must be finished."""
        assert self._saving is None, "finish the previous checkpoint"
        # The best so far stays until the next save, so that a crash never leaves `best.json` without its checkpoint.
        kept = frozenset([self.best[1]] if self.best else [])
        with self._stalling():
            self._began, self.latest, self._validation_loss = time.perf_counter(), step, validation_loss
            retention = replace(self._retention, kept=kept)
            self._saving = checkpoint.begin(self._directory, step, state, extra, retention, copies=self._copies)

    def wait_staged(self) -> None:
        """Wait until everything to be saved is copied; only then may training change it."""
        if self._saving is not None:
            with self._stalling():
                self._saving.wait_staged()

    @property
    def written(self) -> bool:
        """Whether this rank has written everything."""
        return self._saving is None or self._saving.written

    def finish(self) -> int | None:
        """Wait until the checkpoint is written and make it the latest. Return its step, or None without one."""
        if self._saving is None:
            return None
        saving, self._saving = self._saving, None
        before = self.stall_s
        with self._stalling():
            path = saving.finish()
        seconds = time.perf_counter() - self._began
        logger.info("saved %s in %.1f s, the last %.1f s waited for", path, seconds, self.stall_s - before)
        self._note_best()
        return self.latest

    def _note_best(self) -> None:
        loss, lowest = self._validation_loss, self.best[0] if self.best else math.inf
        if not self._keep_best or loss is None or not loss < lowest:  # NaN is not
            return
        self.best = loss, self.latest
        if dist.get_rank() == 0:
            content = {"iteration": self.latest, "validation_loss": loss}
            files.write_text(self._directory / checkpoint_folder.BEST, json.dumps(content) + "\n")
        logger.info("step %d has the lowest validation loss of all checkpoints: %.5f", self.latest, loss)

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stall_s += time.perf_counter() - begin
