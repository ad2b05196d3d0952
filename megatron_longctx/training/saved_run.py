"""Whether weights of a run, this one or another, are those of a configured model, and whether a run may go on with what
it is asked to train on."""

from __future__ import annotations

from pathlib import Path

from ..config import Config
from ..errors import refuse
from ..mcore import checkpoint
from ..mcore.checkpoint import Saved
from ..mcore.corpus import Identity, identity_error, tokenizer_identity
from ..mcore.model import fingerprint, padded_vocab_size
from ..mcore.tokenizer import build_tokenizer


def check(key: str, run: Path, config: Config, iteration: int | None = None, ignore: tuple[str, ...] = ()) -> Saved:
    """What a checkpoint of `run` says, if its weights are those of the configured model and tokenizer.

    Args:
        key: by which the run was given.
        iteration: which checkpoint; None for the latest.
        ignore: prefixes of the fingerprint's keys that may differ.

    Raises:
        ValueError: it has none, or one that is damaged or of another model or tokenizer.
    """
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    vocab_size = padded_vocab_size(config.model, tokenizer.vocab_size)
    saved = checkpoint.check(run / "checkpoints", fingerprint(config, vocab_size), iteration, ignore)
    if saved is None:
        raise refuse(key, run, "a run with a checkpoint", "Train it with train.save=true first.")
    error = identity_error(saved.extra.get("data", {}), {"data.tokenizer": tokenizer_identity(config, tokenizer)}, run)
    if error is not None and config.train.check_data:
        raise error
    if (rows := saved.fingerprint["vocab_size"]) < tokenizer.vocab_size:
        tokens = f"each of the tokenizer's {tokenizer.vocab_size} tokens"
        expected = f"a run with a row of the vocabulary for {tokens}; it has {rows}"
        raise refuse(key, run, expected, "Take its own tokenizer.")
    return saved


def check_resumed(config: Config, run: Path, saved: Saved, now: Identity) -> str | None:
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
    error = identity_error(saved.extra["data"], now, run)
    if error is None or not config.train.check_data:
        return None if error is None else f"train.check_data=false lets the run go on from sample {samples}: {error}"
    raise error
