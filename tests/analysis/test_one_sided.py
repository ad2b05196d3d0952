"""Ways of sending are checked and measured in processes of their own, and one that fails does not stop the others."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from analysis.one_sided import Steps, main


def test_ways_are_measured_and_failures_listed(tmp_path: Path) -> None:
    out = tmp_path / "one_sided.json"
    options = ["--ways=p2p,peer", "--device=cpu", "--sizes-kib=1", "--rounds=1", "--patience=200", f"--out={out}"]
    assert main(options) == 0
    result, page = json.loads(out.read_text()), out.with_suffix(".md").read_text()
    assert [each["way"] for each in result["measurements"] if each["seconds"] > 0] == 6 * ["p2p"]
    assert page.count("\n| ") == 8 and "- peer: ValueError: transport=peer: expected GPUs" in page
    with pytest.raises(ValueError, match="--ways"):
        main(["--ways=p2p,mpi"])


@mock.patch("torch.distributed.get_rank", lambda: 0)
def test_a_wrong_byte_is_found() -> None:
    steps = mock.Mock(device=torch.device("cpu"), step=lambda n, beside, sent: sent)  # not what the other would send
    with pytest.raises(RuntimeError, match="bytes are"):
        Steps.check(steps, [64])
