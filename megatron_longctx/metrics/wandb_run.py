"""A run in W&B, while it trains and rebuilt from its folder."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from .. import files, names
from ..config import Config
from . import environment
from .facts import facts, labels
from .flops import FORMULA
from .hardware import peak_tflops
from .sinks import Value


def start(folder: Path, config: Config, mode: Any) -> Any:
    """The W&B run of `folder`, which has its `environment.json`; mode: `online` or `offline`.

    Its id is kept in `<folder>/wandb_id.txt`, so that a resumed run goes on in W&B, too.
    """
    import wandb  # here, so that a disabled or broken W&B costs nothing

    around = environment.read(folder)
    told = {
        "facts": facts(config.as_dict(), around),
        "environment": around,
        "flop_formula": FORMULA,
        "peak_tflops_per_gpu": peak_tflops(around.get("device"), config.logging.peak_tflops),
    }
    folder.mkdir(parents=True, exist_ok=True)
    return wandb.init(
        project=config.logging.wandb_project,
        name=config.run.name,
        id=_stable_id(folder),
        **labels(config, around),
        resume="allow" if mode == "online" else None,  # offline knows no server to resume from; the id is enough
        dir=str(folder),
        mode=mode,
        config=config.as_dict() | told,
        settings=wandb.Settings(silent=True, console="off"),
    )


def _stable_id(folder: Path) -> str:
    path = folder / "wandb_id.txt"
    if not path.exists():
        files.write_text(path, uuid4().hex[:12] + "\n")
    return path.read_text(encoding="utf-8").strip()


def log(run: Any, record: Mapping[str, Value]) -> None:
    """Log one record at its `train/step`; None values are left out."""
    run.log({key: value for key, value in record.items() if value is not None}, step=record[names.STEP])


def rebuild(folder: Path, config: Config, records: Iterable[Mapping[str, Value]]) -> str:
    """The W&B run of `folder` once more, of the records of its `metrics.jsonl`: online or offline, as W&B's own
    settings say. Steps that W&B has already are left as they are there.

    Returns:
        its address, or where its files are.

    Raises:
        ValueError: W&B's settings say that it is disabled.
    """
    import wandb

    mode: str = wandb.setup().settings.mode
    if mode not in ("online", "offline"):
        raise ValueError(f"WANDB_MODE={mode}: expected online or offline. Set it to one of these, or unset it.")
    run = start(folder, config, mode)
    try:
        for record in records:
            log(run, record)
        return run.url or str(Path(run.dir).parent)
    finally:
        run.finish()


class WandbSink:
    """W&B in the run's folder: offline, online or disabled, as `logging.wandb` says.

    Steps that a resumed run trains again are ignored by W&B online (its history only grows); the JSONL has the last
    values. W&B is a convenience beside the JSONL: if it fails, one warning says why and training goes on without it.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        self._run: Any = None
        if config.logging.wandb == "disabled":
            return
        try:
            self._run = start(folder, config, config.logging.wandb)
        except Exception as error:  # whatever W&B raises (network, login, disk), it must not end a training run
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"W&B is off for the rest of this run ({reason}); metrics.jsonl has everything", stacklevel=3)

    def write(self, record: Mapping[str, Value]) -> None:
        """See `log`."""
        if self._run is None:
            return
        try:
            log(self._run, record)
        except Exception as error:  # see the class: W&B must not end a training run
            self._give_up(error)

    def close(self) -> None:
        """Finish the W&B run."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:  # see the class
            self._give_up(error)
        self._run = None
