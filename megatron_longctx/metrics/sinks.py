"""Where a step's numbers go: console, JSONL; W&B is `wandb_run`'s, TensorBoard `training.monitoring`'s.

A sink takes one dict a step, keyed by the metric keys of `names`; `train/step` must be in it, None means "not known
here". Only one rank of a run opens sinks.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from .. import files, names

Value = float | int | str | None
# Beside the nulls that JSON needs for them: which keys were not finite, and how.
NONFINITE = "nonfinite"


class Sink(Protocol):
    """Anything that takes a step's record."""

    def write(self, record: Mapping[str, Value]) -> None:
        """Take one step's record."""

    def close(self) -> None:
        """Finish; nothing is written afterwards."""


def encode(record: Mapping[str, Value]) -> str:
    """One line of valid JSON without its newline.

    JSON knows no NaN or infinity: such a value becomes null, and an object under `nonfinite` says what it was, e.g.
    `{"train/loss": null, "nonfinite": {"train/loss": "nan"}}` (`nan`, `inf` or `-inf`).
    """
    flags = {key: str(v) for key, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    line: dict[str, Any] = {key: None if key in flags else value for key, value in record.items()}
    if flags:
        line[NONFINITE] = flags
    return json.dumps(line, allow_nan=False)


def decode(line: str) -> dict[str, Value]:
    """The record that `encode` wrote, non-finite values restored.

    Raises:
        ValueError: `line` is not a JSON object.
    """
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"metrics line {line[:60]!r}: expected a JSON object. Remove the line.")
    flags = record.pop(NONFINITE, {})
    return {key: float(flags[key]) if key in flags else value for key, value in record.items()}


class JsonlSink:
    """Appends one JSON object a line to `path`, flushed each step, so that a killed run keeps what it reported.

    Opening drops the records after `resumed_step` (all of them for a run that starts at 0, the default): the run is
    about to train those steps again, and curves must not double. A line torn by a crash is dropped as well, with a
    warning. The file is replaced in one move, so that a crash during the clean-up loses nothing.
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
        """Append one record.

        Raises:
            KeyError: `train/step` is missing.
        """
        record[names.STEP]  # without it the line could be neither plotted nor dropped on resume
        self._file.write(encode(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ConsoleSink:
    """One line a step: step/total, loss, that of validation where it was taken, gradient norm, lr, tokens/s, TFLOP/s,
    MFU both ways, memory, time left.

    Args:
        total_steps: of the run, for `step 3/20` and the time left.
        emit: takes the line; a logger's `info`, say.
    """

    def __init__(self, total_steps: int, emit: Callable[[str], None]) -> None:
        self.total_steps = total_steps
        self._emit = emit
        self._eta = Eta()

    def write(self, record: Mapping[str, Value]) -> None:
        """Emit one record's line; a dash stands for what is not known."""
        self._emit(self.line(record))

    def line(self, record: Mapping[str, Value]) -> str:
        """The line for one record; also notes its step time for the time left."""
        step = int(record[names.STEP] or 0)
        seconds = record.get(names.STEP_S)
        if isinstance(seconds, (int, float)) and math.isfinite(seconds):
            self._eta.add(seconds)

        def number(key: str, spec: str) -> str:
            value = record.get(key)
            return "—" if value is None else format(value, spec)

        validation = record.get(names.VALIDATION_LOSS)
        causal, dense = number(names.MFU_CAUSAL_PCT, ".1f"), number(names.MFU_DENSE_PCT, ".1f")
        known = record.get(names.MFU_CAUSAL_PCT) is not None
        return " | ".join(
            (
                f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}",
                f"loss {number(names.LOSS, '.5f')}",
                *([] if validation is None else [f"validation {validation:.5f}"]),
                f"grad norm {number(names.GRAD_NORM, '.3f')}",
                f"lr {number(names.LEARNING_RATE, '.2e')}",
                f"{number(names.TOKENS_PER_S, ',.0f')} tokens/s",
                f"{number(names.TFLOPS_PER_GPU, '.3g')} TFLOP/s/GPU",
                f"MFU {causal}% causal {dense}% dense" if known else "MFU —",
                f"mem {number(names.PEAK_ACTIVE_GIB, '.2f')} GiB",
                f"ETA {clock_text(self._eta.seconds(max(self.total_steps - step, 0)))}",
            )
        )

    def close(self) -> None:
        """Nothing to finish; what `emit` writes to belongs to the caller."""


class Eta:
    """Seconds left, from the moving median of step times: a slow first step or checkpoint does not distort it."""

    def __init__(self, window: int = 20) -> None:
        self._recent: deque[float] = deque(maxlen=window)

    def add(self, step_s: float) -> None:
        """Note one step's seconds."""
        self._recent.append(step_s)

    def seconds(self, steps_left: int) -> float | None:
        """Seconds that `steps_left` steps will take; None before the first step."""
        return median(self._recent) * steps_left if self._recent else None


def clock_text(seconds: float | None) -> str:
    """`h:mm:ss`, or `d days h:mm:ss` from a day on; a dash for None."""
    if seconds is None:
        return "—"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    prefix = f"{days} day{'s' * (days > 1)} " if days else ""
    return f"{prefix}{hour}:{minute:02}:{second:02}"
