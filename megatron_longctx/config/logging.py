"""Where a run's figures go."""

from __future__ import annotations

from dataclasses import dataclass

from .bounds import choice, number, text

_TAG = r"[^,\s][^,]{0,63}"


@dataclass(frozen=True)
class LoggingConfig:
    wandb: str = choice("offline", ("offline", "online", "disabled"))
    wandb_project: str = text("megatron-longctx", "a project of W&B, 1 to 128 letters", r"[^/\\#?%:]{1,128}")
    wandb_group: str | None = text(None)  # null: the sweep's name, else the experiment's, else the model and length
    wandb_job_type: str | None = text(None, most=64)  # null: the mode, by which tables and panels group runs
    # null: model, mode, layout, cp/tp/pp/dp, hardware and precision.
    wandb_tags: str | None = text(None, "tags of 1 to 64 letters, commas between", rf"{_TAG}(,{_TAG})*", 2000)
    tensorboard: bool = False  # write events to runs/<name>/tensorboard; requires the package tensorboard
    peak_tflops: float | None = number(None, 1e-3, 1e9)  # Peak per GPU, dense, for MFU; null: looked up by device name.
    # the step that rank 0 profiles into runs/<name>/profile; null: none
    profile_step: int | None = number(None, 1, 10**9)
