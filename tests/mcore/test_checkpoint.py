"""Training curves are the same at every parallel size, and go on unchanged through a checkpoint of any other."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_longctx.mcore import checkpoint
from megatron_longctx.testing.distributed import run_distributed
from tests.mcore.tiny_gpt import BATCH, Layout, Trainer

SINGLE, DATA2, TENSOR2, PIPELINE2 = Layout(), Layout(overlap=True), Layout(tensor=2), Layout(pipeline=2)
STEPS = 7


def _save(trainer: Trainer, directory: Path, iteration: int, **options: Any) -> Path:
    extra = {"consumed_samples": iteration * BATCH}
    return checkpoint.save(directory, iteration, trainer.state(), extra, **options)


def _segment(
    layout: Layout, start: Path | None, steps: range, save_at: int | None = None, to: Path | None = None
) -> list[float]:
    """Load, train, and save in the middle; the losses of ``steps``."""
    trainer = Trainer(layout)
    if start is not None:
        loaded = checkpoint.load(start, trainer.state())
        assert loaded.iteration == steps.start
        assert loaded.extra == {"consumed_samples": steps.start * BATCH}
        assert trainer.scheduler.num_steps == steps.start * BATCH
    losses = []
    for step in steps:
        if step == save_at:
            assert to is not None
            _save(trainer, to, step)
        losses.append(trainer.step(step))
    trainer.close()
    return losses


def _single_reference(rank: int, root: Path) -> list[float]:
    return _segment(SINGLE, None, range(STEPS), 2, root / "single")


def _two_ranks(rank: int, root: Path) -> dict[str, list[float]]:
    return {
        "single to DP2": _segment(DATA2, root / "single", range(2, STEPS), 3, root / "data"),
        "DP2 to TP2": _segment(TENSOR2, root / "data", range(3, STEPS), 4, root / "tensor"),
        "single to PP2": _segment(PIPELINE2, root / "single", range(2, STEPS), 4, root / "pipeline"),
        "TP2 to PP2": _segment(PIPELINE2, root / "tensor", range(4, STEPS)),
    }


def _single_again(rank: int, root: Path) -> dict[str, list[float]]:
    return {
        "TP2 to single": _segment(SINGLE, root / "tensor", range(4, STEPS)),
        "PP2 to single": _segment(SINGLE, root / "pipeline", range(4, STEPS)),
        "single to single": _segment(SINGLE, root / "single", range(2, STEPS)),
    }


def test_curves_and_resharding(tmp_path: Path) -> None:
    [reference] = run_distributed(_single_reference, 1, tmp_path)
    assert reference[-1] < reference[0] - 0.1, "the model must learn, or equal losses say little"
    first, second = run_distributed(_two_ranks, 2, tmp_path)
    assert first == second
    [again] = run_distributed(_single_again, 1, tmp_path)
    for name, losses in (first | again).items():
        expected = reference[STEPS - len(losses) :]
        assert len(losses) >= 3
        assert losses == pytest.approx(expected, abs=1e-5), name
    # The same layout resumes bit for bit.
    assert again["single to single"] == reference[2:]


def _resume_exactly(rank: int, root: Path, layouts: list[Layout]) -> list[tuple[list[float], list[float]]]:
    curves = []
    for index, layout in enumerate(layouts):
        trainer = Trainer(layout)
        directory = root / str(index)
        if index == 0:
            # Before the first step there are no moments and no step count.
            _save(trainer, directory / "zero", 0)
        trainer.train(range(2))
        _save(trainer, directory, 2)
        expected = trainer.train(range(2, 5))
        if index == 0:
            # A used optimizer and schedule take the checkpoint's place, too.
            checkpoint.load(directory / "zero", trainer.state())
            trainer.train(range(2))
            assert trainer.train(range(2, 5)) == expected
        trainer.close()
        trainer = Trainer(layout)
        restored = checkpoint.load(directory, trainer.state())
        assert restored.rng_restored
        curves.append((expected, trainer.train(range(2, 5))))
        trainer.close()
    return curves


def test_resume_is_exact_with_every_optimizer(tmp_path: Path) -> None:
    layouts = [
        Layout(distributed=False),
        Layout(distributed=False, bf16=True),
        Layout(distributed=True, bf16=True),
    ]
    for curves in run_distributed(_resume_exactly, 2, tmp_path, layouts):
        for expected, losses in curves:
            assert losses == expected


def _message(work: Any) -> str:
    with pytest.raises(ValueError) as caught:
        work()
    return str(caught.value)


def _failures(rank: int, root: Path) -> dict[str, str]:
    trainer = Trainer(SINGLE)
    state = trainer.state()
    trainer.train(range(1))
    messages = {"empty": _message(lambda: checkpoint.load(root, state))}

    started = time.monotonic()
    for iteration in (1, 2, 3):
        _save(trainer, root, iteration, keep=2)
    seconds = (time.monotonic() - started) / 3
    assert seconds < 3, f"a tiny save took {seconds:.1f} s"
    if rank == 0:
        assert sorted(path.name for path in root.iterdir()) == ["iter_0000002", "iter_0000003", checkpoint.TRACKER]
        # An interrupted save: files without the tracker.
        shutil.copytree(root / "iter_0000003", root / "iter_0000004")
        (root / "iter_0000005.partial").mkdir()
    dist.barrier()
    assert checkpoint.latest(root) == 3
    assert checkpoint.load(root, state).iteration == 3
    assert checkpoint.load(root, state, iteration=2).iteration == 2

    messages["missing"] = _message(lambda: checkpoint.load(root, state, iteration=9))
    messages["model"] = _message(lambda: checkpoint.load(root, trainer.state(hidden_size=48, experts=8)))
    plain = checkpoint.TrainingState(trainer.models, None, None, state.fingerprint)
    assert checkpoint.load(root, plain).iteration == 3
    messages["extra"] = _message(lambda: checkpoint.save(root, 6, state, {"path": Path("x")}))
    messages["keep"] = _message(lambda: checkpoint.save(root, 6, state, {}, keep=0))
    for name, pattern in (("cut", "*.distcp"), ("common", "common.pt"), ("metadata", ".metadata")):
        if rank == 0:
            file = max((root / "iter_0000003").glob(pattern), key=lambda path: path.stat().st_size)
            whole = file.read_bytes()
            file.write_bytes(whole[: len(whole) // 2])
        dist.barrier()
        messages[name] = _message(lambda: checkpoint.load(root, state))
        dist.barrier()
        if rank == 0:
            file.write_bytes(whole)
    trainer.close()

    unsharded = Trainer(Layout(distributed=False))
    messages["optimizer"] = _message(lambda: checkpoint.load(root, unsharded.state()))
    unsharded.close()
    return messages


def test_failures_are_explained_on_every_rank(tmp_path: Path) -> None:
    first, second = run_distributed(_failures, 2, tmp_path)
    assert first == second
    assert "latest_checkpointed_iteration.txt" in first["empty"]
    assert "iter_0000009 does not exist" in first["missing"]
    assert "hidden_size: checkpoint 32, model 48" in first["model"]
    assert "experts: checkpoint '(absent)', model 8" in first["model"]
    assert "num_layers" not in first["model"]
    assert "expected JSON values" in first["extra"]
    assert "keep is 0" in first["keep"]
    assert "bytes, expected" in first["cut"]
    assert "is damaged" in first["common"]
    assert "is damaged" in first["metadata"]
    assert "kind 'distributed', expected 'fp32'" in first["optimizer"]


def test_latest_without_ranks(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    (tmp_path / checkpoint.TRACKER).write_text("120\n")
    assert checkpoint.latest(tmp_path) == 120
    (tmp_path / checkpoint.TRACKER).write_text("release")
    with pytest.raises(ValueError, match="'release', expected an iteration number"):
        checkpoint.latest(tmp_path)
