"""The `check` verb: whether a recipe trains the same with its context-parallel ranks as without them."""

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
    from ..training.recorded import Figures

logger = logging.getLogger(__name__)

# Relative, of every figure. fp32: what the order of sums changes. bf16: a number has 8 bits, and each layer rounds;
# gradients of two layers are up to 4e-3 apart.
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
_MOST_NAMED = 5


@dataclass(frozen=True)
class Plan:
    """What is compared: a recipe on `world` ranks, and the same one without context parallelism on fewer."""

    config: Config
    reference: Config
    world: int
    device: str
    tolerance: float

    @property
    def cp(self) -> int:
        return self.config.parallelism.context_parallel_size


def check(settings: Sequence[str], steps: int = 3, tolerance: float | None = None) -> int:
    """Train some steps with and without context parallelism, everything else alike, and print what differs.

    Args:
        settings: words as for `train`. Precision is fp32 where the kernel takes it, unless they say another.
        steps: of each run.
        tolerance: largest relative difference of any loss, gradient norm and gradient; None: by precision.

    Returns:
        exit code: 0 where all is within the tolerance, else 1.

    Raises:
        ValueError: a recipe that cannot be checked here.
        JobFailed: a rank failed.
    """
    with _folder() as root:
        plan = _planned(settings, steps, tolerance, root)
        return _report(plan, steps, _trained(plan.reference, plan, steps), _trained(plan.config, plan, steps))


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """For both runs; what failed ranks leave there is kept."""
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


def _planned(settings: Sequence[str], steps: int, tolerance: float | None, root: Path) -> Plan:
    """Everything that can be refused before a rank starts."""
    if steps < 1:
        raise refuse("--steps", steps, "1 or more", "Three show what the optimizer makes of the gradients, too.")
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
    config = auto.settled(_recorded(config, steps, root))
    if not any(word.startswith("train.precision=") for word in settings):
        with contextlib.suppress(ValueError):  # of a kernel that takes bf16 alone, as the fast ones of GPUs do
            exact = replace(config, train=replace(config.train, precision="fp32"))
            preflight.check_kernel(exact, device)
            config = exact
    world = preflight.local_world_size(config)
    preflight.check(config, world)
    reference = _without_context_parallelism(config, world)
    plan = Plan(config, reference, world, device, tolerance or TOLERANCES[config.train.precision])
    try:
        preflight.check(reference, world // plan.cp)
    except ValueError as error:
        raise ValueError(f"the run at CP=1, to compare with: {error}") from error
    return plan


def _recorded(config: Config, steps: int, root: Path) -> Config:
    """A run of some steps that leaves nothing; the learning rates stay those of the recipe."""
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
    """The same recipe; what only context parallelism has is at its default, and experts are on as many ranks of the
    fewer as share them."""
    default, par = ParallelismConfig(), config.parallelism
    stage = par.tensor_size_of_experts * par.pipeline_parallel_size
    experts = math.gcd(par.expert_model_parallel_size, world // par.context_parallel_size // stage)
    names = ("schedule", "layout", "max_buffer_tokens", "inner_size", "head_chunks", "outer_schedule", "cluster")
    defaults = {name: getattr(default, name) for name in names}
    single = replace(par, context_parallel_size=1, expert_model_parallel_size=max(1, experts), **defaults)
    train = replace(config.train, num_processes=None)
    result = replace(config, parallelism=single, train=train, run=replace(config.run, name="cp1"))
    validate(result)
    return result


def _trained(config: Config, plan: Plan, steps: int) -> Figures:
    from ..training import ranks, recorded

    if plan.device == "cuda" and config.train.precision == "fp32":
        os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # Transformer Engine multiplies fp32 with 10 bits otherwise
    cp = config.parallelism.context_parallel_size
    where = ranks.Where(plan.world // plan.cp * cp, plan.device)
    words = f"{where.ranks} {where.device} rank{'s' * (where.ranks > 1)}"
    begin = time.perf_counter()
    figures: Figures = ranks.start(where, recorded.record, config, sorted({0, steps - 1}))
    logger.info("CP=%d: trained %d steps on %s in %.0f s", cp, steps, words, time.perf_counter() - begin)
    return figures


def _report(plan: Plan, steps: int, reference: Figures, found: Figures) -> int:
    """Print the table, and give the exit code."""
    from ..training.recorded import gradient_errors

    pairs = {
        "loss": (reference.losses, found.losses),
        "gradient norm": (reference.grad_norms, found.grad_norms),
    }
    errors: dict[str, float] = {}
    print(f"\n{_recipe(plan)}\n\n{'step':>4}  {'':<14}{'CP=1':>16}{f'CP={plan.cp}':>16}{'difference':>12}")
    for step in range(steps):
        for name, (ours, theirs) in pairs.items():
            difference = _relative(theirs[step], ours[step])
            errors[f"{name} of step {step + 1}"] = difference
            print(f"{step + 1:>4}  {name:<14}{ours[step]:>16.8g}{theirs[step]:>16.8g}{difference:>12.1e}")
    for step in sorted({0, steps - 1}):
        of_step = gradient_errors(
            Path(plan.config.run.root, "cp" + str(plan.cp)), Path(plan.config.run.root, "cp1"), step
        )
        worst = sorted(of_step, key=lambda name: -of_step[name])[:_MOST_NAMED]
        print(f"\ngradients of step {step + 1}: {len(of_step)} parameters, the worst of them")
        for name in worst:
            print(f"  {name:<58}{of_step[name]:>12.1e}")
        errors |= {f"gradient of {name} in step {step + 1}": error for name, error in of_step.items()}
    return _verdict(plan, errors)


def _verdict(plan: Plan, errors: dict[str, float]) -> int:
    beyond = {what: error for what, error in errors.items() if not error <= plan.tolerance}  # NaN is beyond as well
    if not beyond:
        print(f"\nCP={plan.cp} trains as CP=1 does: all {len(errors)} figures are within {plan.tolerance:g}")
        return 0
    worst = max(beyond, key=lambda what: math.inf if math.isnan(beyond[what]) else beyond[what])
    print(
        f"\nCP={plan.cp} does NOT train as CP=1 does: {len(beyond)} of {len(errors)} figures are beyond "
        f"{plan.tolerance:g}, the worst is the {worst} ({beyond[worst]:.1e})"
    )
    return 1


def _recipe(plan: Plan) -> str:
    par, config = plan.config.parallelism, plan.config
    tp, pp = par.tensor_parallel_size, par.pipeline_parallel_size
    dp = plan.world // par.model_parallel_size
    return (
        f"CP={plan.cp} against CP=1, with TP={tp}, PP={pp}, DP={dp}; {par.schedule}, packing {config.data.packing}, "
        f"{config.data.seq_length:,} tokens, {config.train.precision}; largest relative difference {plan.tolerance:g}"
    )


def _relative(value: float, reference: float) -> float:
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf
