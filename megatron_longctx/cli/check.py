"""The `check` and `demo` verbs: train with parallelism and without it, and compare the two runs."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Config, ParallelismConfig, check_datasets, data_parallel_size, validate
from ..core.errors import JobFailed, refuse
from ..training.compose import compose_config

if TYPE_CHECKING:
    from ..training.recorded import Curves

logger = logging.getLogger(__name__)

# Relative, of every figure. fp32: another order of sums. bf16: numbers have 8 bits, and each layer rounds; gradients of
# two layers differ by up to 4e-3.
_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
_MAX_NAMED = 5
_RUN, _REFERENCE = "run", "reference"
_DEMO_RUNS = (("demo-cp4", "cp4"), ("demo-cp1", "single"))


@dataclass(frozen=True)
class _Comparison:
    """A recipe, and its reference: the same recipe with less parallelism on fewer ranks, and equal data parallelism."""

    config: Config
    reference: Config
    data_parallel: int
    device: str
    tolerance: float


def check(settings: Sequence[str], steps: int = 3, tolerance: float | None = None) -> int:
    """Train some steps with and without parallelism, all else equal, print the differences, and return the exit code.

    The reference has data parallelism alone. If its ranks cannot hold the model, only context parallelism is left out.

    Args:
        settings: as for `train`. By default, precision is fp32 if the kernel supports it.
        tolerance: largest relative difference of a loss, gradient norm or gradient; None for the precision's.
    """
    with _temporary_folder() as root:
        comparison = _prepare(settings, steps, tolerance, root)
        reference = _train(comparison.reference, comparison, steps)
        # From the same weights: at other tensor- and pipeline-parallel sizes, the seed alone gives others.
        train = replace(comparison.config.train, init_from=str(root / _REFERENCE))
        curves = _train(replace(comparison.config, train=train), comparison, steps)
        return _report(comparison, steps, reference, curves)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Provide a folder for both runs. It is removed at the end, but not if ranks failed: they left evidence there."""
    root = Path(tempfile.mkdtemp(prefix="megatron-longctx-check-"))
    try:
        yield root
    except JobFailed as error:
        for tensors in (*root.glob("*/gradients"), *root.glob("*/checkpoints")):
            shutil.rmtree(tensors)
        raise JobFailed(f"{error}\n(what the ranks left: {root})") from error
    except BaseException:
        shutil.rmtree(root)
        raise
    shutil.rmtree(root)


def _prepare(settings: Sequence[str], steps: int, tolerance: float | None, root: Path) -> _Comparison:
    """Make both configurations and refuse what can be refused before ranks start."""
    if steps < 1:
        raise refuse("--steps", steps, "1 or more", "Three also show the effect of gradients on the optimizer.")
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise refuse("--tolerance", tolerance, "a number above 0", "Leave it out for that of the precision.")
    config = compose_config(settings)
    if config.parallelism.model_parallel_size * config.parallelism.expert_model_parallel_size == 1:
        expected = "2 or more, or another parallel size that is, to be compared with 1"
        raise refuse("parallelism.context_parallel_size", 1, expected, "Set it, or parallelism=cp2.")
    check_datasets(config.data)
    from ..training import forks  # here: torch takes seconds to import
    from ..training.rendezvous import RankInfo

    if RankInfo.from_environment(os.environ) is not None:
        raise ValueError(
            "torchrun or Slurm has started this rank: expected a single process. The two runs have different numbers "
            "of ranks, which check starts itself, on this host."
        )
    keeps = config.train.fp8 != "none" or any(word.startswith("train.precision=") for word in settings)
    forks.import_megatron("megatron_longctx.training.recorded")
    return forks.checked(_compared, _short(config, steps, root), keeps, tolerance)


def _compared(config: Config, keeps_precision: bool, tolerance: float | None) -> _Comparison:
    from ..training import auto, preflight

    device = preflight.device_type(config)
    config, _ = auto.resolve_schedule(config)
    if not keeps_precision:
        with contextlib.suppress(ValueError):  # a kernel that supports only bf16, as the fast ones for GPUs
            exact = replace(config, train=replace(config.train, precision="fp32"))
            preflight.check_kernel(exact, device)
            config = exact
    world = preflight.local_world_size(config)
    preflight.check(config, world)
    dp = data_parallel_size(config, world)
    reference = _reference(config, dp)
    return _Comparison(config, reference, dp, device, tolerance or _TOLERANCES[config.train.precision])


def _reference(config: Config, dp: int) -> Config:
    """Return the first reference that can run: with data parallelism alone, or with all but context parallelism.

    Sums over tensor-parallel ranks that the recipe quantizes can only be compared with equal ones.
    """
    from ..training import preflight

    par, default = config.parallelism, ParallelismConfig()
    reset = ("schedule", "layout", "max_buffer_tokens", "inner_size", "rounds", "outer_schedule", "cluster")
    whole = replace(par, context_parallel_size=1, **{name: getattr(default, name) for name in reset})
    # Experts on as many of the fewer ranks as can share them.
    ranks = dp * whole.model_parallel_size // (par.tensor_size_of_experts * par.pipeline_parallel_size)
    whole = replace(whole, expert_model_parallel_size=max(1, math.gcd(par.expert_model_parallel_size, ranks)))
    single = replace(whole, tensor_parallel_size=1, pipeline_parallel_size=1, expert_tensor_parallel_size=None)
    single = replace(single, expert_model_parallel_size=1)
    quantized = config.reduction.in_training and par.tensor_parallel_size > 1
    why = "reduction.in_training=true quantizes sums over tensor-parallel ranks"
    train, run = replace(config.train, num_processes=None), replace(config.run, name=_REFERENCE)
    candidates = [*([] if quantized else [single]), *([whole] if par.context_parallel_size > 1 else [])]
    for parallelism in dict.fromkeys(candidates):
        reference = replace(config, parallelism=parallelism, train=train, run=run)
        try:
            validate(reference)
            preflight.check(reference, dp * parallelism.model_parallel_size)
        except ValueError as error:
            why = str(error)
            logger.info("cannot compare with %s: %s", _sizes(parallelism), why)
        else:
            return reference
    raise ValueError(f"the run to compare with, at less parallelism: {why}")


def _short(config: Config, steps: int, root: Path) -> Config:
    """Shorten a run and let it save nothing. Its learning rates stay the recipe's."""
    train, optim = config.train, config.optim
    decay = max(optim.decay_steps or train.steps, steps)
    return replace(
        config,
        train=replace(train, steps=steps, save=False, save_minutes=None, keep_best=False),
        optim=replace(optim, decay_steps=decay),
        run=replace(config.run, root=str(root), name=_RUN),
        logging=replace(config.logging, wandb="disabled", profile_step=None),
    )


def _train(config: Config, comparison: _Comparison, steps: int) -> Curves:
    from ..training import ranks, recorded

    if comparison.device == "cuda" and config.train.precision == "fp32":
        os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # Transformer Engine multiplies fp32 with 10 bits otherwise
    par, is_reference = config.parallelism, config is comparison.reference
    parallel = ranks.Ranks(comparison.data_parallel * par.model_parallel_size, comparison.device)
    begin, exported = time.perf_counter(), sorted({0, steps - 1})
    curves: Curves = ranks.run_on_ranks(parallel, recorded.record, config, exported, is_reference)
    seconds, plural = time.perf_counter() - begin, "s" * (parallel.count > 1)
    logger.info(
        "%s: trained %d steps on %d %s rank%s in %.0f s",
        _sizes(par), steps, parallel.count, parallel.device, plural, seconds,
    )  # fmt: skip
    return curves


def _report(comparison: _Comparison, steps: int, reference: Curves, curves: Curves) -> int:
    """Print the table and return the exit code."""
    from ..training.recorded import gradient_errors

    pairs = {"loss": (reference.losses, curves.losses), "gradient norm": (reference.grad_norms, curves.grad_norms)}
    errors: dict[str, float] = {}
    config = comparison.config
    root, run, other = Path(config.run.root), _sizes(config.parallelism), _sizes(comparison.reference.parallelism)
    print(
        f"\n{run} against {other}, with DP={comparison.data_parallel}; {config.parallelism.schedule}, "
        f"packing {config.data.packing}, {config.data.seq_length:,} tokens, {config.train.precision}; "
        f"largest relative difference {comparison.tolerance:g}"
        f"\n\n{'step':>4}  {'':<14}{'reference':>16}{'run':>16}{'difference':>12}"
    )
    for step in range(steps):
        for name, (single, parallel) in pairs.items():
            difference = _relative(parallel[step], single[step])
            errors[f"{name} of step {step + 1}"] = difference
            print(f"{step + 1:>4}  {name:<14}{single[step]:>16.8g}{parallel[step]:>16.8g}{difference:>12.1e}")
    for step in sorted({0, steps - 1}):
        by_name = gradient_errors(root / _RUN, root / _REFERENCE, step)
        print(f"\ngradients of step {step + 1}: {len(by_name)} parameters, the worst of them")
        for name in sorted(by_name, key=lambda name: -by_name[name])[:_MAX_NAMED]:
            print(f"  {name:<58}{by_name[name]:>12.1e}")
        errors |= {f"gradient of {name} in step {step + 1}": error for name, error in by_name.items()}
    beyond = {name: error for name, error in errors.items() if not error <= comparison.tolerance}  # also NaN
    if not beyond:
        print(f"\n{run} trains as {other} does: all {len(errors)} figures are within {comparison.tolerance:g}")
        return 0
    worst = max(beyond, key=lambda name: math.inf if math.isnan(beyond[name]) else beyond[name])
    print(
        f"\n{run} does NOT train as {other} does: {len(beyond)} of {len(errors)} figures are beyond "
        f"{comparison.tolerance:g}, the worst is the {worst} ({beyond[worst]:.1e})"
    )
    return 1


def _sizes(par: ParallelismConfig) -> str:
    """Return the sizes of what shards a sequence or a model; sizes of 1 are left out, except CP's."""
    others = {"TP": par.tensor_parallel_size, "PP": par.pipeline_parallel_size, "EP": par.expert_model_parallel_size}
    more = (f"{axis}={size}" for axis, size in others.items() if size > 1)
    return ", ".join((f"CP={par.context_parallel_size}", *more))


def _relative(value: float, reference: float) -> float:
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def demo(overrides: Sequence[str] = ()) -> None:
    """Prepare text, train with four context-parallel ranks and with one, print a table and write `runs/demo.png`."""
    from ..training.comparison import compare
    from ..training.launcher import train
    from ..training.run_folder import RunFolder
    from ..training.text import prepare_missing

    begin = time.perf_counter()
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key in ("experiment", "parallelism", "run.name"):
            raise refuse(key, value, "the demo's own: its two runs differ in it", "Leave it out, or use `train`.")
    prepare_missing(compose_config(["experiment=demo", *overrides]).data)
    folders = []
    for name, parallelism in _DEMO_RUNS:
        settings = ["experiment=demo", f"parallelism={parallelism}", f"run.name={name}", *overrides]
        config = compose_config(settings)
        folder = RunFolder.of(config).path
        if folder.exists():
            logger.info("removing %s of an earlier demo", folder)
            shutil.rmtree(folder)
        logger.info("\n== %s ==", " ".join(["megatron-longctx train", *settings]))
        train(config)
        folders.append(folder)
    logger.info("\n== the two runs side by side ==")
    compare(sorted(folders), out=folders[0].parent / "demo.png")
    logger.info("the demo took %.0f s", time.perf_counter() - begin)
