"""The `import` and `export` verbs: a published model becomes a run, and a run's checkpoint a Hugging Face folder."""

import glob
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Config, ModelConfig
from ..config.progress import Progress
from ..core.errors import refuse
from ..mcore import checkpoint_weights
from ..mcore.checkpoint_folder import iteration_directory
from ..mcore.checkpoint_weights import Parameter
from ..mcore.data import tokenizer_identity
from ..mcore.inference import trained_length
from ..mcore.model import fingerprint, padded_vocab_size
from ..mcore.tokenizer import build_tokenizer
from ..models import Dims, Family, Weight, check_same_function, family_of_model, family_of_source, in_file_order
from ..models.fields import of_text
from ..models.huggingface import (
    CONFIG_FILES,
    TOKENIZER_FILES,
    HuggingFaceFolder,
    ShardWriter,
    TensorInfo,
    matching_files,
    read_json,
)
from ..serving.inference_job import checkpoint_of, split_arguments
from ..training import preflight
from ..training.compose import RESOLVED, check_source, load_config, override_config, save_config

logger = logging.getLogger(__name__)

_TOKENIZER, _CHECKPOINTS = "tokenizer", "checkpoints"  # folders of a run
# Buffers that older versions of `transformers` saved although they are computed from the configuration.
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def import_model(source: str, words: Sequence[str], check_only: bool = False) -> None:
    """Import the Hugging Face folder `source` by `out=RUN` and settings of the run. A failure leaves nothing of it.

    With `check_only`, only refuse what is refused before weights are read, and write nothing.
    """
    begin = time.perf_counter()
    own, settings = split_arguments(words, ("out",))
    for key, _, value in (word.partition("=") for word in settings if word.startswith(("run.name=", "run.root="))):
        raise refuse(key, value, "no value: out=RUN is the run's folder", "Leave it out.")
    check_source(source)
    published = HuggingFaceFolder(Path(source))
    family = family_of_source(published.config)
    model, seq_length = family.model_of(published.config)
    vocab = model.vocab_size
    assert vocab is not None
    base = _base(model)
    if check_only:
        config = override_config(base, settings)
        check_same_function(config.model, model, source)
        _checked_weights(published, family, Dims(config.model, vocab))
        _final_folder(own.get("out"))
        return
    dtypes = {each.dtype for name, each in published.tensors.items() if not name.startswith(family.dropped)}
    precision = "bf16" if dtypes == {torch.bfloat16} else "fp32"
    base = replace(base, data=replace(base.data, seq_length=seq_length), train=replace(base.train, precision=precision))
    with new_folder(own.get("out")) as (folder, final):
        published.write_tokenizer(folder / _TOKENIZER)
        if (folder / _TOKENIZER).is_dir():
            data = replace(base.data, tokenizer="huggingface", tokenizer_path=str(final / _TOKENIZER))
            base = replace(base, data=data)
        base = replace(base, run=replace(base.run, name=final.name, root=str(final.parent)))
        config = override_config(base, settings)
        check_same_function(config.model, model, source)
        rows = config.model.vocab_size
        if rows is None or rows < vocab:
            raise refuse("model.vocab_size", rows, f"at least the {vocab} tokens of {source}", "Leave it out.")
        dims = Dims(config.model, vocab)
        weights = _checked_weights(published, family, dims)
        extra = {"data": {"data.tokenizer": _checked_tokenizer(config, folder, final, vocab)}}
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        save_config(config, folder / RESOLVED)
        with Progress("importing", len(in_file_order(weights, config.model)), "weights") as progress:
            checkpoint_weights.write(
                folder / _CHECKPOINTS,
                _parameters(published, weights, dims, dtype, progress),
                config.model.num_layers,
                dtype,
                fingerprint(config, rows),
                extra,
            )
    if dtype == torch.bfloat16 and torch.float32 in dtypes:
        logger.info("fp32 weights were rounded to bf16, because of train.precision=bf16")
    elif dtype == torch.float32 and torch.bfloat16 in dtypes:
        logger.info("bf16 weights became fp32, as some others are: train.precision=bf16 rounds these instead")
    seconds = time.perf_counter() - begin
    logger.info("imported %s (%s, %s) into %s in %.1f s", source, family.name, config.train.precision, final, seconds)


def export_model(words: Sequence[str], check_only: bool = False) -> None:
    """Export by `checkpoint=RUN`, `out=FOLDER`, `iteration=N` and `shard_gb=X` (10^9 bytes of a file at most).

    A failure leaves nothing of the folder. With `check_only`, only refuse what is refused before weights are read.
    """
    begin = time.perf_counter()
    own, others = split_arguments(words, ("checkpoint", "out", "iteration", "shard_gb"))
    if others:
        expected = "checkpoint=RUN, out=FOLDER, iteration=N or shard_gb=X"
        raise refuse("word", others[0], expected, "A run is exported unchanged.")
    run, iteration = checkpoint_of(own)
    shard_bytes = _shard_bytes(own.get("shard_gb", "5"))
    config = load_config(run / RESOLVED)
    saved = preflight.check_saved_weights("checkpoint", run, config, iteration, tensor_files=not check_only)
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    model = replace(config.model, vocab_size=padded_vocab_size(config.model, tokenizer.vocab_size))
    family = family_of_model(model)
    original = _original_config(config, tokenizer.vocab_size, model.vocab_size or 0)
    dims = Dims(model, original.get("vocab_size") or model.vocab_size or 0)
    weights = family.weights(model)
    reader = checkpoint_weights.Reader(iteration_directory(run / _CHECKPOINTS, saved.iteration))
    places = [weight.place(layer, dims)[0] for weight, layer in in_file_order(weights, model)]
    for key in reader.unread(places):
        raise refuse("checkpoint", key, f"the weights of the family {family.name}", "It has no place for this one.")
    if check_only:
        _final_folder(own.get("out"))
        return
    with new_folder(own.get("out")) as (folder, final):
        _write_weights(folder, reader, weights, dims, shard_bytes)
        dtype = _DTYPES[reader.dtype(places[0])]
        token_ids = {key: value for key, value in original.items() if key.endswith("_token_id")}
        length = max(trained_length(config), _published_length(original, model))
        written = family.config_of(model, dims.vocab, length) | token_ids | {"torch_dtype": dtype}
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        _copy_tokenizer(config, folder, length)
    seconds, name = time.perf_counter() - begin, family.name
    logger.info("exported step %d of %s (%s, %s) into %s in %.1f s", saved.iteration, run, name, dtype, final, seconds)


def _base(model: ModelConfig) -> Config:
    """Return the defaults of a run of a model. Recurrent layers need a schedule that balances contiguous tokens."""
    base = replace(Config(), model=model)
    helper = replace(base.parallelism, schedule="helper")
    return replace(base, parallelism=helper) if model.recurrent else base


def _checked_weights(source: HuggingFaceFolder, family: Family, dims: Dims) -> list[Weight]:
    """Return a model's weights in the form of a folder. Refuse missing tensors, tensors that the architecture does not
    have, and tensors of another shape."""
    weights = [each.found_in(source.tensors) for each in family.weights(dims.model)]
    expected: dict[str, tuple[int, ...]] = {}
    for weight, layer in in_file_order(weights, dims.model):
        expected |= zip(weight.published_names(layer), weight.published_shapes(dims), strict=True)
    for name, shape in expected.items():
        if name not in source.tensors:
            raise refuse("tensors", name, "a tensor of the files; none has it", "Fetch all files of the model.")
        if (actual := source.tensors[name].shape) != shape:
            raise refuse("tensors", f"{name} {actual}", f"the shape {shape}, as config.json says", "Fetch both again.")
    others = source.tensors.keys() - expected.keys()
    for start in family.dropped:
        dropped = {name for name in others if name.startswith(start)}
        others -= dropped
        if dropped:
            logger.info("left out: %d tensors %s*, which logits of text do not need", len(dropped), start)
    for name in others:
        if not _COMPUTED.fullmatch(name) and not _is_tied_copy(source, name, dims):
            remedy = "Models with more than their architecture has are not served yet."
            raise refuse("tensors", name, "tensors that the architecture has", remedy)
    return weights


def _is_tied_copy(source: HuggingFaceFolder, name: str, dims: Dims) -> bool:
    """Whether a tensor is the output matrix of a model that shares it with the embedding, saved twice."""
    tied = dims.model.tie_embeddings and name == "lm_head.weight"
    return tied and torch.equal(source.read(name), source.read("model.embed_tokens.weight"))


def _parameters(
    source: HuggingFaceFolder, weights: Sequence[Weight], dims: Dims, dtype: torch.dtype, progress: Progress
) -> Iterator[Parameter]:
    def value(weight: Weight, layer: int) -> Tensor:
        progress.advance()
        parts = [source.read(name).to(dtype) for name in weight.published_names(layer)]
        return weight.joined(parts, dims)

    for weight, layer in in_file_order(weights, dims.model):
        yield Parameter(*weight.place(layer, dims), weight.full_shape(dims), partial(value, weight, layer))


def _shard_bytes(text: str) -> int:
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = 0.0
    if not 1e-6 <= gigabytes <= 1e6:
        raise refuse("shard_gb", text, "a number of 10^9 bytes from 1e-6 to 1e6", "Leave it out for 5.")
    return int(gigabytes * 1e9)


def _write_weights(
    folder: Path, reader: checkpoint_weights.Reader, weights: Sequence[Weight], dims: Dims, max_bytes: int
) -> None:
    def value(weight: Weight, layer: int) -> dict[str, Tensor]:
        whole = reader.read(*weight.place(layer, dims), weight.full_shape(dims))
        return dict(zip(weight.published_names(layer), weight.form(whole, dims), strict=True))

    in_layers = in_file_order(weights, dims.model)
    groups = []
    for weight, layer in in_layers:
        dtype = reader.dtype(weight.place(layer, dims)[0])
        names = zip(weight.published_names(layer), weight.published_shapes(dims), strict=True)
        groups.append({name: TensorInfo(shape, dtype) for name, shape in names})
    with Progress("exporting", len(groups), "weights") as progress:
        ShardWriter(folder, groups, max_bytes).write(partial(value, *each) for each in progress.each(in_layers))


def _checked_tokenizer(config: Config, folder: Path, final: Path, vocab: int) -> Mapping[str, object]:
    """Return the tokenizer's identity. An imported tokenizer is in `folder` until that is renamed `final`."""
    data = config.data
    imported = data.tokenizer_path == str(final / _TOKENIZER)
    if data.tokenizer == "byte-level" and not (folder / _TOKENIZER).is_dir():
        logger.warning("the source has no tokenizer: data.tokenizer=byte-level, which is hardly the model's")
    tokenizer = build_tokenizer(data.tokenizer, str(folder / _TOKENIZER) if imported else data.tokenizer_path)
    if tokenizer.vocab_size > vocab:
        expected = f"at most the {vocab} tokens that the embedding has; this has {tokenizer.vocab_size}"
        raise refuse("data.tokenizer_path", data.tokenizer_path, expected, "Take the tokenizer of this model.")
    padded_vocab_size(config.model, tokenizer.vocab_size)
    return tokenizer_identity(config, tokenizer)


def _copy_tokenizer(config: Config, folder: Path, length: int) -> None:
    """Copy the tokenizer's files. Its own longest text is raised to `length`, or users would be told to cut theirs."""
    path = Path(config.data.tokenizer_path or "")
    files = [path] if path.is_file() else matching_files(path, TOKENIZER_FILES) if config.data.tokenizer_path else []
    if not files:
        logger.warning("data.tokenizer=%s has no files: the folder is without a tokenizer", config.data.tokenizer)
    for file in [*files, *(matching_files(path, CONFIG_FILES[1:]) if path.is_dir() and files else [])]:
        shutil.copyfile(file, folder / file.name)
    copied = folder / "tokenizer_config.json"
    settings = read_json(copied) if copied.is_file() else {}
    if settings.get("model_max_length", length) < length:
        copied.write_text(json.dumps(settings | {"model_max_length": length}, indent=2) + "\n", encoding="utf-8")


def _original_config(config: Config, tokens: int, rows: int) -> Mapping[str, Any]:
    """Return the `config.json` beside the tokenizer if it describes a model with a vocabulary of this size."""
    path = Path(config.data.tokenizer_path or "", "config.json")
    original = of_text(read_json(path)) if path.is_file() else {}
    vocab = original.get("vocab_size")
    return original if isinstance(vocab, int) and tokens <= vocab <= rows else {}


def _published_length(original: Mapping[str, Any], model: ModelConfig) -> int:
    """Return the longest sequence of the published model that `model` was made from, which may differ in RoPE; or 0."""
    try:
        published, length = family_of_source(original).model_of(original)
        rope = {key: getattr(published, key) for key in ("rope_base", "rope_scaling", "window_rope_base")}
        check_same_function(replace(model, **rope), published, _TOKENIZER)
    except ValueError:  # another model's, whose tokenizer alone is used
        return 0
    return length


@contextmanager
def new_folder(out: str | None) -> Iterator[tuple[Path, Path]]:
    """Provide a partial folder, renamed at the end and removed after a failure, and its final path."""
    final = _final_folder(out)
    folder = final.with_name(f"{final.name}.{os.getpid()}.partial")
    folder.mkdir(parents=True)
    try:
        yield folder, final
        folder.rename(final)
        for left in sorted(final.parent.glob(f"{glob.escape(final.name)}.*.partial")):
            logger.warning("%s is of another import or export into %s: delete it if that was killed", left, final.name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _final_folder(out: str | None) -> Path:
    """Return the path of a new folder, which the setting `out` names."""
    if not out:
        raise refuse("out", "", "out=FOLDER, a new one", "Give it a name.")
    final = Path(os.path.abspath(out))
    if final.exists():
        raise refuse("out", out, "a new folder; this one already exists", "Give another name, or delete it.")
    return final
