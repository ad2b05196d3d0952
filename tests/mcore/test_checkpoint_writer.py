"""What is written beside training is what was there when it was begun."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_longctx.config import TrainConfig
from megatron_longctx.mcore import checkpoint_writer as writer
from megatron_longctx.mcore.checkpoint_folder import Kept
from megatron_longctx.mcore.checkpoint_writer import HostCopies, Saving
from megatron_longctx.training.saver import Saver

LARGE = writer._SMALL_BYTES // 4 + 1  # fp32 elements


def test_tensors_may_change_once_they_are_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones at once: what a forward pass changes is no larger."""
    go, written = threading.Event(), {}

    class CopiesLate(HostCopies):
        def copy(self, tensor: torch.Tensor) -> torch.Tensor:
            assert go.wait(600)
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
    saver._saving = Saving(request, tmp_path, tmp_path, Kept(), CopiesLate())
    tensors["small"] += 1
    staged = threading.Event()
    waiting = threading.Thread(target=lambda: (saver.wait_staged(), staged.set()))
    waiting.start()
    assert not staged.wait(0.2), "training goes on only when all is copied"
    go.set()
    waiting.join(600)
    tensors["large"] += 1
    saver._saving._thread.join()
    assert {name: x.sum().item() for name, x in written.items()} == {"small": 0, "large": 0}
    assert saver.stall_s >= 0.2


def test_later_copies_are_in_the_memory_of_the_first() -> None:
    copies, states = HostCopies(), [torch.arange(6.0).view(2, 3), torch.ones(2, 3), torch.tensor(7), torch.empty(0)]
    for step in range(3):
        found = [copies.copy(state) for state in states]
        for state, copy in zip(states, found, strict=True):
            assert torch.equal(state, copy) and state.dtype == copy.dtype
            state += 1
            assert state.numel() == 0 or not torch.equal(state, copy)
        copies.release()
        assert copies.num_bytes == 2 * 24 + 8, step
