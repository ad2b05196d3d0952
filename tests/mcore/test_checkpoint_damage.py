"""Changed bytes in any file of a checkpoint are found before it is loaded, and one that is whole is named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_longctx.mcore import checkpoint, checkpoint_folder
from megatron_longctx.mcore.checkpoint_folder import iteration_directory
from megatron_longctx.testing.distributed import run_distributed
from tests.mcore.tiny_gpt import FINGERPRINT, Layout, Trainer

Said = dict[str, tuple[str, str]]


def _said(read: Callable[[], object]) -> str:
    try:
        read()
    except ValueError as error:
        return str(error)
    return ""


def _inverted(path: Path, at: int, count: int = 64) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + count] = bytes(byte ^ 0xFF for byte in content[at : at + count])
    path.write_bytes(content)


def _refusals(rank: int, root: Path) -> tuple[Said, Said, list[str]]:
    """For each file damaged, what `check` and `load` say; the same with an older one damaged too; warnings of load."""
    trainer = Trainer(Layout())
    state = trainer.state()
    trainer.train(range(1))
    for iteration in (1, 2, 3):
        checkpoint.save(root, iteration, state, {})
    assert checkpoint.load(root, state).iteration == 3
    latest = iteration_directory(root, 3)

    def damaged(victims: dict[str, tuple[Path, int]]) -> Said:
        said = {}
        for name, (path, at) in victims.items():
            dist.barrier()
            if rank == 0:
                whole = path.read_bytes()
                _inverted(path, at)
            dist.barrier()
            said[name] = (
                _said(partial(checkpoint.check, root, FINGERPRINT)),
                _said(partial(checkpoint.load, root, state)),
            )
            dist.barrier()
            if rank == 0:
                path.write_bytes(whole)
        dist.barrier()
        return said

    names = sorted(path.name for path in latest.iterdir())
    victims = {name: (latest / name, (latest / name).stat().st_size // 2) for name in names}
    victims["first byte"] = (latest / "__0_0.distcp", 0)
    victims["last byte"] = (latest / "__1_0.distcp", (latest / "__1_0.distcp").stat().st_size - 1)
    found = damaged(victims)
    if rank == 0:
        _inverted(iteration_directory(root, 2) / "__1_1.distcp", 500)
    found_both = damaged({"__0_1.distcp": victims["__0_1.distcp"]})

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_longctx").addHandler(handler)
    if rank == 0:
        (latest / checkpoint_folder.DIGESTS).unlink()
    dist.barrier()
    assert checkpoint.load(root, state).iteration == 3
    trainer.close()
    return found, found_both, warnings


def test_damage_is_found_and_what_is_whole_is_named(tmp_path: Path) -> None:
    first, second = run_distributed(_refusals, 2, tmp_path)
    assert first[:2] == second[:2], "ranks disagree"
    found, found_both, warnings = first
    assert len(found) >= 9
    for name, (before_ranks, with_ranks) in found.items():
        large = name.endswith((".distcp", "byte"))
        file = {"first byte": "__0_0.distcp", "last byte": "__1_0.distcp"}.get(name, name)
        for said in (with_ranks,) if large else (before_ranks, with_ranks):
            assert said.startswith(f"{tmp_path}/iter_0000003/{file} is damaged"), (name, said)
            assert said.endswith(
                f"The newest checkpoint before it that is whole is {tmp_path}/iter_0000002: to use it, write 2 into "
                f"{tmp_path}/latest_checkpointed_iteration.txt"
            )
        # The large files are left to the ranks, which read them anyway.
        assert large == (before_ranks == ""), name
    assert "whole is " + str(tmp_path / "iter_0000001") in found_both["__0_1.distcp"][1]
    assert warnings == [f"{tmp_path}/iter_0000003 was saved without digests: damage to it may go unnoticed"]
    assert second[2] == []


def test_a_tracker_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "iter_0000012").mkdir()
    for content in (b"", bytes([0xCE]), "²".encode()):
        (tmp_path / checkpoint.TRACKER).write_bytes(content)
        with pytest.raises(ValueError, match=r"expected an iteration number: .* \(there: 12\)"):
            checkpoint.check(tmp_path, FINGERPRINT)
