"""`megatron-longctx import`: a published model as a run, for `generate`, `serve`, `export` and `train.init_from`."""

from __future__ import annotations

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
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from ..compose import RESOLVED, override_config, save_config
from ..config import Config
from ..errors import refuse
from ..mcore import checkpoint_weights
from ..mcore.checkpoint_weights import Journal, Parameter
from ..mcore.corpus import tokenizer_identity
from ..mcore.model import fingerprint, padded_vocab_size
from ..mcore.tokenizer import build_tokenizer
from ..models import Dims, Weight, family_of_source
from ..models.family import every, require_same_function
from ..models.gguf_file import GgufFile
from ..models.huggingface import HuggingFaceFolder
from ..models.source import Source
from ..serving.inference_job import split_words

logger = logging.getLogger(__name__)

TOKENIZER, CHECKPOINTS = "tokenizer", "checkpoints"  # folders of a run
# Buffers that older versions of `transformers` saved with a model, and work out anew.
_WORKED_OUT = re.compile(r".*\.rotary_emb\.inv_freq")


def import_model(source: str, words: Sequence[str]) -> None:
    """Run the verb.

    Args:
        source: a folder of Hugging Face's, or a GGUF file.
        words: `out=RUN`, and settings of the run.

    Raises:
        ValueError: a source or settings that cannot be used; nothing is left of the run then.
        OSError: it cannot be written.
    """
    begin = time.perf_counter()
    own, settings = split_words(words, ("out",))
    published = open_source(Path(source))
    family = family_of_source(published.config)
    model, seq_length = family.model_of(published.config)
    vocab = model.vocab_size
    assert vocab is not None
    base = Config()
    precision = "bf16" if {each.dtype for each in published.tensors.values()} == {torch.bfloat16} else "fp32"
    base = replace(
        base,
        model=model,
        data=replace(base.data, seq_length=seq_length),
        train=replace(base.train, precision=precision),
    )
    with new_folder("out", own.get("out")) as (folder, final):
        published.write_tokenizer(folder / TOKENIZER)
        if (folder / TOKENIZER).is_dir():
            data = replace(base.data, tokenizer="huggingface", tokenizer_path=str(final / TOKENIZER))
            base = replace(base, data=data)
        config = override_config(
            replace(base, run=replace(base.run, name=final.name, root=str(final.parent))), settings
        )
        require_same_function(config.model, model, f"{source} has")
        rows = config.model.vocab_size
        if rows is None or rows < vocab:
            raise refuse("model.vocab_size", rows, f"at least the {vocab} tokens of {source}", "Leave it out.")
        dims = Dims(config.model, vocab)
        weights = family.weights(config.model)
        check_tensors(published, weights, dims)
        extra = _tokenizer_of(config, folder, final, vocab)
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        save_config(config, folder / RESOLVED)
        journal = Journal(folder, _left(folder, final), CHECKPOINTS, _identity(Path(source), folder))
        checkpoint_weights.write(
            folder / CHECKPOINTS,
            _parameters(published, weights, dims, dtype),
            config.model.num_layers,
            dtype,
            fingerprint(config, rows),
            extra,
            journal,
        )
        journal.remove()
    rounded = {each.dtype for each in published.tensors.values()} - {dtype, torch.float16}
    if dtype == torch.bfloat16 and rounded:
        logger.info("fp32 weights were rounded to bf16, as train.precision=bf16 says")
    took = time.perf_counter() - begin
    logger.info("imported %s (%s, %s) into %s in %.1f s", source, family.name, config.train.precision, final, took)


def _identity(source: Path, folder: Path) -> str:
    """What decides the weights: files, by size and time of change, the settings in `folder`, and who writes."""
    files = [each for each in sorted(source.iterdir()) if each.is_file()] if source.is_dir() else [source]
    of_files = [(str(each.absolute()), (stat := each.stat()).st_size, stat.st_mtime_ns) for each in files]
    return json.dumps([version("megatron-longctx"), torch.__version__, of_files, (folder / RESOLVED).read_text()])


def open_source(path: Path) -> Source:
    """The published model at `path`.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    if path.suffix == ".gguf" and path.is_file():
        return GgufFile(path)
    if (path / "config.json").is_file():
        return HuggingFaceFolder(path)
    expected = "a folder with config.json and safetensors files, or a .gguf file"
    raise refuse("SOURCE", path, expected, "Fetch it first: nothing is downloaded here.")


def check_tensors(source: Source, weights: Sequence[Weight], dims: Dims) -> None:
    """See that every tensor has its place, every place its tensor, and each the shape that the configuration says.

    Raises:
        ValueError: names the first that has not.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for weight, layer in every(weights, dims.model):
        expected |= zip(weight.names(layer), weight.their_shapes(dims), strict=True)
    for name, shape in expected.items():
        if name not in source.tensors:
            raise refuse("tensors", name, "it in the files, of which none has it", "Fetch all files of the model.")
        if (found := source.tensors[name].shape) != shape:
            raise refuse("tensors", f"{name} {found}", f"the shape {shape}, as config.json says", "Fetch both again.")
    for name in source.tensors.keys() - expected.keys():
        if not _WORKED_OUT.fullmatch(name) and not _is_tied_copy(source, name, dims):
            remedy = "Models with more than their architecture has are not served yet."
            raise refuse("tensors", name, "tensors that the architecture has", remedy)


def _is_tied_copy(source: Source, name: str, dims: Dims) -> bool:
    """Whether it is the output's matrix, saved again where it is the embedding's."""
    tied = dims.model.tie_embeddings and name == "lm_head.weight"
    return tied and torch.equal(source.read(name), source.read("model.embed_tokens.weight"))


def _parameters(source: Source, weights: Sequence[Weight], dims: Dims, dtype: torch.dtype) -> Iterator[Parameter]:
    def value(weight: Weight, layer: int) -> Tensor:
        parts = [source.read(name).to(dtype) for name in weight.names(layer)]
        return weight.form.join(parts, dims)

    for weight, layer in every(weights, dims.model):
        yield Parameter(*weight.place(layer, dims), weight.our_shape(dims), partial(value, weight, layer))


def _tokenizer_of(config: Config, folder: Path, final: Path, vocab: int) -> Mapping[str, object]:
    """What a checkpoint says of the tokenizer, which lies in `folder` until that is called `final`.

    Raises:
        ValueError: there is none, it cannot be read, or has more tokens than the embedding.
    """
    data = config.data
    own = data.tokenizer_path == str(final / TOKENIZER)
    if data.tokenizer == "byte-level" and not (folder / TOKENIZER).is_dir():
        logger.warning("the source has no tokenizer: data.tokenizer=byte-level, which is hardly the model's")
    tokenizer = build_tokenizer(data.tokenizer, str(folder / TOKENIZER) if own else data.tokenizer_path)
    if tokenizer.vocab_size > vocab:
        expected = f"at most the {vocab} tokens that the embedding has; this has {tokenizer.vocab_size}"
        raise refuse("data.tokenizer_path", data.tokenizer_path, expected, "Take the tokenizer of this model.")
    padded_vocab_size(config.model, tokenizer.vocab_size)
    return {"data": {"data.tokenizer": tokenizer_identity(config, tokenizer)}}


@contextmanager
def new_folder(key: str, name: str | None) -> Iterator[tuple[Path, Path]]:
    """A folder to write into, which gets its name when all is written, and that name; nothing is left after a failure.

    Raises:
        ValueError: no name is given, or it is taken.
        OSError: it cannot be made.
    """
    if not name:
        raise refuse(key, name or "", f"{key}=FOLDER, a new one", "Give it a name.")
    final = Path(os.path.abspath(name))
    if final.exists():
        raise refuse(key, name, "a new folder; this is there already", "Give another name, or delete it.")
    partial_folder = final.with_name(f"{final.name}.{os.getpid()}.partial")
    partial_folder.mkdir(parents=True)
    try:
        yield partial_folder, final
        partial_folder.rename(final)
        for left in _left(partial_folder, final):
            logger.warning("%s is of another import or export into %s: delete it if that was killed", left, final.name)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise


def _left(folder: Path, final: Path) -> list[Path]:
    """What others than `folder` have begun to write to where `final` is to be."""
    return [each for each in sorted(final.parent.glob(f"{glob.escape(final.name)}.*.partial")) if each != folder]
