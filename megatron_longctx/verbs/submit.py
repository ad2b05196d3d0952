"""The `submit` verb: a Slurm job of a configuration composed once, here, and of a copy of the code as it is now."""

from __future__ import annotations

import datetime
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..compose import RESOLVED, compose_config, load_config, save_config
from ..config import Config
from ..errors import JobFailed, refuse
from ..files import bundled
from ..metrics import environment
from ..sweep import sweep
from ..training.run_folder import RunFolder

KINDS = ("train", "serve", "sweep")
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Job:
    """What is submitted. run: the folder that its log and its copies go to. configs: to be written beside the code, by
    file name. array: tasks of an array, each a run of its own. words: for the script, after what `configs` becomes."""

    kind: str
    run: Path
    configs: dict[str, Config]
    array: bool = False
    words: tuple[str, ...] = ()


def submit(kind: str, words: Sequence[str], dry_run: bool) -> None:
    """Compose, copy, and call `sbatch`.

    Args:
        kind: of `KINDS`.
        words: options of `sbatch`, which begin with `-`, and settings.
        dry_run: print the command alone; writes nothing.

    Raises:
        ValueError: settings that cannot be; a folder that cannot be written.
        JobFailed: Slurm did not take the job.
    """
    options = [word for word in words if word.startswith("-")]
    settings = [word for word in words if not word.startswith("-")]
    job = {"train": _train, "serve": _serve, "sweep": _sweep}[kind](settings)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    folder = (job.run / "submitted" / stamp).absolute()
    variables = _variables(folder / "code")
    command = _sbatch(job, folder, options)
    shown = shlex.join([*(f"{name}={value}" for name, value in variables.items()), *command])
    if dry_run:
        print(shown)
        return
    try:
        _write(job, folder, shown)
    except OSError as error:
        raise refuse(
            "run.root", job.run, f"to be able to write there ({error.strerror or error})", "Set it."
        ) from error
    try:
        said = subprocess.run(command, env=os.environ | variables, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise JobFailed("sbatch is not on PATH: submit where Slurm's commands are, or look with --dry-run") from None
    except subprocess.CalledProcessError as error:
        raise JobFailed(f"sbatch refused the job: {error.stderr.strip()}") from None
    print(f"{said.strip()}\ncode, configuration and command: {folder}\nlog and status.json: {job.run}")


def _train(settings: Sequence[str]) -> Job:
    config = compose_config(settings)
    return Job("train", RunFolder.of(config).path, {RESOLVED: config})


def _serve(settings: Sequence[str]) -> Job:
    run = dict(word.split("=", 1) for word in settings if "=" in word).get("checkpoint")
    if not run:
        raise refuse("checkpoint", "", "checkpoint=RUN, the folder of a run", "Give runs/NAME of a training run.")
    load_config(Path(run, RESOLVED))
    return Job("serve", Path(run), {}, words=tuple(settings))


def _sweep(settings: Sequence[str]) -> Job:
    found = sweep(settings)
    if len(found.jobs) == 1:
        raise ValueError("sweep: expected a setting with several values, such as parallelism.schedule=ring,zigzag.")
    configs = {f"{number}.yaml": compose_config(words) for number, words in enumerate(found.jobs, start=1)}
    return Job("sweep", Path(configs["1.yaml"].run.root, found.name), configs, array=True)


def _variables(code: Path) -> dict[str, str]:
    """For the job: the copy of the code first, what commit it is of, and this environment's command."""
    paths = [str(code), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {"PYTHONPATH": os.pathsep.join(paths)}
    if (commit := environment.commit()) is not None:
        found["LONGCTX_COMMIT"] = commit
    if "VENV" not in os.environ and Path(sys.prefix, "bin", "megatron-longctx").exists():
        found["VENV"] = sys.prefix
    return found


def _sbatch(job: Job, folder: Path, options: Sequence[str]) -> list[str]:
    name = "slurm-%A_%a.log" if job.array else "slurm-%j.log"
    told = [f"--job-name={job.run.name}", f"--output={job.run.absolute() / name}"]
    words = list(job.words)
    if job.array:
        told.append(f"--array=1-{len(job.configs)}")
        words = [str(folder / "runs.txt")]
    elif job.configs:
        words = ["--resolved", str(folder / RESOLVED)]
    script = folder / "code" / bundled("launch").relative_to(_PACKAGE.parent) / f"{job.kind}.sbatch"
    return ["sbatch", *told, *options, str(script), *words]


def _write(job: Job, folder: Path, command: str) -> None:
    _copy_code(folder / "code")
    for name, config in job.configs.items():
        save_config(config, folder / name)
    if job.array:
        lines = (f"--resolved {shlex.quote(str(folder / name))}\n" for name in job.configs)
        (folder / "runs.txt").write_text("".join(lines), encoding="utf-8")
    (folder / "command.sh").write_text(f"cd {shlex.quote(os.getcwd())} &&\nenv {command}\n", encoding="utf-8")


def _copy_code(code: Path) -> None:
    """The package, its recipes and launch scripts, each where it stands: beside the package, or inside of it."""
    for source in (_PACKAGE, bundled("recipes"), bundled("launch")):
        target = code / source.relative_to(_PACKAGE.parent)
        if not target.exists():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    if (_PACKAGE.parent / "pyproject.toml").is_file():
        shutil.copy(_PACKAGE.parent / "pyproject.toml", code)  # by which the copy knows that `recipes` are its own
