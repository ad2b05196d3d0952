"""A short demo: both runs, their table and their picture."""

import json
import re
from pathlib import Path

import pytest

from megatron_longctx.config import names
from megatron_longctx.training.compose import compose_config, load_config
from tests.shared.jobs import CLI, Job, finished, latest_checkpoint, steps_recorded

RUNS = {"demo-cp4": 4, "demo-cp1": 1}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, Job]:
    """A demo of 6 steps with a small text and model, in a folder with a file of an earlier demo."""
    place = tmp_path_factory.mktemp("demo")
    (place / "data").symlink_to(corpus)
    (place / "runs/demo-cp1").mkdir(parents=True)
    (place / "runs/demo-cp1/metrics.jsonl").write_text("of an earlier demo\n")
    short = ("data.prefix=data/tiny", "data.seq_length=128", "train.steps=6", "optim.warmup_steps=1")
    small = ("model.num_layers=2", "model.hidden_size=64", "logging.wandb=disabled")
    return place, finished(place, [*CLI, "demo", *short, *small], quick=True)


def records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_it_succeeds_and_writes_two_complete_runs_and_the_picture(demo: tuple[Path, Job]) -> None:
    place, job = demo
    assert job.process.returncode == 0, job.output()
    assert job.err.read_text() == ""
    assert job.left_over() == []
    for name, ranks in RUNS.items():
        run = place / "runs" / name
        config = load_config(run / "resolved.yaml")
        assert (config.run.name, config.parallelism.context_parallel_size) == (name, ranks)
        assert steps_recorded(run) == [1, 2, 3, 4, 5, 6] and latest_checkpoint(run) == 6
        assert (run / "checkpoints/iter_0000006").is_dir()
    picture = (place / "runs/demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
    files = sorted(path.name for path in (place / "runs").iterdir())
    assert files == ["demo-cp1", "demo-cp4", "demo.png"]


def test_the_losses_fall_and_agree(demo: tuple[Path, Job]) -> None:
    place, _ = demo
    one, four = (records(place / "runs" / name) for name in ("demo-cp1", "demo-cp4"))
    for a, b in zip(one, four, strict=True):
        assert b[names.LOSS] == pytest.approx(a[names.LOSS], rel=1e-5)
        assert b[names.GRAD_NORM] == pytest.approx(a[names.GRAD_NORM], rel=1e-4)
    assert one[-1][names.LOSS] < one[0][names.LOSS] - 0.1


def test_it_prints_one_table_with_the_losses_of_both(demo: tuple[Path, Job]) -> None:
    place, job = demo
    out = job.out.read_text()
    assert out.count("loss demo-cp1 | loss demo-cp4 | difference") == 1
    one, four = (records(place / "runs" / name) for name in ("demo-cp1", "demo-cp4"))
    for a, b in zip(one, four, strict=True):
        row = rf"^ *{a[names.STEP]} \| +{a[names.LOSS]:.6f} \| +{b[names.LOSS]:.6f} \| +[+-]\d\.\d\de[+-]\d\d$"
        assert re.search(row, out, re.MULTILINE), out
    assert out.count("picture: runs/demo.png\n") == 1
    assert re.search(r"\nthe demo took \d+ s\n$", out)
    assert "removing runs/demo-cp1 of an earlier demo" in out


def test_without_settings_it_is_the_documented_demo() -> None:
    config = compose_config(["experiment=demo"])
    assert config.data.seq_length >= 4096 and config.parallelism.context_parallel_size == 4
    assert config.model.num_kv_heads < config.model.num_attention_heads and not config.model.bias
    model = config.model
    assert (model.normalization, model.activation, model.position_embedding) == ("rmsnorm", "swiglu", "rope")
