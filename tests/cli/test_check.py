"""The `check` verb on CPUs: a correct recipe passes; one with wrong ranks fails and names the parameters."""

import functools
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_longctx.cli import check, cli
from megatron_longctx.config import Config
from megatron_longctx.mcore.data import TrainingBatch
from megatron_longctx.mcore.experts import SeededExperts
from megatron_longctx.mcore.pack import Pack
from megatron_longctx.planner import memory
from megatron_longctx.testing.distributed import run_quickly
from megatron_longctx.training import ranks, recorded
from megatron_longctx.training.loop import Trainer
from tests.shared.training import TINY, tiny_corpus

pytestmark = pytest.mark.usefixtures("on_cpu")
DEFAULT_OF_CHECK = ("train.precision", "train.save", "logging.wandb")


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The settings of a tiny recipe. Ranks start as quickly as in other tests."""
    monkeypatch.setattr(ranks, "run_ranks", functools.partial(run_quickly, threads=1))
    monkeypatch.chdir(tmp_path)
    tiny_corpus(tmp_path / "corpus")
    return [*(f"{key}={value}" for key, value in TINY.items() if key not in DEFAULT_OF_CHECK), "data.prefix=corpus"]


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The temporary folders of checks, in order of creation."""
    folders: list[Path] = []
    make = tempfile.mkdtemp

    def recorded_mkdtemp(*args: Any, **options: Any) -> str:
        path = make(*args, **options)
        if Path(path).name.startswith("megatron-longctx-check-"):
            folders.append(Path(path))
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", recorded_mkdtemp)
    return folders


def _own_positions(pack: Pack, device: torch.device) -> Tensor:
    return torch.arange(pack.num_local_tokens, device=device)


def _with_own_positions(rank: int, config: Config, *args: Any) -> recorded.Curves:
    """Train with positions that count only a rank's own tokens, as a model without context parallelism does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pack, "positions", _own_positions)
        return recorded.record(rank, config, *args)


def test_a_packed_pipeline_with_masks_and_accumulation_passes(
    recipe: list[str], capsys: pytest.CaptureFixture[str], folders: list[Path], tmp_path: Path
) -> None:
    before = set(tmp_path.rglob("*"))
    packed = ["data.packing=best_fit", "data.mask_eod_loss=true", "train.global_batch_size=4"]
    parallel = ["parallelism=cp2", "parallelism.pipeline_parallel_size=2", "parallelism.schedule=helper"]
    assert cli.main(["check", *recipe, *packed, *parallel, "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "CP=2, PP=2 against CP=1, with DP=1; helper, packing best_fit, 96 tokens, fp32" in out
    # Two losses, two norms, and the gradients of 15 parameters in two steps.
    assert "CP=2, PP=2 trains as CP=1 does: all 34 figures are within 1e-05" in out
    assert "gradients of step 1: 15 parameters" in out and "gradients of step 2: 15 parameters" in out
    assert "decoder.layers.1." in out, "layers are numbered over all stages"
    assert set(tmp_path.rglob("*")) == before and [path.exists() for path in folders] == [False], "no file is left"


def test_wrong_ranks_fail_and_parameters_are_named(
    recipe: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "record", _with_own_positions)
    assert cli.main(["check", *recipe, "parallelism=cp2", "--steps", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "" and "CP=2 does NOT train as CP=1 does:" in captured.out
    named = captured.out.partition("the worst of them\n")[2].splitlines()
    assert any("self_attention.linear_qkv.weight" in line for line in named[:5])
    assert float(named[0].split()[1]) > 0.01


def _with_second_biases_summed(rank: int, config: Config, *args: Any) -> recorded.Curves:
    """Train with the marks that Megatron gives to the second biases of experts."""
    with pytest.MonkeyPatch.context() as patch:
        make = SeededExperts.__init__

        def marked(self: SeededExperts, *given: Any, **others: Any) -> None:
            make(self, *given, **others)
            for name, parameter in self.named_parameters():
                parameter.sequence_parallel = "linear_fc2.bias" in name and config.parallelism.uses_sequence_parallel

        patch.setattr(SeededExperts, "__init__", marked)
        return recorded.record(rank, config, *args)


def test_the_reference_has_no_tensor_or_expert_parallelism(
    recipe: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that every run with these sizes has is found."""
    experts = ["model.num_moe_experts=4", "model.bias=true", "parallelism.tensor_parallel_size=2"]
    parallel = ["parallelism.expert_model_parallel_size=2", "parallelism.expert_tensor_parallel_size=1"]
    monkeypatch.setattr(recorded, "record", _with_second_biases_summed)
    assert cli.main(["check", *recipe, *experts, *parallel, "--steps", "1"]) == 1
    out = capsys.readouterr().out
    assert "CP=1, TP=2, EP=2 against CP=1, with DP=1;" in out
    named = out.partition("the worst of them\n")[2].splitlines()
    assert ".mlp.experts.experts." in named[0] and ".linear_fc2.bias" in named[0]


def test_without_memory_for_the_whole_model_only_context_parallelism_is_left_out(
    recipe: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_memory(job: memory.Job, *_: Any) -> None:
        if job.config.parallelism.tensor_parallel_size == 1:
            raise ValueError("too little memory")

    monkeypatch.setattr(memory, "check", check_memory)
    caplog.set_level(logging.INFO)
    settings = [*recipe, "parallelism=cp2", "parallelism.tensor_parallel_size=2"]
    comparison = check._prepare(settings, 1, None, Path("runs"))
    assert comparison.reference.parallelism.tensor_parallel_size == 2
    assert comparison.reference.parallelism.context_parallel_size == 1
    assert "cannot compare with CP=1: too little memory" in caplog.text
    with pytest.raises(ValueError, match="the run to compare with, at less parallelism: too little memory"):
        check._prepare([*recipe, "parallelism.tensor_parallel_size=2"], 1, None, Path("runs"))


def _diverging(rank: int, config: Config, *args: Any) -> recorded.Curves:
    """Train with a non-finite loss in the second step. The first step writes its gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded.RecordedTrainer, "_require_finite", _require_finite_until_step_1)
        return recorded.record(rank, config, *args)


def _require_finite_until_step_1(trainer: Trainer, what: str, value: float, batches: list[TrainingBatch]) -> None:
    Trainer._require_finite(trainer, what, value if trainer.step == 0 else float("nan"), batches)


def test_evidence_of_failed_ranks_is_kept(
    recipe: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folders: list[Path]
) -> None:
    monkeypatch.setattr(recorded, "record", _diverging)
    assert cli.main(["check", *recipe, "parallelism=cp2"]) == 1
    err = capsys.readouterr().err
    assert "loss is nan in step 2" in err and f"(what the ranks left: {folders[0]})" in err
    assert (folders[0] / "reference/nonfinite/step_2/rank_0.json").is_file() and not list(folders[0].rglob("*.distcp"))
    shutil.rmtree(folders[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "parallelism.context_parallel_size=1: expected 2 or more, or another parallel size that is, to"),
        (["--steps", "0"], "--steps=0: expected 1 or more"),
        (["--tolerance", "nan"], "--tolerance=nan: expected a number above 0"),
        (["parallelism=cp2", "data.prefix=gone"], "gone"),
        (["parallelism=cp2", "attention.kernel=flash"], "attention.kernel=flash: expected a kernel that can be used"),
    ],
)
def test_a_recipe_that_cannot_be_checked_is_refused(
    words: list[str], message: str, recipe: list[str], capsys: pytest.CaptureFixture[str], folders: list[Path]
) -> None:
    assert cli.main(["check", *recipe, *words]) == 2
    assert message in capsys.readouterr().err and [path.exists() for path in folders] == [False]


def test_under_torchrun_it_is_refused(
    recipe: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert cli.main(["check", *recipe, "parallelism=cp2"]) == 2
    assert "expected a single process" in capsys.readouterr().err
