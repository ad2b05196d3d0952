"""Experiments without running them: their jobs compose, their modes are planned and simulated, their steps fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_longctx.config import Config, configured_mode, mode_options
from megatron_longctx.config.cluster import load_cluster
from megatron_longctx.core.plans import MODES, build_plan
from megatron_longctx.planner.choose_mode import Candidate
from megatron_longctx.planner.memory import predict
from megatron_longctx.planner.memory.reports import planned_job
from megatron_longctx.training.auto import resolve_for_cluster
from megatron_longctx.training.compose import compose_config, recipes, use_recipes
from megatron_longctx.training.sweep import sweep

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
CLUSTERS = {"h200": ("h200_x8", "h200_8x1_ib400"), "h100": ("dgx_h100_x1",)}
NAME = re.compile(
    r"(?P<model>[a-z0-9_]+?)_(?P<task>pretrain|extend)_(?P<length>\d+)(?P<unit>k|m)"
    r"(?:_tp(?P<tp>\d+))?_cp(?P<cp>\d+)_(?P<hardware>[a-z0-9]+)_(?P<precision>bf16|fp32)"
)
NAMED = [name for name in recipes()["experiment"] if NAME.fullmatch(name)]


def reason(cluster: str, ranking: list[Candidate]) -> str:
    """Return the line of a recipe that gives the reason for its mode."""
    best = ranking[0]
    others = [each for each in ranking if each.mode and best.mode and each.mode.name != best.mode.name]
    figures = ", ".join(f"{each.name} {1e3 * each.seconds:.4g} ms" for each in others[:2])
    return (
        f"# Mode: auto takes {best.name} on {cluster}. Simulated, attention of a layer, forward and backward: "
        f"{1e3 * best.seconds:.4g} ms; {figures}."
    )


def test_the_documented_experiments_exist() -> None:
    models = {NAME.fullmatch(name)["model"] for name in NAMED}  # type: ignore[index]
    assert models >= {"llama3_8b", "llama3_70b", "qwen2_5_7b", "qwen3_8b", "smollm2_135m", "smollm2_1_7b"}
    assert {"llama3_8b_pretrain_32k_cp8_h200_bf16", "llama3_8b_pretrain_1m_cp8_h200_bf16"} <= set(NAMED)
    assert {"compare_modes", "ablation_distflashattn", "ablation_tasp"} <= set(recipes()["experiment"])


@pytest.mark.parametrize("name", NAMED)
def test_an_experiment_matches_its_name_and_fits(name: str) -> None:
    parts = NAME.fullmatch(name)
    assert parts is not None
    config = compose_config([f"experiment={name}"])
    par = config.parallelism
    length = int(parts["length"]) * (1024 if parts["unit"] == "k" else 1024**2)
    assert (config.model.name, config.data.seq_length) == (parts["model"], length)
    assert (par.tensor_parallel_size, par.context_parallel_size) == (int(parts["tp"] or 1), int(parts["cp"]))
    assert config.train.precision == parts["precision"] and par.cluster in CLUSTERS[parts["hardware"]]
    assert par.schedule == "auto", "the planner chooses"
    chosen, ranking = resolve_for_cluster(config)
    assert reason(par.cluster, ranking) in (RECIPES / f"experiment/{name}.yaml").read_text().splitlines()
    capacity = load_cluster(par.cluster).device.memory_gib
    assert capacity is not None and predict(planned_job(chosen)).num_bytes < 0.95 * capacity * 2**30
    assert config.train.save_interval, "a lost node must not end the job"


def checked_mode(config: Config) -> str:
    """Return the name of the mode after checking that it can be planned."""
    par = config.parallelism
    mode = configured_mode(par)
    mode.check_heads(par.context_parallel_size, config.model.num_attention_heads, config.model.num_kv_heads)
    plan = build_plan(par.schedule, par.context_parallel_size, config.data.seq_length, mode_options(par))
    assert plan.n == par.context_parallel_size
    return par.schedule


def test_compare_modes_runs_every_mode_with_the_same_settings() -> None:
    jobs = [compose_config(words) for words in sweep(["experiment=compare_modes"]).jobs]
    assert sorted(map(checked_mode, jobs)) == sorted(MODES)
    assert {config.run.name for config in jobs} == {f"compare_modes-{name}" for name in MODES}


@pytest.mark.parametrize(
    ("name", "varied"),
    [
        ("ablation_distflashattn", {(m, r) for m in ("ring", "helper") for r in ("layer", "attention_output")}),
        ("ablation_tasp", {(m, "none") for m in ("zigzag", "tasp", "all_gather")}),
    ],
)
def test_an_ablation_varies_only_its_settings(name: str, varied: set[tuple[str, str]]) -> None:
    jobs = [compose_config(words) for words in sweep([f"experiment={name}"]).jobs]
    assert {(checked_mode(config), config.recompute.mode) for config in jobs} == varied
    equal = {(config.model, config.data, config.optim, config.train, config.parallelism.cluster) for config in jobs}
    assert len(equal) == 1


def test_sweeps_have_hydras_grammar() -> None:
    found = sweep(
        ["model=tiny,gpt2", "+train.steps=range(20,22)", "data.prefix=a b", "data.split='95,5'", "run.name=s"]
    )
    jobs = [compose_config(job) for job in found.jobs]
    assert found.name == "s"
    assert [job.run.name for job in jobs] == ["s-tiny-20", "s-tiny-21", "s-gpt2-20", "s-gpt2-21"]
    assert {(job.data.prefix, job.data.split) for job in jobs} == {("a b", "95,5")}
    (one,) = sweep(["experiment=compare_modes", "parallelism.schedule=ring"]).jobs
    assert compose_config(one).run.name == "compare_modes", "an override wins over the recipe's sweep"
    with pytest.raises(ValueError, match="steps=0: expected at least 1"):
        sweep(["train.steps=30,0"])


def test_a_users_own_folder_of_recipes(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\nrun:\n  name: mine\n")
    try:
        use_recipes(tmp_path)
        assert "mine" in recipes()["experiment"] and compose_config(["experiment=mine"]).run.name == "mine"
    finally:
        use_recipes(None)
    with pytest.raises(ValueError, match="experiment=mine: expected one of"):
        compose_config(["experiment=mine"])
    with pytest.raises(ValueError, match="--config-dir="):
        use_recipes(tmp_path / "nowhere")
