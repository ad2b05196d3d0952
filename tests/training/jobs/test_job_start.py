"""A run from start to end: its output and files, how it resumes, and what it refuses to resume."""

import json
import pickle
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.cli import cli
from megatron_longctx.config import names
from megatron_longctx.mcore.tokenizer import build_tokenizer
from megatron_longctx.training import forks, preflight
from megatron_longctx.training.compose import compose_config, load_config
from tests.shared.jobs import CLI, TINY, Job, finished, latest_checkpoint, started, steps_recorded

STEPS = 40
# All lines that a run may print besides those of steps.
OURS = (
    r"(\d\d:\d\d:\d\d )?[^|]+: \d+ s so far",  # what takes more than 10 s on a busy machine
    r"starting 2 cpu ranks; run folder runs/first",
    r"\d\d:\d\d:\d\d transformer layers: Megatron-Core \(local\)",
    r"\d\d:\d\d:\d\d attention kernel: cpu",
    r"\d\d:\d\d:\d\d W&B: offline in (runs/first/wandb/offline-run-\w+-\w+); to send it: wandb sync \1",
    r"\d\d:\d\d:\d\d first step: connects the ranks and compiles kernels, which a new machine does once",
    r"\d\d:\d\d:\d\d first step: [\d.]+ s forward and backward, [\d.]+ s data, [\d.]+ s optimizer",
    r"\d\d:\d\d:\d\d random states not restored: .*",
    r"\d\d:\d\d:\d\d resumed from step \d+ of runs/first/checkpoints",
    r"\d\d:\d\d:\d\d stopped at step \d+ of 40: the same command goes on from here",
    r"interrupted: stopping after this step with a checkpoint; once more to stop at once",
    r"\d\d:\d\d:\d\d saved runs/first/checkpoints/iter_\d{7} in [\d.]+ s, the last [\d.]+ s waited for",
)
STEP = (
    r"\d\d:\d\d:\d\d step +(\d+)/40 \| loss \d\.\d{5} \| grad norm \d+\.\d{3} \| lr \d\.\d\de[+-]\d\d \| "
    r"[\d,]+ tokens/s \| [\d.e-]+ TFLOP/s/GPU \| MFU — \| mem — GiB \| ETA 0:\d\d:\d\d"
)


@dataclass(frozen=True)
class Jobs:
    """One run in three jobs: stopped by TERM, stopped by INT, and completed with other parallel sizes."""

    place: Path
    all: tuple[Job, Job, Job]
    stops: tuple[int, int]
    forked: bool

    @property
    def run(self) -> Path:
        return self.place / "runs/first"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Jobs:
    place = tmp_path_factory.mktemp("first")
    (place / "data").symlink_to(corpus)
    words = [*CLI, "train", *TINY, "run.name=first", "logging.wandb=offline", "train.precision=bf16"]
    words.append(f"train.steps={STEPS}")
    stopped, last, started_by_fork = [], [0], []
    for number in (signal.SIGTERM, signal.SIGINT):
        with started(place, [*words, "parallelism=cp2"], quick=number == signal.SIGINT) as job:
            job.wait_for(f"step {last[-1] + 2:>2}/{STEPS}")
            started_by_fork.append(not any("spawn_main" in word for rank in job.ranks() for word in rank.cmdline()))
            job.process.send_signal(number)
            job.wait()
            stopped.append(job)
            last.append(latest_checkpoint(place / "runs/first"))
    end = finished(place, [*words, "parallelism.tensor_parallel_size=2"], quick=True)
    return Jobs(place, (stopped[0], stopped[1], end), (last[1], last[2]), started_by_fork[0])


def printed_steps(lines: list[str]) -> list[int]:
    return [int(found.group(1)) for line in lines if (found := re.fullmatch(STEP, line))]


def test_term_and_int_stop_with_success_and_the_same_command_resumes(jobs: Jobs) -> None:
    first, second = jobs.stops
    assert 0 < first < second < STEPS, "a signal came too late to test anything"
    for job, begin, end in zip(jobs.all, (0, first, second), (first, second, STEPS), strict=True):
        assert job.process.returncode == 0, job.output()
        assert job.left_over() == []
        out = job.out.read_text()
        assert printed_steps(out.splitlines()) == list(range(begin + 1, end + 1))
        assert (f"resumed from step {begin} " in out) == (begin > 0)
        assert (f"stopped at step {end} of {STEPS}: the same command goes on from here" in out) == (end < STEPS)
    assert steps_recorded(jobs.run) == list(range(1, STEPS + 1)), "each step once"
    assert latest_checkpoint(jobs.run) == STEPS


def test_ranks_are_forks_of_a_launcher_that_has_imported_everything(jobs: Jobs) -> None:
    assert jobs.forked


def test_only_known_lines_are_printed(jobs: Jobs) -> None:
    for job in jobs.all:
        assert job.err.read_text() == ""
        lines = job.out.read_text().splitlines()
        assert [line for line in lines if not any(re.fullmatch(form, line) for form in (*OURS, STEP))] == []
        assert sum("attention kernel" in line for line in lines) == 1


def test_the_log_has_the_lines_of_all_steps(jobs: Jobs) -> None:
    log = (jobs.run / "log.txt").read_text().splitlines()
    assert printed_steps(log) == list(range(1, STEPS + 1))
    printed = "".join(job.out.read_text() for job in jobs.all).splitlines()
    assert log == [line for line in printed if line[0].isdigit()]  # the launcher's lines have no time


def test_the_run_folder_is_complete(jobs: Jobs) -> None:
    first, second = jobs.stops
    now, earlier = (load_config(jobs.run / f"resolved{part}.yaml") for part in ("", f".until_step_{second}"))
    assert (now.parallelism.tensor_parallel_size, now.parallelism.context_parallel_size) == (2, 1)
    assert (earlier.parallelism.tensor_parallel_size, earlier.parallelism.context_parallel_size) == (1, 2)
    assert len(list(jobs.run.glob("resolved*.yaml"))) == 2, "the second job had the configuration of the first"
    assert sorted(path.name for path in (jobs.run / "checkpoints").iterdir()) == [
        *(f"iter_{step:07d}" for step in (first, second, STEPS)),
        "latest_checkpointed_iteration.txt",
    ]
    assert len(list(jobs.run.glob("wandb/offline-run-*/*.wandb"))) == 3
    assert not (jobs.run / "errors").exists()
    records = [json.loads(line) for line in (jobs.run / "metrics.jsonl").read_text().splitlines()]
    assert [record[names.TOKENS] for record in records] == [64 * step for step in range(1, STEPS + 1)]
    assert records[-1][names.LOSS] < records[0][names.LOSS] - 0.1


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert cli.main(["train", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.removeprefix("megatron-longctx train: ").rstrip()


@pytest.fixture
def resuming(jobs: Jobs, no_start: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings that resume a copy of the run in the current directory, without starting ranks."""
    shutil.copytree(jobs.place, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return [*TINY, "run.name=first", "train.precision=bf16", "train.steps=60"]


def test_the_unchanged_run_resumes(resuming: list[str]) -> None:
    with pytest.raises(AssertionError, match="ranks were started"):
        cli.main(["train", *resuming])


def test_a_launcher_that_cannot_be_forked_says_why(
    resuming: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for obstacle, how in ((None, "fork"), ("CUDA is initialized in the launcher", "spawn")):
        monkeypatch.setattr(forks, "obstacle", lambda obstacle=obstacle: obstacle)
        with pytest.raises(AssertionError, match=f"ranks were started by {how}"):
            cli.main(["train", *resuming])
        said = [line for line in caplog.messages if line.startswith("ranks are not forks")]
        assert said == [f"ranks are not forks and start some seconds later, because {obstacle}"][: obstacle is not None]


def test_another_model_or_batch_is_refused(resuming: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("runs/first/resolved.yaml").read_text()
    message = refused([*resuming, "model.hidden_size=64"], capsys)
    assert message.startswith("runs/first/checkpoints/iter_0000040 is of another model (")
    for part in ("hidden_size: checkpoint 32, model 64", "expected equal", "name another run"):
        assert part in message
    message = refused([*resuming, "train.global_batch_size=2"], capsys)
    assert message.startswith("train.global_batch_size=2: expected 1, with which runs/first has been trained so far. ")
    assert message.endswith("Set it back, or start a run of another run.name.")
    assert Path("runs/first/resolved.yaml").read_text() == before, "a refused job has changed the run"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("data.seq_length=32", "data.seq_length=32: expected 64, with which runs/first has been trained so far; "),
        ("data.prefix=other", "data.prefix=other: expected data/tiny (SHA-256 "),
        ("train.seed=1", "train.seed=1: expected 1234, "),
    ],
)
def test_other_data_is_refused_unless_allowed(
    word: str, expected: str, resuming: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for suffix in (".idx", ".bin"):
        shutil.copy(f"data/tiny{suffix}", f"other{suffix}")
    tokens = bytearray(Path("other.bin").read_bytes())
    tokens[0] += 1
    Path("other.bin").write_bytes(tokens)
    message = refused([*resuming, word], capsys)
    assert message.startswith(expected) and message.endswith("or set train.check_data=false to go on with this.")
    with pytest.raises(AssertionError, match="ranks were started"):
        cli.main(["train", *resuming, word, "train.check_data=false"])


@pytest.mark.parametrize("verb", ["generate", "serve"])
def test_a_tokenizer_other_than_the_checkpoints_is_refused(
    verb: str, resuming: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def another(library: str, path: str | None) -> Any:
        tokenizer = build_tokenizer(library)
        tokenizer.path = "resolved.yaml"
        return tokenizer

    monkeypatch.setattr(preflight, "build_tokenizer", another)
    shutil.copy("runs/first/resolved.yaml", "resolved.yaml")
    prompt = ["prompt=a"] if verb == "generate" else []
    assert cli.main([verb, "checkpoint=runs/first", *prompt]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"megatron-longctx {verb}: data.tokenizer=byte-level: expected byte-level (SHA-256 ")


def test_data_of_an_earlier_version_is_accepted(resuming: list[str], caplog: pytest.LogCaptureFixture) -> None:
    note = json.loads(Path("data/tiny.json").read_text())
    del note["tokenizer_sha256"]
    for suffix in (".idx", ".bin"):
        shutil.copy(f"data/tiny{suffix}", f"other{suffix}")
    Path("other.json").write_text(json.dumps(note))
    with pytest.raises(AssertionError, match="ranks were started"):
        cli.main(["train", *resuming, "data.prefix=other"])
    assert len([message for message in caplog.messages if message.startswith("other.json does not say")]) == 1
    Path("other.json").write_text(json.dumps(note | {"tokenizer_sha256": "0" * 64}))
    assert cli.main(["train", *resuming, "data.prefix=other"]) == 2
    with pytest.raises(AssertionError, match="ranks were started"):
        cli.main(["train", *resuming, "data.prefix=other", "train.check_data=false"])


def test_a_truncated_checkpoint_is_refused(jobs: Jobs, resuming: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    victim = sorted(Path("runs/first/checkpoints/iter_0000040").glob("*.distcp"))[0]
    victim.write_bytes(victim.read_bytes()[:100])
    message = refused(resuming, capsys)
    assert message.startswith(str(victim)) and "has 100 bytes, expected " in message
    newest = f"runs/first/checkpoints/iter_{jobs.stops[1]:07d}"
    assert f"The newest checkpoint before it that is whole is {newest}: " in message


class _Planted:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("open('ran', 'w').close()",)


@pytest.mark.parametrize("verb", ["train", "generate", "serve"])
def test_a_pickle_in_a_checkpoint_is_refused_and_not_run(
    verb: str, resuming: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("runs/first/checkpoints/iter_0000040")
    (path / "digests.json").unlink()  # an attacker could write these as well
    (path / ".metadata").write_bytes(pickle.dumps(_Planted()))
    words = {"train": resuming, "generate": ["checkpoint=runs/first", "prompt=a"], "serve": ["checkpoint=runs/first"]}
    capsys.readouterr()
    assert cli.main([verb, *words[verb]]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"megatron-longctx {verb}: {path} is damaged (builtins.exec has no place in a checkpoint")
    assert message.count("\n") == 1
    assert not Path("ran").exists()


def test_a_missing_checkpoint_is_refused(resuming: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree("runs/first/checkpoints/iter_0000040")
    message = refused(resuming, capsys)
    assert message.startswith("runs/first/checkpoints/iter_0000040 does not exist, expected a checkpoint. The newest ")


def test_a_resolved_yaml_of_another_version_does_not_stop_a_run(resuming: list[str]) -> None:
    path = Path("runs/first/resolved.yaml")
    path.write_text(path.read_text() + "novelty: 1\n")
    with pytest.raises(AssertionError, match="ranks were started"):
        cli.main(["train", *resuming])
    assert load_config(path) == compose_config(resuming)
    assert "novelty" in Path("runs/first/resolved.until_step_40.yaml").read_text()
