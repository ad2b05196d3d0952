"""Optimizer states on the host: training and checkpoints are bit-identical."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_longctx.mcore import optimizer as states_module
from megatron_longctx.mcore.optimizer import HostStates, host_states, parts_of
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.loop import Trainer
from tests.shared.training import Job, Record, run_job, tiny_config, tiny_corpus

ON_HOST = {"optim.states_on_host": True}
RUN: dict[str, Any] = {"data.seq_length": 100, "train.precision": "bf16", "optim.decay_steps": 6, "train.steps": 6,
                       "train.global_batch_size": 4, "train.save": True}  # fmt: skip
EXPERTS = {"model.num_moe_experts": 4, "model.moe_ffn_hidden_size": 48, "parallelism.context_parallel_size": 2,
           "parallelism.expert_model_parallel_size": 2}  # fmt: skip
SHORT = {"train.steps": 2, "optim.decay_steps": 2, "optim.warmup_steps": 0}
KINDS = {"bf16": {}, "fp32": {"train.precision": "fp32"}, "experts": EXPERTS}


def _check_states_on_host(trainer: Trainer) -> None:
    """Check before the optimizer's step. fp32 weights have no main copy: their only states are moments."""
    parts = parts_of(trainer.optimizer)
    assert len(parts) == (2 if trainer.config.model.num_moe_experts else 1)
    for part in parts:
        kept, inner = host_states(part), part.optimizer
        assert kept is not None
        assert len(kept._pieces()) > 2
        assert {each for piece in kept._pieces() for each in piece.groups} == set(range(len(inner.param_groups)))
        states = [x for found in inner.state.values() for key, x in found.items() if key != "step"]
        if trainer.config.train.precision == "bf16":
            states += [x for group in inner.param_groups for x in group["params"]]
        assert all(x.untyped_storage().size() == 0 for x in states)
        assert states or trainer.step == 0


def _run(rank: int, root: Path) -> dict[str, list[Record]]:
    states_module.STATES_PIECE = 3000  # several pieces per run
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
                job("host", ON_HOST, before_optimizer=_check_states_on_host, stop_in=1),
                job("host", {}, stop_in=3),
                job("host", ON_HOST, before_optimizer=_check_states_on_host, gradients_at=(5,)),
                *(
                    job(f"init {name}", own | SHORT | {"train.init_from": str(root / f"{kind}-device")})
                    for name, own in (("device", {}), ("host", ON_HOST))
                    if kind == "bf16"
                ),
            )
        ]
    return found


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, list[Record]]:
    tiny_corpus(root / "corpus")
    found: dict[str, list[Record]] = run_distributed(_run, 2, root)[0]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_training_resumes_bit_identically_on_device_or_host(runs: dict[str, list[Record]], kind: str) -> None:
    whole, *parts = runs[kind][:4]
    assert [(part.first_step, part.last_step) for part in parts] == [(0, 2), (2, 4), (4, 6)]
    assert [loss for part in parts for loss in part.losses] == whole.losses
    assert [norm for part in parts for norm in part.grad_norms] == whole.grad_norms
    assert whole.gradients[5].keys() == parts[-1].gradients[5].keys()
    assert all((parts[-1].gradients[5][name] == x).all() for name, x in whole.gradients[5].items())


def test_states_follow_the_weights_of_init_from(runs: dict[str, list[Record]]) -> None:
    """Main parameters are copied from the weights after these have been loaded."""
    whole, *_, device, host = runs["bf16"]
    assert (host.losses, host.grad_norms) == (device.losses, device.grad_norms)
    assert len(host.losses) == SHORT["train.steps"] and host.losses[0] < whole.losses[0]


class _CountsInGroups(torch.optim.AdamW):
    """Adam that counts steps per group, also in groups without parameters, as TransformerEngine's and Apex's do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["counted"] = group.get("counted", 0) + 1
        super().step(closure)


def _on_host(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Return three weights, their main parameters, their Adam, Megatron's optimizer and its states, in three pieces."""
    monkeypatch.setattr(states_module, "STATES_PIECE", 1)
    weights = [torch.ones(4).bfloat16() for _ in range(3)]
    mains = [torch.nn.Parameter(weight.float()) for weight in weights]
    adam = _CountsInGroups([{"params": mains[:2]}, {"params": [], "weight_decay": 0.0}, {"params": mains[2:]}], lr=0.5)
    optimizer = SimpleNamespace(optimizer=adam, shard_float16_groups=[weights], shard_fp32_from_float16_groups=[mains])
    optimizer._copy_model_params_to_main_params = lambda: [x.data.copy_(y) for x, y in zip(mains, weights, strict=True)]
    return weights, mains, adam, optimizer, HostStates(optimizer)


def test_weights_are_read_with_one_piece_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, mains, _, optimizer, states = _on_host(monkeypatch)
    for number, weight in enumerate(weights):
        weight.fill_(number + 2)
    send, on_device = states._send, []

    def sending(piece: Any) -> None:
        on_device.append(sum(main.untyped_storage().size() > 0 for main in mains))
        send(piece)

    monkeypatch.setattr(states, "_send", sending)
    optimizer._copy_model_params_to_main_params()
    assert on_device == [1, 1, 1] and not any(main.untyped_storage().size() for main in mains)
    assert [states.values(main).tolist() for main in mains] == [[number + 2.0] * 4 for number in range(3)]


def test_a_group_counts_a_step_once_for_any_number_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, mains, adam, _, _ = _on_host(monkeypatch)
    for step in (1, 2):
        for main in mains:
            main.grad = torch.ones(4)
        adam.step()
        assert [group["counted"] for group in adam.param_groups] == [step] * 3
        assert [group["params"] for group in adam.param_groups] == [mains[:2], [], mains[2:]]
    assert all(float(weight[0]) < 0.1 for weight in weights)
