"""Bytes that were changed are found before a checkpoint is loaded, and no pickle in a checkpoint is run."""

import io
import logging
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_longctx.mcore import checkpoint, checkpoint_reader
from megatron_longctx.mcore.checkpoint_folder import DIGESTS, TRACKER, iteration_directory
from megatron_longctx.testing.distributed import run_distributed
from tests.mcore.tiny_gpt import FINGERPRINT, Layout, Trainer

LAYER_STATE = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"
RANDOM_STATE = "rng_state/shard_0_1"
WEIGHT = "decoder.final_layernorm.weight"


def _error(read: Callable[[], object]) -> str | None:
    try:
        read()
    except (Exception, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _errors(directory: Path, state: checkpoint.TrainingState) -> tuple[str | None, str | None]:
    """The errors of `check`, before ranks start, and of `load`, with ranks."""
    checked = _error(partial(checkpoint.check, directory, FINGERPRINT))
    return checked, _error(partial(checkpoint.load, directory, state))


def _invert(path: Path, at: int, count: int = 64) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + count] = bytes(byte ^ 0xFF for byte in content[at : at + count])
    path.write_bytes(content)


Errors = dict[str, tuple[str | None, str | None]]


def _damage(rank: int, root: Path) -> tuple[Errors, Errors, list[str]]:
    """The errors for each damaged file; the same if an older checkpoint is damaged too; and the warnings of load."""
    trainer = Trainer(Layout())
    state = trainer.state()
    trainer.train(range(1))
    for iteration in (1, 2, 3):
        checkpoint.begin(root, iteration, state, {}).finish()
    assert checkpoint.load(root, state).iteration == 3
    latest = iteration_directory(root, 3)

    def damaged(victims: dict[str, tuple[Path, int]]) -> Errors:
        errors = {}
        for name, (path, at) in victims.items():
            dist.barrier()
            if rank == 0:
                whole = path.read_bytes()
                _invert(path, at)
            dist.barrier()
            errors[name] = _errors(root, state)
            dist.barrier()
            if rank == 0:
                path.write_bytes(whole)
        dist.barrier()
        return errors

    victims = {path.name: (path, path.stat().st_size // 2) for path in sorted(latest.iterdir())}
    victims["first byte"] = (latest / "__0_0.distcp", 0)
    victims["last byte"] = (latest / "__1_0.distcp", (latest / "__1_0.distcp").stat().st_size - 1)
    errors = damaged(victims)
    if rank == 0:
        _invert(iteration_directory(root, 2) / "__1_1.distcp", 500)
    errors_of_two = damaged({"__0_1.distcp": victims["__0_1.distcp"]})

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_longctx").addHandler(handler)
    if rank == 0:
        (latest / DIGESTS).unlink()
    dist.barrier()
    assert checkpoint.load(root, state).iteration == 3
    trainer.close()
    return errors, errors_of_two, warnings


def test_damage_is_found_and_a_whole_checkpoint_is_named(tmp_path: Path) -> None:
    first, second = run_distributed(_damage, 2, tmp_path)
    assert first[:2] == second[:2], "ranks disagree"
    errors, errors_of_two, warnings = first
    assert len(errors) >= 9
    for name, (checked, loaded) in errors.items():
        large = name.endswith((".distcp", "byte"))
        file = {"first byte": "__0_0.distcp", "last byte": "__1_0.distcp"}.get(name, name)
        for error in (loaded,) if large else (checked, loaded):
            assert error is not None and f": {tmp_path}/iter_0000003/{file} is damaged" in error, (name, error)
            assert error.endswith(
                f"The newest checkpoint before it that is whole is {tmp_path}/iter_0000002: to use it, write 2 into "
                f"{tmp_path}/latest_checkpointed_iteration.txt"
            )
        # Only ranks compare the large files.
        assert large == (checked is None), name
    assert f"whole is {tmp_path / 'iter_0000001'}" in (errors_of_two["__0_1.distcp"][1] or "")
    assert warnings == [f"{tmp_path}/iter_0000003 was saved without digests: damage to it may go unnoticed"]
    assert second[2] == []


def test_a_damaged_tracker_is_refused(tmp_path: Path) -> None:
    (tmp_path / "iter_0000012").mkdir()
    for content in (b"", bytes([0xCE]), "²".encode(), b"release"):
        (tmp_path / TRACKER).write_bytes(content)
        with pytest.raises(ValueError, match=r"holds '.*', expected an iteration number: .* \(there: 12\)"):
            checkpoint.check(tmp_path, FINGERPRINT)


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
    """Replace the content of a tensor or object of the checkpoint, at the end of its file."""
    metadata = checkpoint_reader.read_metadata(path)
    part = next(part for index, part in metadata.storage_data.items() if index.fqn == name)
    with (path / part.relative_path).open("ab") as stream:
        part.offset, part.length = stream.tell(), len(content)
        stream.write(content)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _in_layer_state(path: Path, evil: Planted) -> None:
    """Plant a pickle in a tensor of bytes, the form of TransformerEngine's state."""
    state = torch.from_numpy(numpy.frombuffer(pickle.dumps(evil), dtype=numpy.uint8).copy())
    _replace_part(path, LAYER_STATE, _archive([state]))


PLANTS: dict[str, Callable[[Path, Planted], object]] = {
    "metadata": lambda path, evil: (path / ".metadata").write_bytes(pickle.dumps(evil)),
    "common": lambda path, evil: (path / "common.pt").write_bytes(_archive({"extra": evil})),
    "common, a plain pickle": lambda path, evil: (path / "common.pt").write_bytes(pickle.dumps(evil)),
    "backend": lambda path, evil: (path / "metadata.json").write_bytes(pickle.dumps(evil)),
    "digests": lambda path, evil: (path / DIGESTS).write_bytes(pickle.dumps(evil)),
    "tracker": lambda path, evil: (path.parent / TRACKER).write_bytes(pickle.dumps(evil)),
    "object": lambda path, evil: _replace_part(path, RANDOM_STATE, _archive([evil])),
    "object, a plain pickle": lambda path, evil: _replace_part(path, RANDOM_STATE, pickle.dumps(evil)),
    "tensor": lambda path, evil: _replace_part(path, WEIGHT, _archive(evil)),
    "layer's state, an object": lambda path, evil: _replace_part(path, LAYER_STATE, _archive([evil])),
    "layer's state, a tensor": _in_layer_state,
}


def _compressed(value: Any) -> bytes:
    """A value as `torch.save` writes it, but the archive is compressed."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(_archive(value))) as plain,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as out,
    ):
        for each in plain.infolist():
            out.writestr(each.filename, plain.read(each))
    return stream.getvalue()


def _add_bomb(path: Path) -> None:
    common = checkpoint_reader.read_common(path)
    (path / "common.pt").write_bytes(_compressed(common | {"zeros": torch.zeros(2**22)}))


def _replace_by_pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


DEEP = b"\x80\x04})" + b"\x85" * 3_000_000 + b"Ns."  # a dictionary whose key is a tuple in a tuple in …
# Files that would end the process, take its memory or make it wait, before a rank starts.
HOSTILE: dict[str, Callable[[Path], object]] = {
    "deep metadata": lambda path: (path / ".metadata").write_bytes(DEEP),
    "metadata with a large index": lambda path: (path / ".metadata").write_bytes(b"\x80\x04Nr\xff\xff\xff\x7f."),
    "common, a bomb": _add_bomb,
    "metadata, a pipe": lambda path: _replace_by_pipe(path / ".metadata"),
    "digests, a pipe": lambda path: _replace_by_pipe(path / DIGESTS),
    "tracker, a pipe": lambda path: _replace_by_pipe(path.parent / TRACKER),
}


def _deep_common(path: Path, evil: Planted) -> None:
    with zipfile.ZipFile(path / "common.pt", "w") as archive:
        archive.writestr("archive/data.pkl", DEEP)
        archive.writestr("archive/version", b"3\n")


PLANTS |= {
    "common, deep": _deep_common,
    "object, a bomb": lambda path, evil: _replace_part(path, RANDOM_STATE, _compressed([torch.zeros(2**22)])),
    "tensor, a bomb": lambda path, evil: _replace_part(path, WEIGHT, _compressed(torch.zeros(16))),
}


def _plant(rank: int, root: Path) -> dict[str, tuple[str | None, str | None, str | None]]:
    """The errors for each plant: of `check`, of `load`, and of a load without the checks before it."""
    trainer = Trainer(Layout())
    state = trainer.state()
    trainer.train(range(1))
    whole = checkpoint.begin(root / "whole", 1, state, {}).finish()
    assert checkpoint.load(root / "whole", state).iteration == 1
    errors = {}
    for name, plant in PLANTS.items():
        directory = shutil.copytree(root / "whole", root / name)
        path = directory / whole.name
        (path / DIGESTS).unlink()  # an attacker can write these as well
        plant(path, Planted(root / f"{name} ran"))
        sharded = checkpoint.sharded_state_dict(state, is_loading=True, with_rng=True)
        errors[name] = (*_errors(directory, state), _error(partial(checkpoint_reader.load, sharded, path)))
    for name, spoil in HOSTILE.items():
        directory = shutil.copytree(root / "whole", root / name)
        (directory / whole.name / DIGESTS).unlink()
        spoil(directory / whole.name)
        errors[name] = (*_errors(directory, state), "not tried")
    trainer.close()
    return errors


def test_no_pickle_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Planted(tmp_path / "ran")))
    assert (tmp_path / "ran").exists(), "the plant itself works"
    [errors] = run_distributed(_plant, 1, tmp_path)
    assert list(tmp_path.glob("* ran")) == []
    for name, (checked, loaded, unchecked) in errors.items():
        assert loaded is not None, name
        assert "\n" not in loaded and str(tmp_path) in loaded, loaded
        # Only ranks read parts of the large files.
        assert (checked is None) == name.startswith(("object", "tensor", "layer")), (name, checked)
        # Megatron does not read digests and the tracker.
        assert (unchecked is None) == (name in ("digests", "tracker")), (name, unchecked)
    assert "builtins.exec has no place in a checkpoint" in (errors["metadata"][0] or "")
