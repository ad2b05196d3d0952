"""Nothing in a checkpoint is run: a pickle planted in any of its files is refused, wherever checkpoints are read."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_longctx.mcore import checkpoint, checkpoint_folder, checkpoint_reader
from megatron_longctx.testing.distributed import run_distributed
from tests.mcore.tiny_gpt import FINGERPRINT, Layout, Trainer

LAYER_STATE = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"
RANDOM_STATE = "rng_state/shard_0_1"
WEIGHT = "decoder.final_layernorm.weight"


class Planted:
    """Unpickling it writes a file."""

    def __init__(self, mark: Path) -> None:
        self.code = f"open({str(mark)!r}, 'w').close()"

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self.code,)


def _archive(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _replace_part(path: Path, name: str, content: bytes) -> None:
    """Give a tensor or object of the checkpoint another content, at the end of its file."""
    metadata = checkpoint_reader.read_metadata(path)
    index = next(index for index in metadata.storage_data if index.fqn == name)
    part = metadata.storage_data[index]
    with (path / part.relative_path).open("ab") as stream:
        part.offset, part.length = stream.tell(), len(content)
        stream.write(content)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _in_layer_state(path: Path, evil: Planted) -> None:
    """As TransformerEngine keeps it: a pickle in a tensor of bytes."""
    state = torch.from_numpy(numpy.frombuffer(pickle.dumps(evil), dtype=numpy.uint8).copy())
    _replace_part(path, LAYER_STATE, _archive([state]))


PLANTS: dict[str, Callable[[Path, Planted], object]] = {
    "metadata": lambda path, evil: (path / ".metadata").write_bytes(pickle.dumps(evil)),
    "common": lambda path, evil: (path / "common.pt").write_bytes(_archive({"extra": evil})),
    "common, a plain pickle": lambda path, evil: (path / "common.pt").write_bytes(pickle.dumps(evil)),
    "backend": lambda path, evil: (path / "metadata.json").write_bytes(pickle.dumps(evil)),
    "digests": lambda path, evil: (path / checkpoint_folder.DIGESTS).write_bytes(pickle.dumps(evil)),
    "tracker": lambda path, evil: (path.parent / checkpoint.TRACKER).write_bytes(pickle.dumps(evil)),
    "object": lambda path, evil: _replace_part(path, RANDOM_STATE, _archive([evil])),
    "object, a plain pickle": lambda path, evil: _replace_part(path, RANDOM_STATE, pickle.dumps(evil)),
    "tensor": lambda path, evil: _replace_part(path, WEIGHT, _archive(evil)),
    "layer's state, an object": lambda path, evil: _replace_part(path, LAYER_STATE, _archive([evil])),
    "layer's state, a tensor": _in_layer_state,
}


def _said(read: Callable[[], object]) -> str | None:
    try:
        read()
    except (Exception, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _refusals(rank: int, root: Path) -> dict[str, list[str | None]]:
    """What three readers say to each plant: before ranks start, with ranks, and with ranks but without any check."""
    trainer = Trainer(Layout())
    state = trainer.state()
    trainer.train(range(1))
    whole = checkpoint.save(root / "whole", 1, state, {})
    assert checkpoint.load(root / "whole", state).iteration == 1
    said = {}
    for name, plant in PLANTS.items():
        directory = root / name
        path = directory / whole.name
        shutil.copytree(root / "whole", directory)
        (path / checkpoint_folder.DIGESTS).unlink()  # whoever plants can write these as well
        plant(path, Planted(root / f"{name} ran"))
        sharded = checkpoint.sharded_state_dict(state, is_loading=True, with_rng=True)
        said[name] = [
            _said(partial(checkpoint.check, directory, FINGERPRINT)),
            _said(partial(checkpoint.load, directory, state)),
            _said(partial(checkpoint_reader.load, sharded, path)),
        ]
    trainer.close()
    return said


def test_the_plant_of_these_tests_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Planted(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def test_no_pickle_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    [said] = run_distributed(_refusals, 1, tmp_path)
    assert list(tmp_path.glob("* ran")) == []
    for name, (before_ranks, with_ranks, unchecked) in said.items():
        assert with_ranks is not None, name
        assert "\n" not in with_ranks and str(tmp_path) in with_ranks, with_ranks
        # Parts of the large files are read by ranks alone.
        assert (before_ranks is None) == name.startswith(("object", "tensor", "layer")), (name, before_ranks)
        # Digests and the tracker are not for Megatron.
        assert (unchecked is None) == (name in ("digests", "tracker")), (name, unchecked)
    assert "builtins.exec has no place in a checkpoint" in (said["metadata"][0] or "")
