"""States of the optimizer that wait on the host: training is the same to the bit, and so is what it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.config import Config, validate
from megatron_longctx.config.tree import OptimConfig
from megatron_longctx.mcore import optimizer_host
from megatron_longctx.mcore.optimizer_host import host_states
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.loop import Trainer
from tests.shared.training import Job, Record, run_job, tiny_config, tiny_corpus

ON_HOST = {"optim.states_on_host": True}
RUN: dict[str, Any] = {
    "data.seq_length": 100,
    "train.precision": "bf16",
    "optim.decay_steps": 6,
    "train.steps": 6,
    "train.global_batch_size": 4,
    "train.save": True,
}
EXPERTS = {
    "model.num_moe_experts": 4,
    "model.moe_ffn_hidden_size": 48,
    "parallelism.context_parallel_size": 2,
    "parallelism.expert_model_parallel_size": 2,
}
SHORT = {"train.steps": 2, "optim.decay_steps": 2, "optim.warmup_steps": 0}
KINDS = {"bf16": {}, "fp32": {"train.precision": "fp32"}, "experts": EXPERTS}


def _states_are_away(trainer: Trainer) -> None:
    """Before the optimizer's step. Of fp32 weights, which have no main copy, moments alone are states."""
    parts = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    assert len(parts) == (2 if trainer.config.model.num_moe_experts else 1)
    for part in parts:
        kept, inner = host_states(part), part.optimizer
        assert kept is not None
        assert len(kept._pieces()) > 2
        states = [x for found in inner.state.values() for key, x in found.items() if key != "step"]
        if trainer.config.train.precision == "bf16":
            states += [x for group in inner.param_groups for x in group["params"]]
        assert all(x.untyped_storage().size() == 0 for x in states)
        assert states or trainer.step == 0


def _run(rank: int, root: Path) -> dict[str, list[Record]]:
    optimizer_host.STATES_PIECE = 3000  # several to a run
    found = {}
    for kind, settings in KINDS.items():

        def job(
            name: str, own: dict[str, Any], kind: str = kind, base: dict[str, Any] = settings, **options: Any
        ) -> Job:
            return Job(tiny_config(root, f"{kind}-{name}", RUN | base | own), **options)

        found[kind] = [
            run_job(each)
            for each in (
                job("device", {}, gradients_at=(5,)),
                job("host", ON_HOST, before_optimizer=_states_are_away, stop_in=1),
                job("host", {}, stop_in=3),
                job("host", ON_HOST, before_optimizer=_states_are_away, gradients_at=(5,)),
                *(
                    job(f"from it {name}", own | SHORT | {"train.init_from": str(root / f"{kind}-device")})
                    for name, own in (("device", {}), ("host", ON_HOST))
                ),
            )
        ]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Record]]:
    root = tmp_path_factory.mktemp("states")
    tiny_corpus(root / "corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        found: dict[str, list[Record]] = run_distributed(_run, 2, root)[0]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_to_the_bit_with_states_here_or_there(runs: dict[str, list[Record]], kind: str) -> None:
    whole, *parts = runs[kind][:4]
    assert [(part.first_step, part.last_step) for part in parts] == [(0, 2), (2, 4), (4, 6)]
    assert [loss for part in parts for loss in part.losses] == whole.losses
    assert [norm for part in parts for norm in part.grad_norms] == whole.grad_norms
    assert whole.gradients[5].keys() == parts[-1].gradients[5].keys()
    assert all((parts[-1].gradients[5][name] == x).all() for name, x in whole.gradients[5].items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_begins_with_the_weights_of_another(runs: dict[str, list[Record]], kind: str) -> None:
    """Main parameters are read from weights again, when these have been loaded."""
    device, host = runs[kind][4:]
    assert (host.losses, host.grad_norms) == (device.losses, device.grad_norms)
    assert len(host.losses) == SHORT["train.steps"] and host.losses[0] < runs[kind][0].losses[0]


def test_states_that_are_not_sharded_are_refused() -> None:
    optim = OptimConfig(distributed=False, states_on_host=True)
    with pytest.raises(ValueError, match=r"^optim.states_on_host=True: expected false with optim.distributed=false"):
        validate(Config(optim=optim))
