"""Mixtures of experts train equally for all sizes of context and expert parallelism, and resume at other sizes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from megatron_longctx.config import Config, ModelConfig, data_parallel_size, layer_list
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.experts import SummedLossRouter, expert_name
from megatron_longctx.mcore.model import transformer_config
from megatron_longctx.planner.flops import Work, training_flops
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.recorded import Curves, gradient_errors, record
from tests.shared.training import tiny_config, tiny_corpus

CP, TP, PP, EP, ETP = (
    f"parallelism.{axis}_parallel_size" for axis in ("context", "tensor", "pipeline", "expert_model", "expert_tensor")
)
EXPERTS: dict[str, Any] = {
    "model.num_moe_experts": 4, "model.moe_ffn_hidden_size": 48, "model.moe_z_loss_coeff": 1e-3,
    "train.steps": 4, "optim.warmup_steps": 0, "optim.lr": 3e-4, "optim.min_lr": 3e-5, "train.global_batch_size": 2,
}  # fmt: skip
# As DeepSeek: a dense layer first, shared experts, and losses per sequence. Ranks hold unequal shares of 97 tokens.
SHARED = {
    "model.moe_layer_freq": "[0,1]", "model.moe_shared_expert_intermediate_size": 32, "data.seq_length": 97,
    "model.moe_router_pre_softmax": True, "model.moe_router_load_balancing_type": "seq_aux_loss",
    "model.moe_router_topk_scaling_factor": 1.5, "train.micro_batch_size": 2,
}  # fmt: skip
BIASES = {"model.bias": True}
SAVED = {"train.save": True, "train.keep_checkpoints": 9, "train.save_interval": 1}

# Keyed by name: ranks, reference run, settings.
RUNS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "alone": (1, "alone", SAVED),
    "shared": (1, "shared", {**SHARED, **SAVED}),
    "biases": (1, "biases", {**BIASES, **SAVED}),
    "biases tp2 ep2": (2, "biases", {**BIASES, **SAVED, TP: 2, EP: 2, ETP: 1}),
    "shared cp3": (3, "shared", {**SHARED, CP: 3, "recompute.mode": "attention_output"}),
    "shared cp4 ep2": (4, "shared", {**SHARED, CP: 4, EP: 2, "parallelism.schedule": "ulysses"}),
    "dp2 cp2 ep4": (4, "alone", {CP: 2, EP: 4, **SAVED}),
    "tp2 cp2 ep2": (4, "alone", {TP: 2, CP: 2, EP: 2, "optim.distributed": False, "recompute.mode": "layer"}),
    "tp2 cp2 ep4": (4, "alone", {TP: 2, CP: 2, EP: 4, ETP: 1}),
    "pp2 cp2 ep2": (4, "pp2 cp2 ep2", {**SHARED, **SAVED, PP: 2, CP: 2, EP: 2, "optim.distributed": False}),
}  # fmt: skip
# Keyed by ranks: runs that resume from one of their checkpoints, the step, and settings. The first pipeline stage has
# no layer of experts, and its first rank writes the common part of the checkpoint.
LATER: dict[int, tuple[tuple[str, int, dict[str, Any]], ...]] = {
    4: (
        ("alone", 1, {TP: 2, CP: 2, EP: 2}),
        ("biases", 1, {**BIASES, TP: 2, EP: 4, ETP: 1}),
        ("shared", 1, {**SHARED, **SAVED, PP: 2, CP: 2, EP: 2}),
        ("pp2 cp2 ep2", 1, RUNS["pp2 cp2 ep2"][2]),
    ),
    1: (("dp2 cp2 ep4", 1, {}), ("shared", 2, SHARED), ("biases tp2 ep2", 2, BIASES)),
}


def _config(root: Path, name: str, settings: dict[str, Any]) -> Config:
    return tiny_config(root, name.replace(" ", "-"), {**EXPERTS, **settings})


def _train(rank: int, configs: list[Config], steps: list[tuple[int, ...]]) -> list[Curves]:
    found = []
    for config, at in zip(configs, steps, strict=True):
        found.append(record(rank, config, at))
        groups.destroy()
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Curves]]:
    root, found = tmp_path_factory.mktemp("experts"), {}
    tiny_corpus(root / "corpus")
    for world in sorted({world for world, _, _ in RUNS.values()}):
        names = [name for name, run in RUNS.items() if run[0] == world]
        configs = [_config(root, name, RUNS[name][2]) for name in names]
        steps = [(0, 2)] * len(names)
        found |= dict(zip(names, run_distributed(_train, world, configs, steps)[0], strict=True))
    return root, found


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if name != run[1]])
def test_losses_norms_and_gradients_equal_those_of_one_rank(trained: tuple[Path, dict[str, Curves]], name: str) -> None:
    root, found = trained
    reference = RUNS[name][1]
    assert found[name].losses == pytest.approx(found[reference].losses, rel=1e-5)
    assert found[name].grad_norms == pytest.approx(found[reference].grad_norms, rel=1e-5)
    for step in (0, 2):
        run, alone = (root / each.replace(" ", "-") for each in (name, reference))
        errors = gradient_errors(run, alone, step)
        per_expert = 4 if "biases" in name else 2
        assert sum(".mlp.experts." in each for each in errors) == 4 * per_expert * (1 if reference == "shared" else 2)
        assert {each: error for each, error in errors.items() if not error <= 1e-5} == {}


def test_checkpoints_resume_at_other_sizes(trained: tuple[Path, dict[str, Curves]]) -> None:
    """The second step after resuming depends on the moments and step counts of Adam."""
    root, found = trained
    for world, runs in LATER.items():
        for name, at, _ in runs:
            (root / name.replace(" ", "-") / "checkpoints/latest_checkpointed_iteration.txt").write_text(str(at))
        configs = [_config(root, name, settings) for name, _, settings in runs]
        curves = run_distributed(_train, world, configs, [()] * len(runs))[0]
        for (name, at, _), resumed in zip(runs, curves, strict=True):
            whole = found[RUNS[name][1]]
            assert resumed.losses == pytest.approx(whole.losses[at:], rel=1e-5), (name, world)
            assert resumed.grad_norms == pytest.approx(whole.grad_norms[at:], rel=1e-5), (name, world)


def _router_gradients(kind: type[TopKRouter], config: Config, rows: int) -> torch.Tensor:
    collection = groups.initialize(seed=1)
    torch.manual_seed(0)
    megatron = transformer_config(config)
    router = kind(config=megatron, pg_collection=collection)
    router.set_layer_number(1)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    probs, _ = router(torch.randn(24, rows, config.model.hidden_size))
    (probs * torch.arange(4.0)).sum().backward()
    groups.destroy()
    gradient: torch.Tensor = router.weight.grad
    return gradient


def _both_routers(rank: int, root: Path) -> list[float]:
    found = []
    for balancing, rows in (("none", 1), ("aux_loss", 1), ("aux_loss", 3), ("seq_aux_loss", 1)):
        settings = {"model.moe_router_load_balancing_type": balancing, "model.moe_aux_loss_coeff": 10.0}
        config = _config(root, "router", settings)
        ours, theirs = (_router_gradients(kind, config, rows) for kind in (SummedLossRouter, TopKRouter))
        found.append(float((ours - theirs).norm() / theirs.norm()))
    return found


def test_on_one_rank_the_routers_losses_equal_megatrons(tmp_path: Path) -> None:
    assert max(run_distributed(_both_routers, 1, tmp_path)[0]) < 1e-5


def test_experts_are_numbered_over_all_ranks() -> None:
    assert expert_name("decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight", 4) == (
        "decoder.layers.1.mlp.experts.5.linear_fc1.weight"
    )
    assert expert_name("mlp.experts.linear_fc2.weight3", 8) == "mlp.experts.11.linear_fc2.weight"
    assert expert_name("mlp.shared_experts.linear_fc2.weight", 8) == "mlp.shared_experts.linear_fc2.weight"


def test_a_list_of_layers_is_equivalent_to_an_interval() -> None:
    experts = {"num_layers": 5, "num_moe_experts": 4}
    for listed, others in (
        ("[1,1,1,1,1]", {}),
        ("[1,0,1,0,1]", {"moe_layer_freq": "2"}),
        ("[0,0,1, 0, 0]", {"moe_layer_freq": "3", "moe_first_dense_layers": 2}),
    ):
        layers = ModelConfig(**experts, moe_layer_freq=listed).expert_layers
        assert layers == ModelConfig(**experts, **others).expert_layers
        assert layer_list(layers) == listed.replace(" ", "")
    assert ModelConfig(num_layers=2, moe_layer_freq="[1,1]").expert_layers == (False, False)


def test_flops_count_only_active_experts() -> None:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_kv_heads": 1, "ffn_hidden_size": 8}
    work = Work(5, 15, 25)
    dense = training_flops(ModelConfig(**sizes), 10, work)
    experts = {"num_moe_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 4}
    # 2 experts of half the width equal one MLP. The router of 6 logits adds 2*5*16*6 per layer, forward.
    assert training_flops(ModelConfig(**sizes, **experts), 10, work).dense == dense.dense + 3 * 2 * 960
    mixed = ModelConfig(**sizes, **experts, moe_first_dense_layers=1, moe_shared_expert_intermediate_size=3)
    assert training_flops(mixed, 10, work).dense == dense.dense + 3 * (960 + 2 * 5 * 3 * 16 * 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model.num_moe_experts": None}, "model.moe_ffn_hidden_size=48: expected null with"),
        ({"model.moe_router_topk": 5}, "model.moe_router_topk=5: expected at most model.num_moe_experts=4"),
        ({"model.moe_router_topk": 1}, "model.moe_router_pre_softmax=False: expected true with"),
        ({"model.moe_first_dense_layers": 2}, "model.moe_first_dense_layers=2: expected less than model.num_layers=2"),
        ({"model.moe_layer_freq": "[0,1,1]"}, "model.moe_layer_freq=[0,1,1]: expected model.num_layers=2 numbers"),
        ({"model.moe_layer_freq": "[0,0]"}, "model.moe_layer_freq=[0,0]: expected a 1 in the list"),
        ({"model.moe_layer_freq": "0,1"}, "model.moe_layer_freq=0,1: expected at least 1 and at most 10,000"),
        (
            {"model.moe_layer_freq": "[0,1]", "model.moe_first_dense_layers": 1},
            "model.moe_first_dense_layers=1: expected 0 with a list in model.moe_layer_freq",
        ),
        ({EP: 3}, "expert_model_parallel_size=3: expected a divisor of model.num_moe_experts=4"),
        ({TP: 2, ETP: 1}, "expert_tensor_parallel_size=1: expected null or 2"),
        ({TP: 2, EP: 2, ETP: 5}, "expert_tensor_parallel_size=5: expected a divisor of model.moe_ffn_hidden_size=48"),
        ({TP: 2, "parallelism.sequence_parallel": False}, "parallelism.sequence_parallel=False: expected true with"),
        ({TP: 2, "model.bias": True}, "expert_tensor_parallel_size=null: expected 1 with model.bias=true"),
        ({"reduction.down_projection": "int8"}, "down_projection=int8: expected none with model.num_moe_experts=4"),
    ],
)  # fmt: skip
def test_impossible_settings_of_experts_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _config(tmp_path, "refused", settings)


def test_ranks_that_cannot_divide_experts_are_refused(tmp_path: Path) -> None:
    config = _config(tmp_path, "refused", {CP: 2, EP: 4})
    with pytest.raises(ValueError, match=r"_size=4: expected a size with which expert tensor 1 x expert 4 x pipeline"):
        data_parallel_size(config, 2)
