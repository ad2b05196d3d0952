"""`megatron-longctx export`: a run's checkpoint as a folder that Hugging Face's libraries read."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..compose import RESOLVED, load_config
from ..config import Config
from ..errors import refuse
from ..mcore import checkpoint_weights
from ..mcore.checkpoint_folder import iteration_directory
from ..mcore.model import padded_vocab_size
from ..mcore.tokenizer import build_tokenizer
from ..models import Dims, Weight, family_of_model
from ..models.family import every
from ..models.huggingface import ShardWriter
from ..models.source import BESIDE, TOKENIZER_FILES, Stored, matching, read_json
from ..serving.inference_job import checkpoint_of, split_words
from ..training import saved_run
from .importing import new_folder

logger = logging.getLogger(__name__)

_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def export_model(words: Sequence[str]) -> None:
    """Run the verb.

    Args:
        words: `checkpoint=RUN`, `out=FOLDER`, `iteration=N`.

    Raises:
        ValueError: words or a checkpoint that cannot be used, or a model of no published family; nothing is left of
            the folder then.
        OSError: it cannot be written.
    """
    begin = time.perf_counter()
    own, others = split_words(words, ("checkpoint", "out", "iteration"))
    if others:
        raise refuse("word", others[0], "checkpoint=RUN, out=FOLDER or iteration=N", "A run is exported as it is.")
    run, iteration = checkpoint_of(own)
    config = load_config(run / RESOLVED)
    saved = saved_run.check("checkpoint", run, config, iteration)
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    model = replace(config.model, vocab_size=padded_vocab_size(config.model, tokenizer.vocab_size))
    family = family_of_model(model)
    before = _config_before(config, tokenizer.vocab_size, model.vocab_size or 0)
    dims = Dims(model, before.get("vocab_size") or model.vocab_size or 0)
    weights = family.weights(model)
    reader = checkpoint_weights.Reader(iteration_directory(run / "checkpoints", saved.iteration))
    places = [weight.place(layer, dims)[0] for weight, layer in every(weights, model)]
    for key in reader.unread(places):
        raise refuse("checkpoint", key, f"the weights of the family {family.name}", "It has no place for this one.")
    with new_folder("out", own.get("out")) as (folder, final):
        _write_weights(folder, reader, weights, dims)
        dtype = _DTYPES[reader.dtype(places[0])]
        written = family.config_of(model, dims.vocab, config.data.seq_length)
        harmless = {key: value for key, value in before.items() if key.endswith("_token_id")}
        described = json.dumps(written | harmless | {"torch_dtype": dtype}, indent=2)
        (folder / "config.json").write_text(described + "\n", encoding="utf-8")
        _copy_tokenizer(config, folder)
    took = time.perf_counter() - begin
    logger.info(
        "exported step %d of %s (%s, %s) into %s in %.1f s", saved.iteration, run, family.name, dtype, final, took
    )


def _config_before(config: Config, tokens: int, rows: int) -> Mapping[str, Any]:
    """The `config.json` that came with the tokenizer, if it was a model's of as many tokens."""
    path = Path(config.data.tokenizer_path or "", "config.json")
    found = read_json(path) if path.is_file() else {}
    vocab = found.get("vocab_size")
    return found if isinstance(vocab, int) and tokens <= vocab <= rows else {}


def _write_weights(folder: Path, reader: checkpoint_weights.Reader, weights: Sequence[Weight], dims: Dims) -> None:
    def value(weight: Weight, layer: int) -> dict[str, Tensor]:
        whole = reader.read(*weight.place(layer, dims), weight.our_shape(dims))
        return dict(zip(weight.names(layer), weight.form.split(whole, dims), strict=True))

    all_of_them = every(weights, dims.model)
    groups = []
    for weight, layer in all_of_them:
        dtype = reader.dtype(weight.place(layer, dims)[0])
        names = zip(weight.names(layer), weight.their_shapes(dims), strict=True)
        groups.append({name: Stored(shape, dtype) for name, shape in names})
    ShardWriter(folder, groups).write(partial(value, *each) for each in all_of_them)


def _copy_tokenizer(config: Config, folder: Path) -> None:
    path = Path(config.data.tokenizer_path or "")
    found = [path] if path.is_file() else matching(path, TOKENIZER_FILES) if config.data.tokenizer_path else []
    if not found:
        logger.warning("data.tokenizer=%s has no files: the folder is without a tokenizer", config.data.tokenizer)
    for file in [*found, *(matching(path, BESIDE[1:]) if path.is_dir() and found else [])]:
        shutil.copyfile(file, folder / file.name)
