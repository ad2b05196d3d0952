"""Ways of sending are checked and measured in processes of their own, and one that fails does not stop the others."""

import json
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor

from analysis.one_sided import Steps, describe, main


def test_ways_are_measured_and_failures_listed(tmp_path: Path) -> None:
    out = tmp_path / "one_sided.json"
    options = ["--ways=p2p,peer", "--device=cpu", "--sizes-kib=1", "--rounds=1", "--patience=200", f"--out={out}"]
    assert main(options) == 0
    result = json.loads(out.read_text())
    assert {each["way"] for each in result["measurements"]} == {"p2p"}
    assert len(result["measurements"]) == 6  # 1 KiB alone, beside a product, and the product alone; two queues
    assert all(each["seconds"] > 0 for each in result["measurements"])
    assert result["errors"]["peer"].startswith("ValueError: transport=peer: expected GPUs")
    assert "- peer: ValueError" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize("option", ["--ways=p2p,mpi", "--sizes-kib=0", "--rounds=0"])
def test_options_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=option.split("=")[0]):
        main([option])


def test_a_wrong_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone, which gets back either its own bytes or, as it should, those that rank 1 would send."""
    steps, exchanged = object.__new__(Steps), count()
    steps.device = torch.device("cpu")
    peer = torch.Generator().manual_seed(1)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)

    def step(n: int, beside: bool, sent: Tensor | None = None) -> Tensor:
        if next(exchanged) % 5 == 0:
            peer.manual_seed(1)
        received = torch.randint(256, (n,), generator=peer, dtype=torch.uint8)
        return received if wrong is None else received.index_fill(0, torch.tensor([wrong]), int(received[wrong]) ^ 1)

    monkeypatch.setattr(steps, "step", step)
    wrong = None
    steps.check([4, 64])
    wrong = 3
    with pytest.raises(RuntimeError, match="5 of 20 received bytes"):
        steps.check([4])


def test_table_shows_each_cell_once() -> None:
    cells = [{"n": n, "beside": beside, "full": True} for n, beside in ((2**20, False), (0, True))]
    measured = [{"way": "p2p", **cells[1], "seconds": 0.0012, "samples": 3}]
    rows = describe(measured, cells, {"nccl": "no"}).splitlines()
    assert rows[2:] == ["| 1 MiB | - | full | - |", "| 0 MiB | matrix product | full | 1.200 |", "", "- nccl: no"]
