"""Whether weights of a run, this one or another, are those of a configured model."""

from __future__ import annotations

from pathlib import Path

from ..config import Config
from ..errors import refuse
from ..mcore import checkpoint
from ..mcore.checkpoint import Saved
from ..mcore.identity import refusal, tokenizer_identity
from ..mcore.model import fingerprint, padded_vocab_size
from ..mcore.tokenizer import build_tokenizer


def check(key: str, run: Path, config: Config, iteration: int | None = None, free: tuple[str, ...] = ()) -> Saved:
    """What a checkpoint of `run` says, if its weights are those of the configured model and tokenizer.

    Args:
        key: by which the run was given.
        iteration: which checkpoint; None for the latest.
        free: how keys of the fingerprint begin that may differ.

    Raises:
        ValueError: it has none, or one that is damaged or of another model or tokenizer.
    """
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    vocab_size = padded_vocab_size(config.model, tokenizer.vocab_size)
    saved = checkpoint.check(run / "checkpoints", fingerprint(config, vocab_size), iteration, free)
    if saved is None:
        raise refuse(key, run, "a run with a checkpoint", "Train it with train.save=true first.")
    error = refusal(saved.extra.get("data", {}), {"data.tokenizer": tokenizer_identity(config, tokenizer)}, run)
    if error is not None and config.train.check_data:
        raise error
    if (rows := saved.fingerprint["vocab_size"]) < tokenizer.vocab_size:
        tokens = f"each of the tokenizer's {tokenizer.vocab_size} tokens"
        expected = f"a run with a row of the vocabulary for {tokens}; it has {rows}"
        raise refuse(key, run, expected, "Take its own tokenizer.")
    return saved
