"""`submit` refuses what cannot run, composes the configuration and copies the code once; fakes of Slurm's commands
record how they are called."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_longctx.cli import cli
from megatron_longctx.cli.conversion import import_model
from megatron_longctx.cli.submit import Request, check_limits, split_options
from megatron_longctx.config.files import bundled
from megatron_longctx.training.compose import load_config
from tests.shared.published import write_model
from tests.shared.training import tiny_corpus

SINFO = """cpu*|up|infinite|1-infinite|8|(null)|96
gpu|up|2-00:00:00|1-4|4|gpu:h100:8(S:0-1)|96+
gpu|up|2-00:00:00|1-4|2|gpu:h100:4|48
old|down|infinite|1-infinite|2|gpu:8|96
"""
GPU = "--partition=gpu"
DEMO = ("experiment=demo", "data.prefix=corpus")
LARGER = ("train.global_batch_size=4", "data.seq_length=2048")


@pytest.fixture(scope="module")
def shared(root: Path) -> Path:
    """A dataset, and a run with the weights of a model of 256 positions."""
    tiny_corpus(root / "corpus", documents=200)
    write_model(root / "source", "llama", torch.float32, vocab_size=512)
    words = ["data.tokenizer=byte-level", "data.tokenizer_path=null", "data.prefix=corpus"]
    import_model(str(root / "source"), [f"out={root}/runs/first", *words])
    return root


@pytest.fixture
def place(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the dataset, the run and fakes of sbatch and sinfo on PATH."""
    shutil.copytree(shared, tmp_path, dirs_exist_ok=True)
    (tmp_path / "bin").mkdir()
    sbatch = 'printf "%s\\n" "$@" >called\nenv >environment\necho Submitted batch job 7'
    for name, text in (("sbatch", sbatch), ("sinfo", f"printf '%s' {shlex.quote(SINFO)}")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_dry_run_shows_the_command_and_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = sorted(path.name for path in place.iterdir())
    assert cli.main(["submit", "--dry-run", "train", GPU, "-N", "2", *DEMO, "run.name=a", *LARGER]) == 0
    first = capsys.readouterr().out
    assert cli.main(["submit", "train", GPU, "-N", "2", *DEMO, "run.name=a", *LARGER, "--dry-run"]) == 0
    for described, command in (text.splitlines() for text in (first, capsys.readouterr().out)):
        assert described.startswith("a: 16 ranks (CP 4, TP 1, PP 1), zigzag, 40 steps of 8,192 tokens, 0.0 GiB a rank")
        words = shlex.split(command)
        words = words[words.index("sbatch") :]
        assert words[1:6] == ["--job-name=a", f"--output={place}/runs/a/slurm-%j.log", GPU, "-N", "2"]
        assert words[6].endswith("/code/launch/train.sbatch") and words[7] == "--resolved"
    assert sorted(path.name for path in place.iterdir()) == here


def test_the_job_has_a_copy_of_code_and_configuration(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["submit", "train", GPU, *DEMO, "run.name=a", "train.steps=7"]) == 0
    assert capsys.readouterr().out.startswith("Submitted batch job 7")
    *_, script, flag, resolved = (place / "called").read_text().split()
    assert flag == "--resolved" and load_config(Path(resolved)).train.steps == 7
    code = Path(script).parents[1]
    assert os.access(script, os.X_OK) and (code / "launch/job.sh").is_file()
    environment = dict(line.split("=", 1) for line in (place / "environment").read_text().splitlines() if "=" in line)
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(code) and environment.get("LONGCTX_COMMIT")
    program = "from megatron_longctx.config import files; print(files.__file__, files.bundled('recipes'))"
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [f"{code}/megatron_longctx/config/files.py", f"{code}/recipes"]


def test_a_sweep_has_a_run_for_every_combination(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swept = ["parallelism.schedule=ring,zigzag", "optim.lr=1e-3,2e-3", "run.name=s"]
    assert cli.main(["submit", "sweep", GPU, *DEMO, *swept]) == 0
    called = (place / "called").read_text().split()
    assert "--job-name=s" in called and "--array=1-4" in called and called[-2].endswith("/sweep.sbatch")
    runs = [load_config(Path(line.split()[1])) for line in Path(called[-1]).read_text().splitlines()]
    assert [run.run.name for run in runs] == ["s-ring-0.001", "s-ring-0.002", "s-zigzag-0.001", "s-zigzag-0.002"]
    assert [(run.parallelism.schedule, run.optim.lr) for run in runs[1:3]] == [("ring", 2e-3), ("zigzag", 1e-3)]
    capsys.readouterr()
    assert cli.main(["submit", "sweep", GPU, *DEMO, *swept[::2], "parallelism.cluster=h200_x8", "--dry-run"]) == 0
    ring, zigzag, _ = capsys.readouterr().out.splitlines()
    assert ring.startswith("s-ring: 8 ranks") and zigzag.startswith("s-zigzag: 8 ranks")
    seconds = [float(line.split(" s a step")[0].rsplit(" ", 1)[1]) for line in (ring, zigzag)]
    assert seconds[0] != seconds[1] and 0 < min(seconds) < max(seconds) < 0.1


def test_own_recipes_and_a_login_node_without_gpus(place: Path) -> None:
    (place / "own/experiment").mkdir(parents=True)
    recipe = "# @package _global_\ntrain:\n  device: cuda\n  steps: 7\noptim:\n  warmup_steps: 1\n"
    (place / "own/experiment/mine.yaml").write_text(recipe)
    words = ["experiment=mine", "data.prefix=corpus", "data.seq_length=96", "train.global_batch_size=8"]
    assert cli.main(["submit", "train", GPU, "--config-dir", "own", *words]) == 0
    assert load_config(Path((place / "called").read_text().split()[-1])).train.device == "cuda"
    assert cli.main(["train", "--config-dir", "own", "--preflight", "8", *words]) == 0


@pytest.mark.parametrize(
    ("words", "script", "passed"),
    [
        (["serve", "-p", "gpu", "checkpoint=runs/first"], "serve", ["checkpoint=runs/first"]),
        (["run", "serve", "checkpoint=runs/first"], "serve", ["checkpoint=runs/first"]),
        (["run", "--time=5", "eval", "checkpoint=runs/first", "samples=1"], "run",
         ["eval", "checkpoint=runs/first", "samples=1"]),
        (["run", "export", "checkpoint=runs/first", "out=new"], "run", ["export", "checkpoint=runs/first", "out=new"]),
        (["run", "-p", "gpu", "calibrate", "experiment=demo"], "run", ["calibrate", "experiment=demo"]),
        (["run", "data", "--source", "stdlib", "--out", "new"], "run", ["data", "--source", "stdlib", "--out", "new"]),
    ],
)  # fmt: skip
def test_other_verbs_are_jobs_too(place: Path, words: list[str], script: str, passed: list[str]) -> None:
    options = [] if {"-p", "export", "data"} & set(words) else [GPU]
    assert cli.main(["submit", words[0], *options, *words[1:]]) == 0
    called = (place / "called").read_text().splitlines()
    assert called[-len(passed) - 1].endswith(f"/launch/{script}.sbatch") and called[-len(passed) :] == passed
    assert "--ntasks-per-node=1" in called, "of one rank, or of a verb that starts its own"


def no_disk(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**20, 2**20 - 1000, 1000))  # type: ignore[attr-defined]


def cut_weights(place: Path, _: pytest.MonkeyPatch) -> None:
    next((place / "runs/first/checkpoints").glob("iter_*/*.distcp")).unlink()


def other_tokenizer(place: Path, _: pytest.MonkeyPatch) -> None:
    note = json.loads((place / "corpus.json").read_text())
    (place / "corpus.json").write_text(json.dumps(note | {"tokenizer_sha256": "0" * 64}))


SETTINGS = {
    "@70b": "model=llama3_70b parallelism=cp8 parallelism.cluster=h200_x8 data.prefix=corpus",
    "@demo": "experiment=demo data.prefix=corpus",
    "@init": "train.init_from=runs/first run.name=new data.prefix=corpus data.seq_length=96 train.global_batch_size=8",
    "@losses": "checkpoint=runs/first samples=1",
}
Change = Callable[[Path, pytest.MonkeyPatch], None]
MISTAKES: dict[str, tuple[str, str] | tuple[str, str, Change]] = {
    # the words; the value, the expectation and the remedy in the message; what changes in the place
    "misspelt dataset": (
        "train -p gpu @demo data.prefix=corpsu", "data.prefix=corpsu: expected .*corpsu.idx is missing. Write it with"),
    "misspelt recipe": ("train experiment=dmeo", "experiment=dmeo: expected one of .*Nearest: demo"),
    "misspelt key": ("train @demo train.stpes=3", "train.stpes.*: expected a key .*Nearest: train.steps"),
    "step beyond the GPUs": (
        "train -p gpu @70b", "data.seq_length=4096: expected a step within the device's 139.0 GiB; .*parallel_size"),
    "weights of another model": (
        "train -p gpu @init model.num_layers=3", "num_layers: checkpoint 2, model 3.*configure the model"),
    "missing init_from": (
        "train -p gpu @demo train.init_from=runs/nowhere", "runs/nowhere/.*expected a run's configuration there. "),
    "absent weights file": ("train -p gpu @init", "iter_.*distcp has 0 bytes, expected .* restore", cut_weights),
    "other tokenizer": (
        "train -p gpu @demo", "tokenizer_path=None: expected the tokenizer that corpus .*Use that", other_tokenizer),
    "vocabulary too small": (
        "train -p gpu @demo model.vocab_size=100", "vocab_size=100: expected at least the tokenizer's 512. Raise it"),
    "too few GPUs": (
        "train -p gpu --gpus-per-node=2 --ntasks-per-node=2 @demo", "world size=2: expected a multiple .*Start"),
    "more ranks than GPUs": (
        "train -p gpu --gpus-per-node=4 @demo", "--ntasks-per-node=8: expected at most 4, the GPUs of a node. Set"),
    "full disk": ("train -p gpu @demo", "run.root=.*GiB for 2 checkpoints of .* Set train.keep_checkpoints=1", no_disk),
    "no GPUs for cuda": (
        "train --gpus-per-node=0 @demo train.device=cuda", "device=cuda: expected nodes with GPUs; .* Set --gpus"),
    "partition without GPUs": (
        "train @demo", "--gpus-per-node=8: expected at most 0, .*of the partition cpu. .*choose another"),
    "time limit": ("train -p gpu --time=3-0 @demo", "--time=3-0: expected at most 2-00:00:00, .*gpu. Lower it"),
    "unknown partition": ("train -p gup @demo", "--partition=gup: expected one of cpu, gpu, old. Did you mean gpu?"),
    "partition that is down": ("train -p old @demo", "--partition=old: expected one that is up; .* Choose another"),
    "too many CPUs": ("train -p gpu -c 20 @demo", "--cpus-per-task=160: expected at most 96, .*gpu. Lower one"),
    "too many nodes": ("train -p gpu --nodes=5 @demo", "--nodes=5: expected at most 4, the nodes .* Ask for fewer"),
    "beyond the positions": (
        "train -p gpu @init data.seq_length=2048",
        "data.seq_length=2048: expected at most 256, for which the RoPE .*rope_scaling.factor=8"),
    "tensor parallelism above KV heads": (
        "train -p gpu @demo parallelism=single parallelism.tensor_parallel_size=8",
        "tensor_parallel_size=8: expected a divisor of model.num_kv_heads=2. Nearest"),
    "batch that ranks cannot share": (
        "train -p gpu @demo train.global_batch_size=3", "batch_size=3: expected a multiple of .* = 1 x 2. Nearest"),
    "folder of another run": (
        "train -p gpu @init run.name=first model.num_layers=3", "runs/first/.*checkpoint 2, model 3.*name another run"),
    "no cluster for auto": (
        "train -p gpu @demo parallelism.schedule=auto", "schedule=auto: expected .*parallelism.cluster=NAME .*Name"),
    "evaluation beyond the model": (
        "run -p gpu eval checkpoint=runs/first lengths=4096", "lengths=4096: expected at most 256"),
    "ranks of an evaluation": (
        "run -p gpu --ntasks-per-node=4 --gpus-per-node=4 eval @losses", "--ntasks=4: expected 1 tasks: .*Leave out"),
    "absent published weights": (
        "run import Llama out=runs/l", "SOURCE=Llama: expected a folder with config.json .*Fetch it first"),
    "absent text": ("run data --source txet --out new", "--source=txet: expected `stdlib`.* Check the path"),
    "files of no tokenizer": (
        "run data --source stdlib --out new --tokenizer-path t", "--tokenizer-path=t: expected none with .*Set --tok"),
    "no run to serve": ("serve checkpoint=runs/a", "runs/a/resolved.yaml: expected a run's configuration there. Start"),
    "no checkpoint named": ("serve", "checkpoint=: expected RUN or checkpoint=RUN, .*Give runs/NAME"),
    "a sweep of one run": ("sweep @demo", "sweep: expected a setting with several values"),
    "no verb": ("run --time=5", "submit run=--time=5: expected one of the verbs eval, .*Name it"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found_before_anything_is_queued(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    words, message, *changes = MISTAKES[mistake]
    for name, settings in SETTINGS.items():
        words = words.replace(name, settings)
    for change in changes:
        change(place, monkeypatch)
    assert cli.main(["submit", *words.split()]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.search(message, said), said
    assert not (place / "called").exists() and not (place / "runs/demo").exists()


def test_what_a_job_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    script = bundled("launch") / "train.sbatch"
    assert Request.of(script, []) == Request(1, 8, 8, "04:00:00", "", 96)
    assert Request.of(script, ["-N", "2-4", "--gres=gpu:h100:4", "-n6", "-t1-0", "-pa,b"]) == Request(
        2, 6, 4, "1-0", "a,b", 36
    )
    assert Request.of(script, ["--nodes", "2", "--gpus=8", "--ntasks-per-node=4"]).gpus == 4
    monkeypatch.setenv("LAUNCH", "torchrun")
    monkeypatch.setenv("SBATCH_PARTITION", "p")
    assert Request.of(script, ["--nodes=2", "--ntasks-per-node=1"]) == Request(2, 16, 8, "04:00:00", "p", 12)
    for word in ("--nodes=x", "--nodes=0", "--ntasks=0"):
        with pytest.raises(ValueError, match=f"{word}: expected a number from 1 on"):
            Request.of(script, [word, "--gpus=8"])
    with pytest.raises(ValueError, match="NPROC=0: expected the ranks of a node"):
        Request.of(script, ["--gpus-per-node=0"])
    assert split_options(["-p", "gpu", "a=1", "--requeue", "b=2", "-N2"]) == (
        ["-p", "gpu", "--requeue", "-N2"],
        ["a=1", "b=2"],
    )


def test_time_limits_in_slurms_forms(place: Path) -> None:
    for time in ("2880", "48:00:00", "2-0", "2-0:0:0"):
        check_limits(Request(1, 8, 8, time, "cpu,gpu"))
    for time in ("2881", "2-0:1", "UNLIMITED", "2880:30"):
        with pytest.raises(ValueError, match=f"--time={time}: expected at most 2-00:00:00"):
            check_limits(Request(1, 8, 8, time, "gpu"))
    with pytest.raises(ValueError, match="--time=soon: expected minutes, H:M:S or D-H:M:S"):
        check_limits(Request(1, 8, 8, "soon", "gpu"))


def test_slurms_error_is_reported(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "bin/sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid account' >&2\nexit 1\n")
    (place / "bin/sinfo").write_text("#!/bin/sh\nexit 1\n")
    assert cli.main(["submit", "train", *DEMO]) == 1
    assert "sbatch refused the job: sbatch: error: invalid account" in capsys.readouterr().err
