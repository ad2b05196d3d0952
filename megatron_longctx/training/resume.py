"""Whether a run may go on from its checkpoint with what it is asked to train on."""

from __future__ import annotations

from pathlib import Path

from ..config import Config
from ..errors import refuse
from ..mcore.checkpoint import Saved
from ..mcore.identity import Identity, refusal


def check(config: Config, run: Path, saved: Saved, now: Identity) -> str | None:
    """Refuse what would go on in the middle of another order of samples.

    Args:
        now: what the run would be trained with.

    Returns:
        what to tell the user of what was not compared, or differs as `train.check_data=false` allows.

    Raises:
        ValueError: another batch size, dataset, tokenizer, length, split or seed than the run's own.
    """
    batch, samples = config.train.global_batch_size, saved.extra["consumed_samples"]
    if samples != saved.iteration * batch:
        raise refuse(
            "train.global_batch_size",
            batch,
            f"{samples // saved.iteration}, with which {run} has been trained so far",
            "Set it back, or start a run of another run.name.",
        )
    if "data" not in saved.extra:
        return f"step {saved.iteration} of {run} does not say what it was trained on: that was not compared"
    error = refusal(saved.extra["data"], now, run)
    if error is None or not config.train.check_data:
        return None if error is None else f"train.check_data=false lets the run go on from sample {samples}: {error}"
    raise error
