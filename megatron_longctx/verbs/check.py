"""The `check` and `demo` verbs: train with context-parallel ranks and with one, and compare the two runs."""

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

from ..compose import compose_config
from ..config import Config, ParallelismConfig, validate
from ..errors import JobFailed, refuse

if TYPE_CHECKING:
    from ..training.recorded import Curves

logger = logging.getLogger(__name__)

# Relative, of every figure. fp32: another order of sums. bf16: numbers have 8 bits, and each layer rounds; gradients of
# two layers differ by up to 4e-3.
_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
_MAX_NAMED = 5
_DEMO_RUNS = (("demo-cp4", "cp4"), ("demo-cp1", "single"))


@dataclass(frozen=True)
class _Comparison:
    """A recipe on `world` ranks, and the reference: the same recipe without context parallelism on fewer ranks."""

    config: Config
    reference: Config
    world: int
    device: str
    tolerance: float

    @property
    def cp(self) -> int:
        return self.config.parallelism.context_parallel_size


def check(settings: Sequence[str], steps: int = 3, tolerance: float | None = None) -> int:
    """Train some steps with and without context parallelism, all else equal, and print the differences.

    Args:
        settings: as for `train`. By default, precision is fp32 if the kernel supports it.
        steps: number of steps of each run.
        tolerance: largest relative difference of a loss, gradient norm or gradient; None for the precision's.

    Returns:
        the exit code: 0 if all differences are within the tolerance, otherwise 1.
    """
    with _temporary_folder() as root:
        comparison = _prepare(settings, steps, tolerance, root)
        reference, curves = (_train(each, comparison, steps) for each in (comparison.reference, comparison.config))
        return _report(comparison, steps, reference, curves)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Provide a folder for both runs. It is removed at the end, but not if ranks failed: they left evidence there."""
    root = Path(tempfile.mkdtemp(prefix="megatron-longctx-check-"))
    try:
        yield root
    except JobFailed as error:
        for gradients in root.glob("*/*.pt"):
            gradients.unlink()
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
    if config.parallelism.context_parallel_size == 1:
        remedy = "Set parallelism.context_parallel_size, or parallelism=cp2."
        raise refuse("parallelism.context_parallel_size", 1, "2 or more, to be compared with 1", remedy)
    from ..comm.rendezvous import RankInfo
    from ..training import auto, preflight  # here: Megatron takes seconds to import

    if RankInfo.from_environment(os.environ) is not None:
        raise ValueError(
            "torchrun or Slurm has started this rank: expected a single process. The two runs have different numbers "
            "of ranks, which check starts itself, on this host."
        )
    device = preflight.device_type(config)
    config, _ = auto.resolve_schedule(_short(config, steps, root))
    if not any(word.startswith("train.precision=") for word in settings):
        with contextlib.suppress(ValueError):  # a kernel that supports only bf16, as the fast ones for GPUs
            exact = replace(config, train=replace(config.train, precision="fp32"))
            preflight.check_kernel(exact, device)
            config = exact
    world = preflight.local_world_size(config)
    preflight.check(config, world)
    reference = _without_context_parallelism(config, world)
    comparison = _Comparison(config, reference, world, device, tolerance or _TOLERANCES[config.train.precision])
    try:
        preflight.check(reference, world // comparison.cp)
    except ValueError as error:
        raise ValueError(f"the run at CP=1, to compare with: {error}") from error
    return comparison


def _short(config: Config, steps: int, root: Path) -> Config:
    """Shorten a run and let it save nothing. Its learning rates stay the recipe's."""
    train, optim = config.train, config.optim
    decay = max(optim.decay_steps or train.steps, steps)
    return replace(
        config,
        train=replace(train, steps=steps, save=False),
        optim=replace(optim, decay_steps=decay),
        run=replace(config.run, root=str(root), name=f"cp{config.parallelism.context_parallel_size}"),
        logging=replace(config.logging, wandb="disabled", profile_step=None),
    )


def _without_context_parallelism(config: Config, world: int) -> Config:
    """Reset what only context parallelism uses, and put experts on as many of the fewer ranks as can share them."""
    default, par = ParallelismConfig(), config.parallelism
    stage = par.tensor_size_of_experts * par.pipeline_parallel_size
    experts = math.gcd(par.expert_model_parallel_size, world // par.context_parallel_size // stage)
    names = ("schedule", "layout", "max_buffer_tokens", "inner_size", "outer_schedule", "cluster")
    defaults = {name: getattr(default, name) for name in names}
    single = replace(par, context_parallel_size=1, expert_model_parallel_size=max(1, experts), **defaults)
    train = replace(config.train, num_processes=None)
    result = replace(config, parallelism=single, train=train, run=replace(config.run, name="cp1"))
    validate(result)
    return result


def _train(config: Config, comparison: _Comparison, steps: int) -> Curves:
    from ..training import ranks, recorded

    if comparison.device == "cuda" and config.train.precision == "fp32":
        os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # Transformer Engine multiplies fp32 with 10 bits otherwise
    cp = config.parallelism.context_parallel_size
    parallel = ranks.Ranks(comparison.world // comparison.cp * cp, comparison.device)
    begin = time.perf_counter()
    curves: Curves = ranks.run_on_ranks(parallel, recorded.record, config, sorted({0, steps - 1}))
    seconds, plural = time.perf_counter() - begin, "s" * (parallel.count > 1)
    logger.info(
        "CP=%d: trained %d steps on %d %s rank%s in %.0f s", cp, steps, parallel.count, parallel.device, plural, seconds
    )
    return curves


def _report(comparison: _Comparison, steps: int, reference: Curves, curves: Curves) -> int:
    """Print the table and return the exit code."""
    from ..training.recorded import gradient_errors

    pairs = {
        "loss": (reference.losses, curves.losses),
        "gradient norm": (reference.grad_norms, curves.grad_norms),
    }
    errors: dict[str, float] = {}
    cp, root = comparison.cp, Path(comparison.config.run.root)
    print(f"\n{_title(comparison)}\n\n{'step':>4}  {'':<14}{'CP=1':>16}{f'CP={cp}':>16}{'difference':>12}")
    for step in range(steps):
        for name, (single, parallel) in pairs.items():
            difference = _relative(parallel[step], single[step])
            errors[f"{name} of step {step + 1}"] = difference
            print(f"{step + 1:>4}  {name:<14}{single[step]:>16.8g}{parallel[step]:>16.8g}{difference:>12.1e}")
    for step in sorted({0, steps - 1}):
        by_name = gradient_errors(root / f"cp{cp}", root / "cp1", step)
        print(f"\ngradients of step {step + 1}: {len(by_name)} parameters, the worst of them")
        for name in sorted(by_name, key=lambda name: -by_name[name])[:_MAX_NAMED]:
            print(f"  {name:<58}{by_name[name]:>12.1e}")
        errors |= {f"gradient of {name} in step {step + 1}": error for name, error in by_name.items()}
    beyond = {name: error for name, error in errors.items() if not error <= comparison.tolerance}  # also NaN
    if not beyond:
        print(f"\nCP={cp} trains as CP=1 does: all {len(errors)} figures are within {comparison.tolerance:g}")
        return 0
    worst = max(beyond, key=lambda name: math.inf if math.isnan(beyond[name]) else beyond[name])
    print(
        f"\nCP={cp} does NOT train as CP=1 does: {len(beyond)} of {len(errors)} figures are beyond "
        f"{comparison.tolerance:g}, the worst is the {worst} ({beyond[worst]:.1e})"
    )
    return 1


def _title(comparison: _Comparison) -> str:
    par, config = comparison.config.parallelism, comparison.config
    tp, pp = par.tensor_parallel_size, par.pipeline_parallel_size
    dp = comparison.world // par.model_parallel_size
    return (
        f"CP={comparison.cp} against CP=1, with TP={tp}, PP={pp}, DP={dp}; {par.schedule}, "
        f"packing {config.data.packing}, {config.data.seq_length:,} tokens, {config.train.precision}; "
        f"largest relative difference {comparison.tolerance:g}"
    )


def _relative(value: float, reference: float) -> float:
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def demo(overrides: Sequence[str] = ()) -> None:
    """Prepare text, train with four context-parallel ranks and with one, print a table and write `runs/demo.png`.

    Args:
        overrides: settings for both runs, after those of the demo.
    """
    from ..compare import compare
    from ..training.launcher import train
    from ..training.run_folder import RunFolder
    from ..training.text import prepare_missing

    begin = time.perf_counter()
    prepare_missing(compose_config(["experiment=demo", *overrides]).data)
    folders = []
    for name, parallelism in _DEMO_RUNS:
        settings = ["experiment=demo", f"parallelism={parallelism}", f"run.name={name}", *overrides]
        folder = RunFolder.of(compose_config(settings)).path
        if folder.exists():
            logger.info("removing %s of an earlier demo", folder)
            shutil.rmtree(folder)
        logger.info("\n== %s ==", " ".join(["megatron-longctx train", *settings]))
        train(settings)
        folders.append(folder)
    logger.info("\n== the two runs side by side ==")
    compare(sorted(folders), out=folders[0].parent / "demo.png")
    logger.info("the demo took %.0f s", time.perf_counter() - begin)
