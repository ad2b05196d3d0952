"""Checkpoints restore every optimizer bit for bit, and what is wrong with one is said on every rank.

`tests/training/test_resume.py` resumes at other parallel sizes.
"""

import math
import queue
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.optimizer import DistributedOptimizer

from megatron_longctx.config import TrainConfig
from megatron_longctx.mcore import checkpoint, checkpoint_folder, checkpoint_optimizer
from megatron_longctx.mcore import checkpoint_writer as writer
from megatron_longctx.mcore import optimizer as optim
from megatron_longctx.mcore.checkpoint_optimizer import boxes
from megatron_longctx.mcore.checkpoint_writer import HostCopies, PendingSave, copy_through
from megatron_longctx.testing.distributed import PATIENCE_S, run_distributed
from megatron_longctx.training.monitoring import Saver
from tests.mcore.tiny_gpt import BATCH, Layout, Trainer

SINGLE = Layout()


def _save(trainer: Trainer, directory: Path, iteration: int, last: int | None = None) -> Path:
    extra = {"consumed_samples": iteration * BATCH}
    return checkpoint.begin(directory, iteration, trainer.state(), extra, checkpoint.Retention(last)).finish()


def _resume_exactly(rank: int, root: Path, layouts: list[Layout]) -> list[tuple[list[float], list[float]]]:
    curves = []
    for index, layout in enumerate(layouts):
        trainer = Trainer(layout)
        directory = root / str(index)
        if index == 0:
            # Before the first step there are no moments and no step count.
            _save(trainer, directory / "zero", 0)
        trainer.train(range(2))
        saving = checkpoint.begin(directory, 2, trainer.state(), {"consumed_samples": 2 * BATCH}, copies=HostCopies())
        saving.wait_staged()
        if layout.distributed:
            _save_as_megatron(trainer, directory.with_name("megatron"))
        expected = trainer.train(range(2, 5))
        assert checkpoint.latest(directory) is None
        saving.finish()
        if index == 0:
            # A checkpoint also replaces the state of an optimizer and schedule that have stepped.
            checkpoint.load(directory / "zero", trainer.state())
            trainer.train(range(2))
            assert trainer.train(range(2, 5)) == expected
        trainer.close()
        trainer = Trainer(layout)
        restored = checkpoint.load(directory, trainer.state())
        assert restored.rng_restored
        curves.append((expected, trainer.train(range(2, 5))))
        if layout.distributed:
            checkpoint.load(directory.with_name("megatron"), trainer.state())
            curves.append((expected, trainer.train(range(2, 5))))
        trainer.close()
    return curves


def _save_as_megatron(trainer: Trainer, directory: Path) -> None:
    """Save the optimizer's state as Megatron gathers it, and as earlier versions did."""
    with pytest.MonkeyPatch.context() as patch:
        gathered = DistributedOptimizer.sharded_param_state_fully_reshardable
        patch.setattr(checkpoint_optimizer, "state_shards", gathered)
        _save(trainer, directory, 2)


def test_resume_is_exact_with_every_optimizer(tmp_path: Path) -> None:
    layouts = [Layout(distributed=False), Layout(distributed=False, bf16=True), Layout(distributed=True, bf16=True)]
    for curves in run_distributed(_resume_exactly, 2, tmp_path, layouts):
        for expected, losses in curves:
            assert losses == expected


def _exchange_layers(rank: int, root: Path) -> list[list[float]]:
    """Losses after a norm with a state, as TransformerEngine has, loads a checkpoint of one without, and back."""
    losses = []
    for name, saved_with, loaded_with in (("local", False, True), ("stateful", True, False)):
        for stateful in (saved_with, loaded_with):
            trainer = Trainer(SINGLE)
            norm = trainer.models[0].module.decoder.final_layernorm
            state = {"get_extra_state": lambda _: torch.zeros(3), "set_extra_state": lambda _, each: None}
            norm.__class__ = type("Norm", (type(norm),), state if stateful else {})
            if stateful == saved_with:
                trainer.train(range(2))
                _save(trainer, root / name, 2)
            else:
                checkpoint.load(root / name, trainer.state())
            losses.append(trainer.train(range(2, 4)))
            trainer.close()
    return losses


def test_layers_may_have_more_or_less_state_than_those_that_were_saved(tmp_path: Path) -> None:
    (losses,) = run_distributed(_exchange_layers, 1, tmp_path)
    assert losses[0] == losses[1] and losses[2] == losses[3]


def _message(work: Any) -> str:
    with pytest.raises(ValueError) as caught:
        work()
    return str(caught.value)


def _failures(rank: int, root: Path) -> dict[str, str]:
    trainer = Trainer(SINGLE)
    state = trainer.state()
    trainer.train(range(1))
    messages = {"empty": _message(lambda: checkpoint.load(root, state))}

    for iteration in (1, 2, 3):
        _save(trainer, root, iteration, last=2)
    if rank == 0:
        assert sorted(path.name for path in root.iterdir()) == ["iter_0000002", "iter_0000003", checkpoint.TRACKER]
        # Interrupted saves leave files that the tracker does not name.
        shutil.copytree(root / "iter_0000003", root / "iter_0000004")
        (root / "iter_0000005.partial").mkdir()
    dist.barrier()
    assert checkpoint.latest(root) == 3
    assert checkpoint.load(root, state).iteration == 3
    assert checkpoint.load(root, state, iteration=2).iteration == 2

    # The run's own settings stay in force; only the position comes from the checkpoint.
    for group in trainer.optimizer.param_groups:
        group.update(max_lr=5e-3, betas=(0.8, 0.9))
    checkpoint.load(root, state)
    for group in trainer.optimizer.param_groups:
        assert (group["max_lr"], group["betas"]) == (5e-3, (0.8, 0.9))
    # One optimizer step is the whole warm-up.
    assert optim.learning_rate(trainer.optimizer) == pytest.approx(5e-3)

    messages["missing"] = _message(lambda: checkpoint.load(root, state, iteration=9))
    messages["model"] = _message(lambda: checkpoint.load(root, trainer.state(hidden_size=48, experts=8)))
    plain = checkpoint.TrainingState(trainer.models, None, None, state.fingerprint)
    assert checkpoint.load(root, plain).iteration == 3
    if rank == 0:
        (root / "iter_0000003" / checkpoint_folder.DIGESTS).unlink()  # as earlier versions saved
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
    assert "bytes, expected" in first["cut"]
    assert "is damaged" in first["common"]
    assert "is damaged" in first["metadata"]
    assert "kind 'distributed', expected 'fp32'" in first["optimizer"]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_cover_a_range_of_values_in_order(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    values = numpy.arange(count).reshape(shape)
    covered = list(boxes(tuple(shape), begin, end))
    slices = [tuple(map(slice, offsets, numpy.add(offsets, sizes))) for offsets, sizes in covered]
    assert [value for where in slices for value in values[where].ravel()] == [*range(begin, end)]
    assert len(covered) <= 2 * len(shape)


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (0,)])
def test_copies_in_pieces_are_whole(shape: tuple[int, ...]) -> None:
    source, target = torch.randn(shape), torch.zeros(shape)
    copy_through(source, target, torch.empty(4), lambda: None)
    assert torch.equal(source, target)


def test_which_checkpoints_are_kept() -> None:
    assert checkpoint.Retention().expired([1, 2, 3]) == []
    assert checkpoint.Retention(last=2).expired([1, 2, 3, 4]) == [1, 2]
    assert checkpoint.Retention(last=1, every=4).expired([2, 4, 6, 8, 10]) == [2, 6]
    assert checkpoint.Retention(every=4).expired([2, 4, 6]) == []


def test_latest_without_ranks(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    (tmp_path / checkpoint.TRACKER).write_text("120\n")
    assert checkpoint.latest(tmp_path) == 120


LARGE = writer._SMALL_BYTES // 4 + 1  # fp32 elements


def test_tensors_may_change_when_they_are_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors may change immediately: a forward pass changes no larger ones."""
    go, written = threading.Event(), {}

    class LateCopies(HostCopies):
        def copy(self, tensor: torch.Tensor) -> torch.Tensor:
            assert go.wait(PATIENCE_S)
            return super().copy(tensor)

    def write(bucket: Any) -> None:
        written.update(bucket[2][1])

    monkeypatch.setattr(writer, "_write_file", write)
    monkeypatch.setattr(writer.checkpoint_folder, "digests_of", lambda *_: {})
    tensors = {"small": torch.zeros(LARGE - 1), "large": torch.zeros(LARGE)}
    bucket = tmp_path, "file", ([], list(tensors.items()))
    request: Any = SimpleNamespace(
        async_fn=object(), async_fn_args=(None, [bucket], queue.SimpleQueue()), finalize_fns=()
    )
    saver = Saver(tmp_path, TrainConfig(), 0)
    saver._saving = PendingSave(request, tmp_path, tmp_path, checkpoint.Retention(), LateCopies())
    tensors["small"] += 1
    staged = threading.Event()
    waiting = threading.Thread(target=lambda: (saver.wait_staged(), staged.set()))
    waiting.start()
    assert not staged.wait(0.2), "training continues only when everything is copied"
    go.set()
    waiting.join(PATIENCE_S)
    tensors["large"] += 1
    saver._saving._thread.join()
    assert {name: x.sum().item() for name, x in written.items()} == {"small": 0, "large": 0}
    assert saver.stall_s >= 0.2


def test_later_copies_reuse_the_memory_of_the_first() -> None:
    copies, states = HostCopies(), [torch.arange(6.0).view(2, 3), torch.ones(2, 3), torch.tensor(7), torch.empty(0)]
    addresses = []
    for _ in range(3):
        copied = [copies.copy(state) for state in states]
        addresses.append({copy.data_ptr() for copy in copied})
        for state, copy in zip(states, copied, strict=True):
            assert torch.equal(state, copy) and state.dtype == copy.dtype
            state += 1
            assert state.numel() == 0 or not torch.equal(state, copy)
        copies.release()
    assert len(addresses[0]) == 4 and addresses[1:] == addresses[:1] * 2
