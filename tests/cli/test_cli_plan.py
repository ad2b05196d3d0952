"""`megatron-longctx plan`: its exact output, and its drawings."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from megatron_longctx.cli import cli
from megatron_longctx.cli import plan as plan_verb
from megatron_longctx.config import Config
from megatron_longctx.training.compose import override_config
from tests.shared.training import tiny_corpus

# Keys and values of 2 heads of 32 elements in bf16: 256 bytes per token.
SMALL = ("parallelism=cp2", "data.seq_length=16")

FORWARD = """\
zigzag forward: 2 ranks, 16 tokens (zigzag), causal mask, 2 steps
  balance  the busiest rank computes 0.0% more than the average
  bytes    a rank sends 2 KiB and receives 2 KiB at most, in one layer
  time     not simulated: name a cluster, as in parallelism.cluster=h200_x8
  memory of a training step: 12.27 MiB a rank, most in optimizer step (recompute=none; 10.51 MiB at any length)

who holds what
  rank 0: 0:4 + 12:16  (8 tokens)
  rank 1: 4:8 + 8:12  (8 tokens)

step 0
  rank 0: attend q[0:8] x kv own[0:8] causal; send kv0[0:4] -> 1; receive kv1[0:8] <- 1
  rank 1: attend q[0:8] x kv own[0:8] causal; send kv1[0:8] -> 0; receive kv0[0:4] <- 0

step 1
  rank 0: attend q[4:8] x kv 1[0:8] full
  rank 1: attend q[0:8] x kv 0[0:4] full

totals
  rank            pairs    load  tokens sent / received
     0               68  100.0%  kv 4 / 8 (3 KiB)
     1               68  100.0%  kv 8 / 4 (3 KiB)
  buffers for other ranks' kv: 8 tokens = 2 KiB at most
  send memory: 2 KiB at most
"""


def plan(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Return the verb's standard output, or its standard error if it must fail."""
    capsys.readouterr()
    assert cli.main(["plan", *words]) == code
    captured = capsys.readouterr()
    assert (captured.out if code else captured.err) == ""
    return captured.err if code else captured.out


def test_forward(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, *SMALL) == FORWARD


def test_backward_and_full_mask_are_independent(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, *SMALL, "--backward").startswith("zigzag backward: 2 ranks, 16 tokens (zigzag), causal mask")
    assert plan(capsys, *SMALL, "--full-mask").startswith("zigzag forward: 2 ranks, 16 tokens (zigzag), full mask")


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        (["train.precision=bf16"], "4 KiB"),
        (["train.precision=fp32"], "8 KiB"),
        (["parallelism.tensor_parallel_size=2"], "2 KiB"),
        (["model.num_kv_heads=4"], "8 KiB"),
    ],
)
def test_bytes_follow_precision_heads_and_tensor_parallelism(
    words: list[str], sent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"kv 8 / 8 ({sent})" in plan(capsys, *SMALL, "--full-mask", *words)


def test_max_buffer_tokens_divides_all_gather_into_more_groups(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("parallelism=cp4", "parallelism.schedule=all_gather", "data.seq_length=64")
    unbounded, bounded = plan(capsys, *words), plan(capsys, *words, "parallelism.max_buffer_tokens=16")
    assert "buffers for other ranks' kv: 48 tokens" in unbounded
    assert "buffers for other ranks' kv: 16 tokens" in bounded
    assert unbounded.count("\nstep ") < bounded.count("\nstep ")


@pytest.mark.parametrize("options", [[], ["--backward"]])
def test_draw(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.png"
    out = plan(capsys, *SMALL, *options, "--draw", str(path))
    assert out.endswith(f"\n\ndrawn to {path}\n")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5_000


def test_the_documents_of_a_pack_are_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pack.png"
    words = ["parallelism=cp2", "parallelism.schedule=all_gather", "parallelism.cluster=h200_x8", "--documents"]
    out = plan(capsys, *words, "900,50,50,400,200", "--draw", str(path))
    assert out.startswith("all_gather forward: 2 ranks, 1600 tokens (balanced), causal, 5 documents mask")
    table = out.split("5 documents in the balanced layout; the maximum above the average: tokens 0.0%, pairs 0.0%")[1]
    rows = [line.split() for line in table.splitlines()[2:4]]
    assert [row[:2] for row in rows] == [["0", "800"], ["1", "800"]]
    assert abs(float(rows[0][2].replace(",", "")) - 254_150) < 1_000, "half of all pairs"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and path.stat().st_size > 5_000


def test_the_first_pack_of_the_dataset_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallelism=cp2", "parallelism.schedule=all_gather", "data.packing=best_fit", "data.seq_length=512"]
    words.append(f"data.prefix={tmp_path}/corpus")
    out = plan(capsys, *words)
    assert out.startswith(f"no dataset {tmp_path}/corpus yet") and "512 tokens (zigzag)" in out
    tiny_corpus(tmp_path / "corpus")
    out = plan(capsys, *words)
    assert out.startswith(f"the first pack of {tmp_path}/corpus, of ")
    count = re.search(r"of (\d+) documents", out)
    assert count and f"{count[1]} documents in the balanced layout; the maximum above" in out
    assert "2 ranks, 90 tokens (balanced), causal, 2 documents mask" in plan(capsys, *words, "--documents=60,30")


def test_the_work_of_every_replica_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_corpus(tmp_path / "corpus")
    words = [f"data.prefix={tmp_path}/corpus", "data.seq_length=512", "train.global_batch_size=8"]
    words += ["parallelism.data_parallel_size=4", "--documents"]
    title, _, *rows = plan(capsys, "data.packing=best_fit", *words).splitlines()
    busiest = re.search(r"the busiest of 4 .* computes ([0-9.]+)% more than the average", title)
    work = [[float(each) for each in row.split()[3:]] for row in rows]
    assert len(work) == 4 and all(total == pytest.approx(sum(packs), 1e-3) for total, *packs in work)
    totals = [total for total, *_ in work]
    assert busiest and float(busiest[1]) == pytest.approx(100 * (4 * max(totals) / sum(totals) - 1), abs=0.1)
    assert "data.packing=none: expected packs" in plan(capsys, "data.packing=none", *words, code=2)
    words[2] = "train.global_batch_size=6"
    assert "train.global_batch_size=6: expected a multiple" in plan(capsys, "data.packing=best_fit", *words, code=2)


@pytest.mark.parametrize("lengths", ["", "5,,6", "0", "7,-1", "a", "1.5"])
def test_invalid_lengths_are_refused(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--documents={lengths}: expected lengths" in plan(capsys, *SMALL, f"--documents={lengths}", code=2)


def test_options_that_would_be_ignored_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("compare --draw a.png", "memory --compare", "max-length --full-mask", "documents --backward"):
        message = f"expected no --{words.split()[0]} beside it. Leave one out."
        assert message in plan(capsys, *SMALL, *f"--{words}".split(), code=2)
    assert "=given: expected --memory or --max-length beside it." in plan(capsys, *SMALL, "--device-gib=80", code=2)
    assert "--device-gib=-3.0: expected" in plan(capsys, *SMALL, "--memory", "--device-gib=-3", code=2)


@pytest.mark.parametrize("name", ["gone/plan.png", "plan.txt", "plan"])
def test_a_bad_path_for_a_drawing_is_refused_before_printing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    assert plan(capsys, *SMALL, "--draw", str(path), code=2) == (
        f"megatron-longctx plan: --draw={path}: expected a .png file in a folder that exists. Give another file name.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_simulated_on_a_named_cluster_and_its_time_line_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("parallelism=cp4", "data.seq_length=4096", "parallelism.cluster=h200_x8")
    picture = tmp_path / "time.png"
    out = plan(capsys, *words, "--timeline", str(picture))
    summary, _, times = out.partition("simulated on h200_x8")
    idle = re.match(r"zigzag forward: 4 ranks, .*, 4 steps, ([\d.]+%) of rank-time idle\n", summary)
    assert idle and f" ms, {idle[1]} of rank-time not computing" in times
    assert re.search(
        r"\n  time     [\d.]+ ms on h200_x8, simulated, .*\n  memory of a training step: .*\n  .* a step fits\n\n",
        summary,
    )
    for word in ("  time  ", "  computing  ", "  waiting  ", "  busiest link  ", "  memory  "):
        assert word in times
    assert picture.read_bytes().startswith(b"\x89PNG")
    message = plan(capsys, *SMALL, "--timeline", str(picture), code=2)
    assert "expected parallelism.cluster=NAME beside it" in message


def test_all_modes_are_ranked_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("parallelism=cp4", "data.seq_length=4096", "parallelism.cluster=h200_x8")
    picture = tmp_path / "modes.png"
    out = plan(capsys, *words, "--compare", str(picture))
    for mode in ("ring", "zigzag", "striped", "helper", "double_ring", "tasp", "all_gather", "usp (inner_size=2)"):
        assert f"\n  {mode} " in out
    assert "ulysses" in out and picture.read_bytes().startswith(b"\x89PNG")
    assert plan(capsys, *words, "--compare").count("\n") == out.count("\n") - 2
    assert "expected parallelism.cluster=NAME" in plan(capsys, *SMALL, "--compare", code=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallelism.schedule=tasp"],
         "parallelism.context_parallel_size=512: expected a plan of at most 1,200,000"),
        (["parallelism.schedule=all_gather", "parallelism.max_buffer_tokens=2"],
         "parallelism.context_parallel_size=512: expected a plan of at most 1,200,000 messages; that of all_gather"),
        (["--draw", "x.png"], "--draw=x.png: expected a plan of at most 20,000 messages; zigzag has 262,144 here"),
        (["--max-length", "--device-gib", "139"], "--max-length=given: expected a plan of at most 20,000 messages"),
    ],
)  # fmt: skip
def test_a_plan_of_many_ranks_that_takes_hours_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"megatron-longctx plan: {message}" in plan(capsys, "parallelism.context_parallel_size=512", *words, code=2)


def test_work_grows_with_the_messages_of_a_plan_and_not_with_messages_times_ranks() -> None:
    """Twice the ranks are 4 times the messages and 4.1 times the work; 5.1 times if every rank examined all messages.

    Python's instructions are counted, so that the speed of the machine has no effect.
    """

    def instructions(config: Config) -> int:
        count = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal count
            if not {"plans", "planner"} & set(frame.f_code.co_filename.split("/")):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            count += event == "opcode"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            plan_verb.show(config)
        finally:
            sys.settrace(before)
        return count

    counts = []
    for ranks in (16, 32):
        words = [f"parallelism.context_parallel_size={ranks}", "parallelism.schedule=ring", "data.seq_length=4099"]
        counts.append(instructions(override_config(Config(), words)))
    assert counts[1] < 4.4 * counts[0]


def test_auto_selects_a_mode_for_a_named_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("parallelism=cp4", "parallelism.schedule=auto")
    assert "parallelism.schedule=auto takes all_gather on h200_x8" in plan(
        capsys, *words, "parallelism.cluster=h200_x8"
    )
    assert "expected a mode. Name one, or rank all of them with --compare" in plan(capsys, *words, code=2)
