"""The metrics by which runs are compared, and where those of a step are written: the console, JSONL and W&B.

A sink takes one dict per step, keyed by the metric keys of `names`. `train/step` is required, and None means that a
value is not known. Only one rank opens sinks. TensorBoard's is in `monitoring`.
"""

import json
import math
import os
import shlex
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

from ..config import Config, environment, files, names
from ..planner.flops import FORMULA, peak_tflops

Records = Mapping[int, Mapping[str, Any]]  # keyed by step
MIN_STEPS = 10  # fewer measured steps do not tell runs apart
_MAX_WARM_UP = 5


class Summary(NamedTuple):
    """A median with its quartiles, or a largest value, for which all are equal; `steps` counts the records."""

    value: float
    low: float
    high: float
    steps: int


@dataclass(frozen=True)
class Metric:
    """A metric of a run's records. `better` is `high` or `low`; `most`: the largest value counts, not the median."""

    title: str
    unit: str
    key: str
    spec: str
    better: str
    scale: float = 1.0
    most: bool = False

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def summary_key(self) -> str:
        """The key of the summary in W&B, e.g. `median/tokens_per_s`."""
        return ("most/" if self.most else "median/") + self.key.partition("/")[2]

    def of(self, records: Records) -> Summary | None:
        """Return the summary of records; None if none has the metric. Medians leave out the first steps."""
        steps = sorted(records)
        counted = steps if self.most else steps[warm_up(len(steps)) :]
        recorded = (records[step].get(self.key) for step in counted)
        values = [v * self.scale for v in recorded if isinstance(v, (int, float)) and math.isfinite(v)]
        if not values:
            return None
        if self.most or len(values) == 1:
            return Summary(*(max(values),) * 3, len(values))
        low, value, high = quantiles(values, n=4, method="inclusive")
        return Summary(value, low, high, len(values))

    def text(self, records: Records) -> str:
        """Return the value, and half the distance of the quartiles in percent of it."""
        summary = self.of(records)
        if summary is None:
            return "—"
        spread = 50 * (summary.high - summary.low) / abs(summary.value) if summary.value else 0.0
        return format(summary.value, self.spec) + (f" ±{spread:.0f}%" if spread else "")


def warm_up(steps: int) -> int:
    """Return how many of the first steps connect ranks and compile kernels: at most 5, and at most a third."""
    return min(_MAX_WARM_UP, steps // 3)


def summaries(records: Records) -> dict[str, float]:
    """Return the values of all metrics of the records by their keys in W&B, in the units of the records."""
    found = {metric: metric.of(records) for metric in METRICS}
    return {metric.summary_key: each.value / metric.scale for metric, each in found.items() if each is not None}


METRICS = (
    Metric("tokens per second", "", names.TOKENS_PER_S, ",.0f", "high"),
    Metric("tokens per second per GPU", "", names.TOKENS_PER_S_PER_GPU, ",.0f", "high"),
    Metric("TFLOP/s per GPU", "", names.TFLOPS_PER_GPU, ".3g", "high"),
    Metric("MFU, causal", "% of the peak", names.MFU_CAUSAL_PCT, ".1f", "high"),
    Metric("MFU, dense", "% of the peak", names.MFU_DENSE_PCT, ".1f", "high"),
    Metric("MFU, causal, of FP8's peak", "% of the peak", names.MFU_FP8_PCT, ".1f", "high"),
    Metric("waiting for messages", "ms per step", names.EXPOSED_COMM_S, ",.1f", "low", scale=1e3),
    Metric("waiting for data", "ms per step", names.DATA_WAIT_S, ",.1f", "low", scale=1e3),
    Metric("imbalance, predicted", "% over the mean", names.IMBALANCE_PCT, ".1f", "low"),
    Metric("imbalance, measured", "% over the mean", names.MEASURED_IMBALANCE_PCT, ".1f", "low"),
    Metric("peak memory", "GiB per GPU", names.PEAK_ACTIVE_GIB, ".2f", "low", most=True),
)


Value = float | int | str | None
# The key of an object that says which values, written as null, were not finite.
NONFINITE = "nonfinite"
# Arguments of `wandb.init` that W&B reads from variables, without their WANDB_; a variable wins over a key.
_VARIABLES = {key: key.upper() for key in ("entity", "project", "name", "notes", "job_type", "tags", "dir")}
_VARIABLES |= {"id": "RUN_ID", "group": "RUN_GROUP"}
_ETA_STEPS = 20


class Sink(Protocol):
    """A destination of metrics."""

    def write(self, record: Mapping[str, Value]) -> None:
        """Write the record of one step."""

    def close(self) -> None:
        """Finish; nothing is written afterwards."""


def encode(record: Mapping[str, Value]) -> str:
    """Return a record as one line of valid JSON, without newline.

    JSON has no NaN and no infinity. Such a value becomes null, and an object under `nonfinite` names it, e.g.
    `{"train/loss": null, "nonfinite": {"train/loss": "nan"}}` (`nan`, `inf` or `-inf`).
    """
    flags = {key: str(v) for key, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    line: dict[str, Any] = {key: None if key in flags else value for key, value in record.items()}
    if flags:
        line[NONFINITE] = flags
    return json.dumps(line, allow_nan=False)


def decode(line: str) -> dict[str, Value]:
    """Return the record that `encode` wrote, with its non-finite values. Refuse what is no JSON object."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"metrics line {line[:60]!r}: expected a JSON object. Remove the line.")
    flags = record.pop(NONFINITE, {})
    return {key: float(flags[key]) if key in flags else value for key, value in record.items()}


class JsonlSink:
    """Appends one JSON object per step to `path`, and flushes it, so that a killed run keeps what it reported.

    Opening drops the records after `resumed_step` (all of them if a run starts from scratch, the default): the run
    trains those steps again, and curves must not have them twice. It also drops a line that a crash left incomplete,
    with a warning. The file is replaced in one move, so a crash in between loses nothing.
    """

    def __init__(self, path: Path | str, resumed_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._drop_after(resumed_step)
        self._file = self.path.open("a", encoding="utf-8")

    def _drop_after(self, resumed_step: int) -> None:
        kept: list[str] = []
        for number, line in enumerate(self.path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            try:
                step = decode(line).get(names.STEP)
            except ValueError as error:
                warnings.warn(f"{self.path}:{number}: line dropped, it is not valid JSON ({error})", stacklevel=3)
                continue
            if not isinstance(step, int) or step <= resumed_step:
                kept.append(line + "\n")
        files.write_text(self.path, "".join(kept))

    def write(self, record: Mapping[str, Value]) -> None:
        """Append one record, which must have `train/step`."""
        record[names.STEP]  # a line without it could be neither plotted nor dropped on resume
        self._file.write(encode(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class ConsoleSink:
    """Emits one line per step with loss, speed, memory and the remaining time; a dash means not known.

    The remaining time uses the median of the last step times, so a slow first step or a checkpoint does not distort it.
    `total_steps` are those of the whole run. `emit` receives the line, e.g. the `info` method of a logger.
    """

    def __init__(self, total_steps: int, emit: Callable[[str], None]) -> None:
        self.total_steps = total_steps
        self._emit = emit
        self._recent: deque[float] = deque(maxlen=_ETA_STEPS)

    def write(self, record: Mapping[str, Value]) -> None:
        self._emit(self.line(record))

    def line(self, record: Mapping[str, Value]) -> str:
        """Return the line of one record, whose step time counts for the remaining time from now on."""
        step = int(record[names.STEP] or 0)
        seconds = record.get(names.STEP_S)
        if isinstance(seconds, (int, float)) and math.isfinite(seconds):
            self._recent.append(seconds)
        remaining = median(self._recent) * max(self.total_steps - step, 0) if self._recent else None

        def number(key: str, spec: str) -> str:
            value = record.get(key)
            return "—" if value is None else format(value, spec)

        validation = record.get(names.VALIDATION_LOSS)
        causal, dense = number(names.MFU_CAUSAL_PCT, ".1f"), number(names.MFU_DENSE_PCT, ".1f")
        known, fp8 = record.get(names.MFU_CAUSAL_PCT) is not None, record.get(names.MFU_FP8_PCT)
        of_fp8 = "" if fp8 is None else f", {fp8:.1f}% of FP8's peak"
        return " | ".join(
            (
                f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}",
                f"loss {number(names.LOSS, '.5f')}",
                *([] if validation is None else [f"validation {validation:.5f}"]),
                f"grad norm {number(names.GRAD_NORM, '.3f')}",
                f"lr {number(names.LEARNING_RATE, '.2e')}",
                f"{number(names.TOKENS_PER_S, ',.0f')} tokens/s",
                f"{number(names.TFLOPS_PER_GPU, '.3g')} TFLOP/s/GPU",
                f"MFU {causal}% causal {dense}% dense{of_fp8}" if known else "MFU —",
                *([f"DP imbalance {number(names.IMBALANCE_DP, '.1%')}"] if record.get(names.IMBALANCE_DP) else []),
                f"mem {number(names.PEAK_ACTIVE_GIB, '.2f')} GiB",
                f"ETA {clock_text(remaining)}",
            )
        )

    def close(self) -> None:
        """Do nothing; the caller owns what `emit` writes to."""


def clock_text(seconds: float | None) -> str:
    """Return `h:mm:ss`, with days in front from 24 hours on; a dash for None."""
    return "—" if seconds is None else str(timedelta(seconds=round(seconds))).replace(",", "")


class WandbSink:
    """Writes to W&B in the run's folder: offline, online or not at all (`wandb_mode`).

    One line says where: the URL, or the folder and the command that sends it; `emit` receives it. At the end, the run's
    summary has the medians of `summaries`. W&B online ignores steps that a resumed run trains again, as its history
    only grows; the JSONL has their last values. W&B never ends a training run: where its server cannot be reached, it
    writes offline; if it fails, one warning gives the reason and training goes on without it.
    """

    def __init__(self, folder: Path, config: Config, emit: Callable[[str], None] = lambda line: None) -> None:
        self._folder, self._checkpoints = folder, config.logging.wandb_checkpoints
        self._run: Any = self._attempt(self._start, config, emit)

    def _start(self, config: Config, emit: Callable[[str], None]) -> Any:
        if (mode := wandb_mode(config.logging.wandb)) == "disabled":
            return None
        try:
            run = start_wandb(self._folder, config, mode)
        except Exception as error:
            if mode == "offline":
                raise
            reason = str(error).partition("\n")[0]
            warnings.warn(f"W&B cannot be reached and writes offline ({type(error).__name__}: {reason})", stacklevel=4)
            import wandb

            wandb.teardown()  # its service takes the run's id for used
            run = start_wandb(self._folder, config, "offline")
        emit(f"W&B: {wandb_place(run)}")
        return run

    def write(self, record: Mapping[str, Value]) -> None:
        """Log one record at its step."""
        if self._run is not None:
            self._attempt(_log, self._run, record)

    def checkpoint(self, path: Path, step: int) -> None:
        """Record where a finished checkpoint is, if `logging.wandb_checkpoints` asks for it."""
        if self._run is not None and self._checkpoints:
            self._attempt(_log_checkpoint, self._run, path, step)

    def close(self) -> None:
        """Write the summary and finish the W&B run."""
        if self._run is not None:
            self._attempt(_finish, self._run, self._folder)
        self._run = None

    def _attempt(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:  # network, login, disk: W&B raises anything
            self._run = None
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"W&B is off for the rest of this run ({reason}); metrics.jsonl has everything", stacklevel=3)
            return None


def wandb_mode(asked: str) -> Any:
    """Return `online`, `offline` or `disabled`: WANDB_MODE, else `asked` (`logging.wandb`).

    `auto` is what `wandb offline` and `wandb online` have set; online only with a login, as nobody can be asked.
    """
    asked = os.environ.get("WANDB_MODE") or asked
    if asked != "auto":
        return "offline" if asked == "dryrun" else asked
    import wandb  # here, so that a disabled or broken W&B costs nothing
    from requests.utils import get_netrc_auth

    settings = wandb.setup().settings
    if settings.mode != "online":
        return settings.mode
    login = settings.api_key or settings.identity_token_file or get_netrc_auth(settings.base_url)
    return "online" if login else "offline"


def start_wandb(folder: Path, config: Config, mode: Any) -> Any:
    """Start or resume the W&B run of `folder`, which contains its `environment.json`; `mode` is `online` or `offline`.

    The run's id is in `<folder>/wandb_id.txt`, so a resumed run continues in W&B as well.
    """
    import wandb

    ran_on, logging = environment.read(folder), config.logging
    derived = {
        "facts": environment.facts(config.as_dict(), ran_on),
        "environment": ran_on,
        "flop_formula": FORMULA,
        "peak_tflops_per_gpu": peak_tflops(ran_on.get("device"), logging.peak_tflops),
    }
    folder.mkdir(parents=True, exist_ok=True)
    id_file = folder / "wandb_id.txt"
    if not id_file.exists():
        files.write_text(id_file, uuid4().hex[:12] + "\n")
    arguments = {
        "entity": logging.wandb_entity,
        "project": logging.wandb_project,
        "name": config.run.name,
        "notes": logging.wandb_notes,
        "id": id_file.read_text(encoding="utf-8").strip(),
        "dir": str(folder),
        **environment.labels(config, ran_on),
    }
    return wandb.init(
        **{key: value for key, value in arguments.items() if not os.environ.get(f"WANDB_{_VARIABLES[key]}")},
        resume="allow" if mode == "online" else None,  # offline there is no server to resume from; the id suffices
        mode=mode,
        config=config.as_dict() | derived,
        settings=wandb.Settings(silent=True, console="off"),
    )


def wandb_place(run: Any) -> str:
    """Return the URL of a W&B run, or its folder and the command that sends it."""
    if not run.offline:
        return str(run.url)
    folder = Path(run.dir).parent
    return f"offline in {folder}; to send it: wandb sync {shlex.quote(str(folder))}"


def _log(run: Any, record: Mapping[str, Value]) -> None:
    run.log({key: value for key, value in record.items() if value is not None}, step=record[names.STEP])


def _log_checkpoint(run: Any, path: Path, step: int) -> None:
    import wandb

    artifact = wandb.Artifact(f"checkpoint-{run.id}", "checkpoint", metadata={"step": step, "path": str(path)})
    artifact.add_reference(path.resolve().as_uri(), checksum=False)
    run.log_artifact(artifact, aliases=["latest", f"step-{step}"])


def _finish(run: Any, folder: Path) -> None:
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    run.summary.update(summaries(dict(enumerate(map(decode, lines)))))
    run.finish()


def rebuild_wandb(folder: Path, config: Config, records: Iterable[Mapping[str, Value]]) -> str:
    """Write the W&B run of `folder` again from the records of its `metrics.jsonl`, online or offline (`wandb_mode`).

    Steps that W&B already has do not change. Refuse to do so if W&B is disabled. Return its place (`wandb_place`).
    """
    mode = wandb_mode("auto")
    if mode not in ("online", "offline"):
        raise ValueError(f"WANDB_MODE={mode}: expected online or offline. Set it to one of these, or unset it.")
    run = start_wandb(folder, config, mode)
    try:
        for record in records:
            _log(run, record)
        return wandb_place(run)
    finally:
        _finish(run, folder)
