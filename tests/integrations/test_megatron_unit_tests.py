"""Megatron-LM's own unit tests of attention, with its core attention and with ours, without a GPU.

`MEGATRON_LM=path make test-megatron-lm ARGS=-s` prints the counts that are in docs/switch.md.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
# Their mask tensors hide all tokens.
REFUSED = {"test_gpu_forward", "test_checkpointed_gpu_forward"}


def _outcomes(folder: Path, attention: str, ranks: int, file: str, tests: str) -> dict[str, str]:
    """Return the outcome of each test: that of the worst rank."""
    folder = folder / attention
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "pytest", "-p", "megatron_unit_tests", "-p", "no:cacheprovider", "-k", tests]
    command += [f"tests/unit_tests/transformer/{file}"]
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**os.environ, **hidden, "PYTHONPATH": path, "CORE_ATTENTION": attention, "OUTCOMES": str(folder)}
    run = subprocess.run(command, cwd=os.environ["MEGATRON_LM"], env=environment, capture_output=True, text=True)
    files = sorted(folder.glob("*.json"))
    assert len(files) == ranks, (run.stdout + run.stderr)[-9000:]
    each = [json.loads(file.read_text()) for file in files]
    order = ("passed", "skipped", "failed")
    return {name: max((rank.get(name, "failed") for rank in each), key=order.index) for name in each[0]}


@pytest.mark.parametrize(
    ("ranks", "file", "tests", "refused"),
    [
        (1, "test_attention.py", "TestParallelAttention and not cpu", REFUSED),
        (1, "test_attention_packed_seq.py", "not cpu", set()),
        (4, "test_attention.py", "test_parallel_attention_correctness and False-False-", set()),
    ],
)
def test_what_passes_with_megatrons_attention_passes_with_ours(
    tmp_path: Path, ranks: int, file: str, tests: str, refused: set[str]
) -> None:
    theirs, ours = (_outcomes(tmp_path, name, ranks, file, tests) for name in ("theirs", "ours"))
    passed, our_passed = ({name for name, outcome in each.items() if outcome == "passed"} for each in (theirs, ours))
    neither = len(theirs) - len(passed | our_passed)
    print(f"{file}, {ranks} ranks, {len(theirs)} tests: {len(passed)} {len(our_passed)} {neither}")
    lost = {name.rsplit("::", 1)[1].partition("[")[0] for name in passed - our_passed}
    assert passed | our_passed and lost == refused
