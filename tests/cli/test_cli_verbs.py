"""The command's verbs: help, exit codes, and one-line errors on standard error without traceback."""

import argparse
import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_longctx import __version__
from megatron_longctx.cli import cli, hydra_options
from megatron_longctx.core.errors import JobFailed
from tests.shared.jobs import CLI, PATIENCE_S, clean_environment, started

VERBS = (
    *("train", "plan", "generate", "eval", "logprobs", "serve", "import", "export"),
    *("data", "calibrate", "check", "compare", "keys", "doctor", "demo"),
)


class Interrupted:
    """Ctrl-C arrives in its destructor, where Python drops the exception."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass


def test_ctrl_c_in_a_destructor_is_not_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def destroy(arguments: argparse.Namespace) -> None:
        for _ in range(50):
            Interrupted()
            time.sleep(0.1)

    monkeypatch.setattr(cli, "_run", destroy)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs without it
    assert run(capsys, "doctor") == (130, "", "megatron-longctx doctor: interrupted\n")


def test_ctrl_c_while_the_command_is_imported_prints_no_traceback() -> None:
    program = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupt:
    def find_spec(self, name, *_):
        if name == "megatron_longctx.cli.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from megatron_longctx.__main__ import main
assert os.environ["TRITON_CACHE_DIR"] == "/home/.triton/cache"
main()
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["HOME"] = "/home"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run the command in this process. Return its exit code, standard output and error."""
    capsys.readouterr()
    try:
        code = cli.main(words)
    except SystemExit as end:  # of argparse
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_ctrl_c_ends_the_command_during_imports_that_catch_everything(tmp_path: Path) -> None:
    catching = "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(1)\nexcept BaseException:\n    pass\n"
    (tmp_path / "hydra.py").write_text(f"import os, signal, time\n{catching}print('went on')\n")
    program = "from megatron_longctx.cli.cli import main; raise SystemExit(main(['train']))"
    environment = clean_environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    with started(tmp_path, [sys.executable, "-c", program], environment) as job:
        assert job.wait() == 130, job.output()
        assert job.err.read_text() == "megatron-longctx: interrupted\n" and job.out.read_text() == ""


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, verb, "--help")
    assert code == 0 and err == "" and out.startswith(f"usage: megatron-longctx {verb}")


def test_help_lists_every_verb_with_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for verb in VERBS:
        assert re.search(rf"^    {verb}\s+\S+ \S+ \S+", out, re.MULTILINE), verb
    assert "experiment=demo parallelism=cp4 train.steps=50" in out


def test_the_examples_in_the_help_can_be_composed() -> None:
    from megatron_longctx.training.compose import compose_config

    lines = [line.split() for line in cli._END.splitlines() if line.strip().startswith("megatron-longctx ")]
    assert len(lines) == 2
    for line in lines:
        compose_config([word for word in line[2:] if "=" in word])


@pytest.mark.parametrize("verb", ["train", "plan", "generate", "demo", "calibrate"])
def test_help_lists_the_recipes(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0 and "reduction=        auto, int4" in out
    assert "experiment=       ablation_distflashattn, ablation_tasp, compare_modes, demo" in out


@pytest.mark.parametrize(
    "words",
    [
        "plan a=1 b=2 --backward --device-gib 3",
        "plan --backward --device-gib 3 a=1 b=2",
        "plan a=1 --backward b=2 --device-gib 3",
        "plan --backward a=1 --device-gib 3 b=2",
    ],
)
def test_settings_may_be_anywhere_among_options(words: str) -> None:
    arguments = cli.parse(words.split())
    assert (arguments.settings, arguments.backward, arguments.device_gib) == (["a=1", "b=2"], True, 3.0)


def test_a_setting_taken_for_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "--compare", "parallelism=cp2")
    assert code == 2 and "--compare=parallelism=cp2: expected a .png file" in err and "Put settings before" in err


@pytest.mark.parametrize("more", [[], ["--memory"], ["--max-length", "--device-gib", "80"]])
def test_a_plan_that_training_would_refuse_is_refused(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallelism=cp8", "parallelism.schedule=ulysses", "data.seq_length=64"]
    code, out, err = run(capsys, "plan", *words, *more)
    assert (code, out) == (2, "")
    assert "8 context-parallel ranks that share the heads (schedule ulysses): expected a divisor of the 4 query" in err
    code, _, err = run(capsys, "plan", "parallelism=cp8", "parallelism.schedule=auto", *more)
    assert code == 2 and "parallelism.schedule=auto: expected a mode" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"{__version__}\n", "")


@pytest.mark.parametrize(
    "words", ["", "trian", "train --steps", "data", "doctor x", "data --source x --out y --tokenizer bpe"]
)
def test_wrong_usage_is_refused_by_the_parser(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *words.split())
    assert (code, out) == (2, "")
    known = [verb for verb in words.split()[:1] if verb in VERBS]
    assert err.startswith(" ".join(["usage: megatron-longctx", *known])) and "error: " in err


def test_wrong_settings_and_missing_files_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """Its import, and Megatron's, take longer than everything else before the first rank."""
    of_a_run = [["generate", "gone", "prompt=a"], ["serve", "checkpoint=gone"], ["eval", "gone"], ["logprobs", "gone"]]
    gone = [["train", "data.prefix=gone"], ["check", "parallelism=cp2", "data.prefix=gone"]]
    commands = [["train", "train.steps=-1"], *gone, *of_a_run, ["export", "gone", "out=x"], ["import", "gone"]]
    code = f"""if True:
        import sys, megatron_longctx.training.comparison
        from megatron_longctx.cli.cli import main
        assert [main(command) for command in {commands}] == [2] * {len(commands)} and "torch" not in sys.modules"""
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path).stderr
    assert said.count("gone/resolved.yaml: expected a run's configuration there") == 5
    assert said.count("data.prefix=gone: expected the files gone.idx and .bin; gone.idx is missing") == 2


def test_a_demo_refuses_what_it_sets_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert "demo: run.name=mine: expected the demo's own" in run(capsys, "demo", "run.name=mine")[2]


def test_a_failed_rank_is_exit_code_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_longctx.core.errors import JobFailed
    from megatron_longctx.training import launcher

    def fail(*_: object) -> None:
        raise JobFailed("rank 1 failed: its reason")

    monkeypatch.setattr(launcher, "train", fail)
    monkeypatch.setattr(cli, "check_datasets", lambda _: None)
    assert run(capsys, "train") == (1, "", "megatron-longctx train: rank 1 failed: its reason\n")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_longctx.cli import doctor

    def broken(_: object) -> int:
        raise RuntimeError("a bug of the program")

    monkeypatch.setattr(doctor, "main", broken)
    with pytest.raises(RuntimeError, match="a bug of the program"):
        cli.main(["doctor"])


def test_a_path_that_cannot_be_used_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.py").write_text("text")
    (tmp_path / "file").write_text("")
    code, out, err = run(capsys, "data", "--source", str(tmp_path / "text"), "--out", str(tmp_path / "file/x"))
    assert (code, out) == (2, "")
    assert err == f"megatron-longctx data: {tmp_path}/file: File exists. Check the path and the disk.\n"


def test_interrupting_a_verb_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    with (tmp_path / "text/a.py").open("w") as file:
        file.writelines(f"value_{i} = {i}\n" for i in range(2_000_000))
    with started(tmp_path, [*CLI, "data", "--source", "text", "--out", "out/corpus"], quick=True) as job:
        while not (tmp_path / "out/corpus.shards").is_dir():  # made when it begins to read
            assert job.process.poll() is None, job.output()
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, job.output()
        assert job.err.read_text() == "megatron-longctx data: interrupted\n"


def test_a_reader_that_closes_the_pipe_is_not_an_error(tmp_path: Path) -> None:
    settings = "parallelism.context_parallel_size=64 data.seq_length=65536"
    command = f"set -o pipefail; {sys.executable} -m megatron_longctx.cli.cli plan {settings} | head -1"
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert result.stdout.startswith("zigzag forward: 64 ranks, 65536 tokens")
    assert (result.returncode, result.stderr) == (0, "")


def test_hydras_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "train", "--cfg", "job", "+experiment=demo", "++train.steps=7")
    assert code == 0 and "  steps: 7\n" in out and "  name: demo\n" in out
    code, out, _ = run(capsys, "plan", "experiment=demo", "--info", "defaults-tree")
    assert code == 0 and "experiment: demo" in out
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("name: mine\nnum_layers: 2\n")
    code, out, _ = run(capsys, "train", "--config-dir", str(tmp_path), "model=mine", "--cfg", "job")
    assert code == 0 and "  name: mine\n  num_layers: 2\n" in out
    code, out, _ = run(capsys, "train", "model=mine", "--cfg", "job")
    assert code == 2, "the folder applies only to its own command"
    code, _, err = run(capsys, "train", "--resolved", "gone.yaml", "--cfg", "job")
    assert code == 2 and "--resolved=gone.yaml: expected none beside --multirun, --cfg and --info" in err
    code, out, _ = run(capsys, "plan", "-m", "parallelism=cp2", "parallelism.schedule=ring,zigzag")
    assert code == 0 and out.index("ring forward: 2 ranks") < out.index("zigzag forward: 2 ranks")
    code, _, err = run(capsys, "plan", "-m", "parallelism.schedule=ring,zigzag", "--draw", "a.png")
    assert code == 2 and "--draw=a.png: expected none beside --multirun, whose jobs would all write this file" in err


def test_a_sweep_continues_after_a_job_that_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("parallelism.context_parallel_size=3", "data.seq_length=64", "parallelism.schedule=ulysses,ring")
    code, out, err = run(capsys, "plan", "-m", *words)
    assert code == 1 and "ring forward: 3 ranks" in out
    first, last = err.splitlines()[0], err.splitlines()[-1]
    assert first.startswith("megatron-longctx plan: 3 context-parallel ranks that share the heads")
    assert last == "megatron-longctx plan: 1 of 2 jobs failed: default-ulysses. Their errors are above."


def test_a_sweep_continues_after_a_job_that_the_disk_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    def verb(arguments: argparse.Namespace) -> None:
        if arguments.settings[-1] == "run.name=default-1":
            raise OSError(errno.ENOSPC, "No space left on device")
        print(arguments.settings[-1])

    with pytest.raises(JobFailed, match="1 of 2 jobs failed: default-1"):
        hydra_options.run(cli.parse(["plan", "-m", "train.seed=1,2"]), verb)
    said = capsys.readouterr()
    assert "No space left" in said.err and "run.name=default-2" in said.out.splitlines()[-1]


def test_shell_completion_of_settings() -> None:
    from megatron_longctx.cli.hydra_options import complete_settings

    assert {"experiment=", "train.steps=", "parallelism.schedule="} <= set(complete_settings("tr"))
    assert {"experiment=demo", "experiment=compare_modes"} <= set(complete_settings("experiment=d"))
    assert "parallelism.schedule=auto" in set(complete_settings("parallelism.schedule="))
    assert set(complete_settings("train.save=t")) == {"train.save=true", "train.save=false"}


def test_keys_are_printed_with_default_bounds_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "keys", "save_interval")
    assert code == 0
    assert out.startswith(
        "train.save_interval=null   (an integer, at least 1 and at most 1,000,000,000, or null)\n    steps;"
    )
    code, out, _ = run(capsys, "keys", "run.name", "run.root", "dispersed")
    assert [line.split("=")[0] for line in out.splitlines() if line[0] != " "] == ["run.name", "run.root"]
    code, out, _ = run(capsys, "keys", "checkpoint")
    assert "train.keep_checkpoints=null" in out and "train.async_save=true   (true or false)" in out, "in the meaning"
    assert len(run(capsys, "keys")[1].splitlines()) > 150
    code, out, err = run(capsys, "keys", "train.stepz")
    assert (code, out) == (2, "") and "Nearest: train.steps" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "runs/a", "sample=4"], "key of the configuration, or one of checkpoint, iteration, lengths,"),
        (["eval", "runs/a", "sample=4"], "there is none of this name. Nearest: samples,"),
        (["generate", "runs/a", "promt=x"], "Nearest: prompt, prompt_file"),
        (["export", "runs/a", "oot=x"], "oot: expected a key of the configuration, or one of checkpoint, out,"),
        (["import", "model", "ot=runs/x"], "ot: expected a key of the configuration, or one of out; there is none"),
        (["eval", "runs/a", "checkpoint=runs/b"], "checkpoint=runs/b: expected it once; runs/a is given as well"),
        (["eval", "runs/a", "runs/b"], "runs/b: expected a setting of the form"),
        (["eval"], "checkpoint=: expected RUN or checkpoint=RUN, a run's folder"),
    ],
)
def test_the_words_of_a_verb_are_suggested_and_a_run_may_be_a_plain_word(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_longctx.training.compose import RESOLVED, compose_config, save_config

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/a").mkdir(parents=True)
    save_config(compose_config([]), tmp_path / "runs/a" / RESOLVED)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "") and message in err


@pytest.mark.parametrize("verb", ["eval", "generate", "serve", "export", "logprobs"])
def test_a_plain_word_is_the_run(
    verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prompt = ["prompt=x"] if verb == "generate" else []
    code, _, err = run(capsys, verb, "runs/gone", *prompt)
    assert code == 2 and "runs/gone/resolved.yaml: expected a run's configuration there" in err


def test_the_exit_code_of_plan_is_whether_the_step_fits_with_the_selected_mode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("parallelism=cp4", "parallelism.schedule=auto", "parallelism.cluster=h200_x8", "data.seq_length=4096")
    code, out, _ = run(capsys, "plan", *words, "--memory", "--device-gib", "100")
    assert code == 0 and "parallelism.schedule=auto takes " in out and "a step fits" in out
    code, out, _ = run(capsys, "plan", *words, "--memory", "--device-gib", "0.01")
    assert code == 1 and "a step does not fit" in out
