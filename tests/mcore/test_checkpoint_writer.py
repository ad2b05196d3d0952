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
from megatron_longctx.mcore.checkpoint import Kept, Saving
from megatron_longctx.training.saver import Saver

LARGE = writer._SMALL // 4 + 1  # fp32 elements


def test_tensors_may_change_once_they_are_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones at once: what a forward pass changes is no larger."""
    go, written, on_host = threading.Event(), {}, writer._on_host

    def copy_late(tensor: torch.Tensor) -> torch.Tensor:
        assert go.wait(600)
        return on_host(tensor)

    def write(bucket: Any) -> None:
        written.update(bucket[2][1])

    monkeypatch.setattr(writer, "_on_host", copy_late)
    monkeypatch.setattr(writer, "_write_file", write)
    monkeypatch.setattr(writer.checkpoint_digests, "of_files", lambda *_: {})
    tensors = {"small": torch.zeros(LARGE - 1), "large": torch.zeros(LARGE)}
    bucket = tmp_path, "file", ([], list(tensors.items()))
    request: Any = SimpleNamespace(
        async_fn=object(), async_fn_args=(None, [bucket], queue.SimpleQueue()), finalize_fns=()
    )
    writing = writer.Writing(request, tmp_path, copied=True)
    saver = Saver(tmp_path, TrainConfig(), 0)
    saver._saving = Saving(tmp_path, tmp_path, writing, Kept())
    tensors["small"] += 1
    staged = threading.Event()
    waiting = threading.Thread(target=lambda: (saver.wait_staged(), staged.set()))
    waiting.start()
    assert not staged.wait(0.2), "training goes on only when all is copied"
    go.set()
    waiting.join(600)
    tensors["large"] += 1
    writing.finish()
    assert {name: x.sum().item() for name, x in written.items()} == {"small": 0, "large": 0}
    assert saver.stall_s >= 0.2
