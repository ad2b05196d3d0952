"""The `submit` verb: submit a Slurm job with a configuration composed here, and with a copy of the current code."""

from __future__ import annotations

import datetime
import itertools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import Config, environment
from ..config.files import bundled
from ..core.errors import JobFailed, refuse
from ..training.compose import RESOLVED, compose_config, load_config, save_config
from ..training.run_folder import RunFolder
from ..training.sweep import sweep

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class _Job:
    """A job to submit.

    Attributes:
        kind: `train`, `serve` or `sweep`: the launch script.
        run: the folder of its log and copies.
        configs: configurations to write beside the code, keyed by file name; several are the tasks of an array.
        words: arguments of the script, after those for `configs`.
    """

    kind: str
    run: Path
    configs: dict[str, Config]
    words: tuple[str, ...] = ()

    @property
    def array(self) -> bool:
        return self.kind == "sweep"


def submit(kind: str, words: Sequence[str], dry_run: bool) -> None:
    """Compose the configuration, copy the code, and call `sbatch`.

    Args:
        kind: `train`, `serve` or `sweep`.
        words: options of `sbatch`, which begin with `-`, and settings.
        dry_run: only print the command.
    """
    for option, value in itertools.pairwise(words):
        if option.startswith("-") and not value.startswith("-") and not {*"=/"} & {*option, *value}:
            joined = f"{option}={value}" if option.startswith("--") else f"{option}{value}"
            raise refuse("word", f"{option} {value}", "options of sbatch as one word each", f"Write {joined}.")
    options = [word for word in words if word.startswith("-")]
    settings = [word for word in words if not word.startswith("-")]
    job = _job(kind, settings)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    folder = (job.run / "submitted" / stamp).absolute()
    variables = _variables(folder / "code")
    command = _sbatch(job, folder, options)
    printed = shlex.join([*(f"{name}={value}" for name, value in variables.items()), *command])
    if dry_run:
        print(printed)
        return
    try:
        _write(job, folder, printed)
    except OSError as error:
        expected = f"to be able to write there ({error.strerror or error})"
        raise refuse("run.root", job.run, expected, "Set it.") from error
    try:
        output = subprocess.run(command, env=os.environ | variables, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise JobFailed("sbatch is not on PATH: submit where Slurm's commands are, or look with --dry-run") from None
    except subprocess.CalledProcessError as error:
        raise JobFailed(f"sbatch refused the job: {error.stderr.strip()}") from None
    print(f"{output.strip()}\ncode, configuration and command: {folder}\nlog and status.json: {job.run}")


def _job(kind: str, settings: Sequence[str]) -> _Job:
    if kind == "train":
        config = compose_config(settings)
        return _Job(kind, RunFolder.of(config).path, {RESOLVED: config})
    if kind == "serve":
        run = dict(word.split("=", 1) for word in settings if "=" in word).get("checkpoint")
        if not run:
            raise refuse("checkpoint", "", "checkpoint=RUN, the folder of a run", "Give runs/NAME of a training run.")
        load_config(Path(run, RESOLVED))
        return _Job(kind, Path(run), {}, tuple(settings))
    jobs = sweep(settings)
    if len(jobs.jobs) == 1:
        raise ValueError("sweep: expected a setting with several values, such as parallelism.schedule=ring,zigzag.")
    configs = {f"{number}.yaml": compose_config(words) for number, words in enumerate(jobs.jobs, start=1)}
    return _Job(kind, Path(configs["1.yaml"].run.root, jobs.name), configs)


def _variables(code: Path) -> dict[str, str]:
    """Return the job's environment variables: import the copied code, its commit, and this virtual environment."""
    paths = [str(code), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    if (commit := environment.commit()) is not None:
        variables["LONGCTX_COMMIT"] = commit
    if "VENV" not in os.environ and Path(sys.prefix, "bin", "megatron-longctx").exists():
        variables["VENV"] = sys.prefix
    return variables


def _sbatch(job: _Job, folder: Path, options: Sequence[str]) -> list[str]:
    log = "slurm-%A_%a.log" if job.array else "slurm-%j.log"
    defaults = [f"--job-name={job.run.name}", f"--output={job.run.absolute() / log}"]
    words = list(job.words)
    if job.array:
        defaults.append(f"--array=1-{len(job.configs)}")
        words = [str(folder / "runs.txt")]
    elif job.configs:
        words = ["--resolved", str(folder / RESOLVED)]
    script = folder / "code" / bundled("launch").relative_to(_PACKAGE.parent) / f"{job.kind}.sbatch"
    return ["sbatch", *defaults, *options, str(script), *words]


def _write(job: _Job, folder: Path, command: str) -> None:
    """Write the code, the configurations and the command into `folder`."""
    code = folder / "code"
    for source in (_PACKAGE, bundled("recipes"), bundled("launch")):  # beside the package, or inside it
        target = code / source.relative_to(_PACKAGE.parent)
        if not target.exists():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    if (_PACKAGE.parent / "pyproject.toml").is_file():
        shutil.copy(_PACKAGE.parent / "pyproject.toml", code)  # so that the copy uses its own `recipes`
    for name, config in job.configs.items():
        save_config(config, folder / name)
    if job.array:
        lines = (f"--resolved {shlex.quote(str(folder / name))}\n" for name in job.configs)
        (folder / "runs.txt").write_text("".join(lines), encoding="utf-8")
    (folder / "command.sh").write_text(f"cd {shlex.quote(os.getcwd())} &&\nenv {command}\n", encoding="utf-8")
