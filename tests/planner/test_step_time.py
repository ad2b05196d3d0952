"""The simulated time of training steps, compared with recorded steps on H200s."""

import json
import re
from dataclasses import replace

import pytest

from analysis.recorded_memory import RESULTS, STEPS, recorded_config, recorded_steps
from megatron_longctx.cli import cli
from megatron_longctx.planner.memory import Job
from megatron_longctx.planner.step_time import predicted_step_s
from tests.shared.training import tiny_config


def predicted(config, **parts):
    """The seconds of a step on 2 H200s."""
    config = replace(config, parallelism=replace(config.parallelism, cluster="h200_x8_pull"), **parts)
    return predicted_step_s(Job(config, config.model.vocab_size))


@pytest.mark.parametrize("result", STEPS)
def test_recorded_steps(result):
    """Short steps on 4 GPUs also wait for messages of gradients."""
    found = dict(recorded_steps(result))
    assert len(found) >= 3
    assert {name: off for name, off in found.items() if abs(off) > (12 if result.endswith("x4") else 9)} == {}


@pytest.fixture(scope="module")
def llama():
    runs = json.loads((RESULTS / "training_fp8_h200_x2.json").read_text())["runs"]
    return recorded_config(runs[0])


def with_fp8(config, fp8, start=0, end=0):
    return replace(config.train, fp8=fp8, bf16_layers_at_start=start, bf16_layers_at_end=end)


def test_fp8_is_of_products_in_layers_that_have_it(llama):
    exact, delayed, tensorwise, two_layers, none = (
        predicted(llama, train=with_fp8(llama, *each))
        for each in (("none",), ("delayed",), ("tensorwise",), ("tensorwise", 1, 1), ("tensorwise", 2, 2))
    )
    assert delayed < tensorwise < two_layers < none == exact
    assert two_layers == pytest.approx((tensorwise + exact) / 2)
    assert predicted(llama, train=with_fp8(llama, "mxfp8")) is None  # no H200 has it


def test_layers_without_attention_and_with_windows_take_less(llama):
    windowed = replace(llama.model, window=1024)
    assert predicted(llama, model=windowed) < 0.85 * predicted(llama)
    half = predicted(llama, model=replace(windowed, window_pattern=2))
    assert half == pytest.approx((predicted(llama, model=windowed) + predicted(llama)) / 2)
    hybrid = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 1)
    model = replace(llama.model, pattern="G-*-", linear_key_head_dim=128, linear_value_head_dim=128, **hybrid)
    contiguous = replace(llama, parallelism=replace(llama.parallelism, schedule="helper"))
    assert predicted(contiguous, model=model) < 0.85 * predicted(contiguous)


def test_recomputing_layers_runs_attention_again(llama):
    def seconds(mode, share=1.0):
        return predicted(llama, recompute=replace(llama.recompute, mode=mode, kept_results=share))

    kept, half, layer = seconds("attention_output"), seconds("attention_output", 0.5), seconds("layer")
    assert seconds("none") < kept < half < layer
    assert half == pytest.approx((kept + layer) / 2)


def test_no_time_without_figures(tmp_path):
    config = tiny_config(tmp_path, "none")
    assert predicted_step_s(Job(config, 512)) is None
    assert predicted_step_s(Job(replace(config, parallelism=replace(config.parallelism, cluster="tcp")), 512)) is None


def test_the_report_of_memory_has_the_time(capsys):
    words = ("plan", "parallelism=cp2", "data.seq_length=4096", "model.vocab_size=512")
    assert cli.main([*words, "parallelism.cluster=h200_x8", "--memory"]) == 0
    assert re.search(r"\ntime of a training step: [\d.]+ s, [\d,]+ tokens/s, simulated\n$", capsys.readouterr().out)
    assert cli.main([*words, "--memory"]) == 0
    assert "time of a training step" not in capsys.readouterr().out
