"""Experiments without running them: their jobs compose, their modes are planned and simulated, their steps fit."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.config import Config, configured_mode, mode_options
from megatron_longctx.config.cluster import load_cluster
from megatron_longctx.core.plans import MODES, build_plan
from megatron_longctx.mcore.model import RETRAINABLE, fingerprint
from megatron_longctx.models import family_of_source
from megatron_longctx.planner.choose_mode import Candidate
from megatron_longctx.planner.memory import predict
from megatron_longctx.planner.memory.reports import planned_job
from megatron_longctx.training.auto import resolve_for_cluster
from megatron_longctx.training.compose import compose_config, recipes, use_recipes
from megatron_longctx.training.sweep import sweep

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
CLUSTERS = {"h200": ("h200_x8", "h200_8x1_ib400"), "h100": ("dgx_h100_x1",)}
NAME = re.compile(
    r"(?P<model>[a-z0-9_]+?)_(?P<task>extend|sft)_(?P<length>\d+)(?P<unit>k|m)"
    r"(?:_tp(?P<tp>\d+))?_cp(?P<cp>\d+)(?:_ep(?P<ep>\d+))?_(?P<hardware>[a-z0-9]+)_(?P<precision>bf16|fp32)"
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


@pytest.mark.parametrize("name", NAMED)
def test_an_experiment_matches_its_name_and_fits(name: str) -> None:
    parts = NAME.fullmatch(name)
    assert parts is not None
    config = compose_config([f"experiment={name}"])
    par = config.parallelism
    length = int(parts["length"]) * (1024 if parts["unit"] == "k" else 1024**2)
    assert (config.model.name, config.data.seq_length) == (parts["model"], length)
    assert (par.tensor_parallel_size, par.context_parallel_size) == (int(parts["tp"] or 1), int(parts["cp"]))
    assert par.expert_model_parallel_size == int(parts["ep"] or 1)
    assert config.train.precision == parts["precision"] and par.cluster in CLUSTERS[parts["hardware"]]
    assert par.schedule == "auto", "the planner chooses"
    chosen, ranking = resolve_for_cluster(config)
    assert reason(par.cluster, ranking) in (RECIPES / f"experiment/{name}.yaml").read_text().splitlines()
    capacity = load_cluster(par.cluster).device.memory_gib
    assert capacity is not None and predict(planned_job(chosen)).num_bytes < 0.95 * capacity * 2**30
    train, data, optim = config.train, config.data, config.optim
    assert train.save_interval and train.eval_interval and data.has_validation_split and data.packing == "best_fit"
    assert data.tokenizer_path and train.init_from, "the weights and the tokenizer of an import"
    text = (RECIPES / f"experiment/{name}.yaml").read_text()
    tokens = train.global_batch_size * data.seq_length
    assert f"# of {data.seq_length:,} tokens: {tokens_in_words(tokens)} tokens a step" in text and "RoPE" in text
    assert optim.min_lr <= optim.lr / 10 and 0.04 * train.steps <= optim.warmup_steps <= train.steps / 10


def tokens_in_words(tokens: int) -> str:
    return f"{tokens / 1e6:.2g} million" if tokens > 1e6 else f"{tokens:,}"


SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
COMMON = {"hidden_act": "silu", "tie_word_embeddings": False}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
# The fields of the published `config.json`.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama3_8b_extend_128k_cp8_h200_bf16": {
        "model_type": "llama", **dict(zip(SHAPE, (4096, 14336, 32, 32, 8, 128256), strict=True)), "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 8192},
    "qwen3_8b_extend_256k_cp8_h200_bf16": {
        "model_type": "qwen3", **dict(zip(SHAPE, (4096, 12288, 36, 32, 8, 151936), strict=True)), "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "max_position_embeddings": 40960, "head_dim": 128, "attention_bias": False},
    "gpt_oss_20b_sft_64k_cp8_ep8_h200_bf16": {
        "model_type": "gpt_oss", **dict(zip(SHAPE, (2880, 2880, 24, 64, 8, 201088), strict=True)), "rms_norm_eps": 1e-5,
        "rope_theta": 150000, "max_position_embeddings": 131072, "head_dim": 64, "attention_bias": True,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0,
        "rope_scaling": YARN | {"truncate": False}, "layer_types": ["sliding_attention", "full_attention"] * 12},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_takes_the_published_weights(name: str) -> None:
    published = PUBLISHED[name] | COMMON
    model, length = family_of_source(published).model_of(published)
    config = compose_config([f"experiment={name}"])
    prints = [fingerprint(replace(config, model=each), each.vocab_size or 0) for each in (model, config.model)]
    different = {key for key in prints[0] if prints[0][key] != prints[1].get(key)} | prints[0].keys() ^ prints[1].keys()
    assert all(key.startswith(RETRAINABLE) for key in different), different
    changes = (model.rope_base, model.rope_scaling) != (config.model.rope_base, config.model.rope_scaling)
    assert changes == (config.data.seq_length > length), "RoPE changes only where the length grows"


def checked_mode(config: Config) -> str:
    """Return the name of the mode after checking that it can be planned."""
    par = config.parallelism
    mode = configured_mode(par)
    mode.check_heads(par.context_parallel_size, config.model.num_attention_heads, config.model.num_kv_heads)
    plan = build_plan(par.schedule, par.context_parallel_size, config.data.seq_length, mode_options(par))
    assert plan.n == par.context_parallel_size
    return par.schedule


def test_compare_modes_runs_every_mode_with_the_same_settings() -> None:
    jobs = [compose_config(words) for words in sweep(["experiment=compare_modes"])[1]]
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
    jobs = [compose_config(words) for words in sweep([f"experiment={name}"])[1]]
    assert {(checked_mode(config), config.recompute.mode) for config in jobs} == varied
    equal = {(config.model, config.data, config.optim, config.train, config.parallelism.cluster) for config in jobs}
    assert len(equal) == 1


def test_sweeps_have_hydras_grammar() -> None:
    name, found = sweep(
        ["model=tiny,gpt2", "+train.steps=range(20,22)", "data.prefix=a b", "data.split='95,5'", "run.name=s"]
    )
    jobs = [compose_config(job) for job in found]
    assert name == "s"
    assert [job.run.name for job in jobs] == ["s-tiny-20", "s-tiny-21", "s-gpt2-20", "s-gpt2-21"]
    assert {(job.data.prefix, job.data.split) for job in jobs} == {("a b", "95,5")}
    (one,) = sweep(["experiment=compare_modes", "parallelism.schedule=ring"])[1]
    assert compose_config(one).run.name == "compare_modes", "an override wins over the recipe's sweep"
    with pytest.raises(ValueError, match="steps=0: expected at least 1"):
        sweep(["train.steps=30,0"])


def test_a_users_own_folder_of_recipes(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\nrun:\n  name: mine\n")
    try:
        use_recipes(tmp_path)
        assert "mine" in recipes()["experiment"] and compose_config(["experiment=mine"]).run.name == "mine"
        for text, message in (("model:\n  n: 3\n", "model.n: expected a key"), ("run: [", "expected a recipe")):
            (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\n{text}")
            with pytest.raises(ValueError, match=f"{tmp_path}/experiment/mine.yaml: {message}"):
                compose_config(["experiment=mine"])
    finally:
        use_recipes(None)
    with pytest.raises(ValueError, match="experiment=mine: expected one of"):
        compose_config(["experiment=mine"])
    with pytest.raises(ValueError, match="--config-dir="):
        use_recipes(tmp_path / "nowhere")
