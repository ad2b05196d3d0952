"""The `submit` verb: submit a Slurm job with a configuration composed here, and with a copy of the current code.

What the job asks for is compared with what its partition can give.
"""

from __future__ import annotations

import datetime
import difflib
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ..config import Config, environment
from ..config.cluster import GIB
from ..config.files import bundled
from ..config.gpus import other_nodes
from ..core.errors import JobFailed, refuse
from ..mcore.model import padded_vocab_size
from ..mcore.tokenizer import build_tokenizer
from ..planner import memory
from ..planner.step_time import predicted_step_s
from ..serving.inference_job import checkpoint_of
from ..training import launcher
from ..training.compose import RESOLVED, compose_config, load_config, override_config, save_config
from ..training.launcher import Job as TrainingJob
from ..training.run_folder import RunFolder
from ..training.sweep import sweep
from ..training.text import Source, check
from . import conversion

_PACKAGE = Path(__file__).resolve().parents[1]
_ON_RANKS = {"eval": ".evaluate:job_of", "logprobs": ".evaluate:logprobs_job", "serve": "..serving.serve:job_of"}
"""Verbs that run on every task of a job, and what makes their jobs. Other verbs run in one process."""
_ON_A_HOST = {"data": 0, "import": 0, "export": 0, "calibrate": 8}
"""The GPUs of a node for verbs that run in one process."""


@dataclass(frozen=True)
class _Job:
    """A job to submit."""

    kind: str  # `train`, `sweep`, `serve` or `run`: the launch script
    run: Path  # the folder of its log and copies
    configs: dict[str, Config]  # to write beside the code, keyed by file name; several are the tasks of an array
    words: tuple[str, ...] = ()  # arguments of the script, after those for `configs`
    options: tuple[str, ...] = ()  # of `sbatch`, over those of the script


def submit(kind: str, words: Sequence[str], dry_run: bool, parse: Callable[[Sequence[str]], Namespace]) -> None:
    """Compose the configuration, refuse what cannot run, copy the code, and call `sbatch`.

    Args:
        words: options of `sbatch`, which begin with `-`, and settings; for `run`, options, a verb, and its words.
        dry_run: only print the runs and the command.
        parse: parses the command line of a verb.
    """
    job, options = _job(kind, words)
    options = [*job.options, *options]
    request = Request.of(bundled("launch") / f"{job.kind}.sbatch", options)
    check_limits(request)
    described: list[str] = []
    if job.configs:
        jobs = [launcher.preflight_only(each, request.ranks, request.gpus) for each in job.configs.values()]
        described = [_described(each) for each in jobs]
    else:
        verb, *passed = ("serve", *job.words) if job.kind == "serve" else job.words
        with other_nodes(request.gpus):
            _check_verb(parse([verb, *passed]), passed, request.ranks)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    folder = (job.run / "submitted" / stamp).absolute()
    variables = _variables(folder / "code")
    command = _sbatch(job, folder, options)
    printed = shlex.join([*(f"{name}={value}" for name, value in variables.items()), *command])
    if dry_run:
        print("\n".join([*described, printed]))
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


def _job(kind: str, words: Sequence[str]) -> tuple[_Job, list[str]]:
    """Return the job, and the user's options of `sbatch`."""
    if kind in ("run", "serve"):
        verbs = (*_ON_RANKS, *_ON_A_HOST)
        at = next((i for i, word in enumerate(words) if word in verbs), len(words))
        if kind == "run" and at == len(words):
            raise refuse("submit run", " ".join(words), f"one of the verbs {', '.join(verbs)}", "Name it last.")
        if kind == "run" and words[at] != "serve":
            return _verb_job(words[at], words[at + 1 :]), list(words[:at])
        options, settings = split_options([word for word in words if word != "serve"])
        return _verb_job("serve", settings), options
    options, settings = split_options(words)
    if kind == "train":
        config = compose_config(settings)
        return _Job(kind, RunFolder.of(config).path, {RESOLVED: config}), options
    name, jobs = sweep(settings)
    if len(jobs) == 1:
        raise ValueError("sweep: expected a setting with several values, such as parallelism.schedule=ring,zigzag.")
    configs = {f"{number}.yaml": compose_config(words) for number, words in enumerate(jobs, start=1)}
    return _Job(kind, Path(configs["1.yaml"].run.root, name), configs), options


def _verb_job(verb: str, words: Sequence[str]) -> _Job:
    """Return the job of a verb, with its nodes. Its log lies in the folder of the run that it reads, if any."""
    named = [word.removeprefix("checkpoint=") for word in words if word.startswith("checkpoint=")]
    if verb in (*_ON_RANKS, "export"):
        named += [word for word in words if "=" not in word]
    kind, passed = ("serve", tuple(words)) if verb == "serve" else ("run", (verb, *words))
    if verb not in _ON_RANKS:
        run = Path(named[0] if named else f"runs/{verb}")
        return _Job(kind, run, {}, passed, ("--ntasks-per-node=1", f"--gpus-per-node={_ON_A_HOST[verb]}"))
    run, _ = checkpoint_of({"checkpoint": named[0] if named else ""})
    settings = [word for word in words if word.startswith("parallelism")]
    par = override_config(load_config(run / RESOLVED), settings, training=False).parallelism
    ranks = par.context_parallel_size * par.tensor_parallel_size
    here = min(ranks, 8)
    nodes = (f"--nodes={-(-ranks // 8)}", f"--ntasks-per-node={here}", f"--gpus-per-node={here}")
    return _Job(kind, run, {}, passed, nodes)


def _described(job: TrainingJob) -> str:
    """Return a line with a run's sizes, memory and simulated time."""
    config, par, ranks = job.config, job.config.parallelism, job.world_size
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    vocab = padded_vocab_size(config.model, tokenizer.vocab_size)
    planned = memory.Job(config, vocab, ranks // par.model_parallel_size, fused=job.device == "cuda")
    step = predicted_step_s(planned)
    hours = 0.0 if step is None else step * config.train.steps / 3600
    time = "" if step is None else f", {step:.3g} s a step and {hours:.3g} h in all, simulated"
    return (
        f"{config.run.name}: {ranks} ranks (CP {par.context_parallel_size}, TP {par.tensor_parallel_size}, "
        f"PP {par.pipeline_parallel_size}), {par.schedule}, {config.train.steps:,} steps of "
        f"{config.train.global_batch_size * config.data.seq_length:,} tokens, "
        f"{memory.predict(planned).num_bytes / GIB:.1f} GiB a rank{time}"
    )


def _check_verb(arguments: Namespace, words: Sequence[str], ranks: int) -> None:
    """Refuse a verb that would be refused on the nodes."""
    verb = arguments.verb
    if verb in _ON_RANKS:
        module, _, job_of = _ON_RANKS[verb].partition(":")
        job = getattr(import_module(module, __package__), job_of)(words)
        if job.world_size != ranks:
            expected = f"{job.world_size} tasks: parallelism.context_parallel_size x tensor_parallel_size"
            raise refuse("--ntasks", ranks, expected, "Leave out the numbers of nodes, tasks and GPUs.")
    elif verb == "import":
        conversion.import_model(arguments.source, arguments.settings, check_only=True)
    elif verb == "export":
        conversion.export_model(arguments.words, check_only=True)
    elif verb == "calibrate":
        compose_config(arguments.settings)
    else:
        source = Source.of(arguments.source, arguments.glob, arguments.join, arguments.text_key)
        template, shared = arguments.chat_template, arguments.share_prefixes
        check(source, arguments.out, arguments.tokenizer, arguments.tokenizer_path, template, shared, arguments.workers)


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
    log = "slurm-%A_%a.log" if job.kind == "sweep" else "slurm-%j.log"
    defaults = [f"--job-name={job.run.name}", f"--output={job.run.absolute() / log}"]
    words = list(job.words)
    if job.kind == "sweep":
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
    if job.kind == "sweep":
        lines = (f"--resolved {shlex.quote(str(folder / name))}\n" for name in job.configs)
        (folder / "runs.txt").write_text("".join(lines), encoding="utf-8")
    (folder / "command.sh").write_text(f"cd {shlex.quote(os.getcwd())} &&\nenv {command}\n", encoding="utf-8")


_LETTERS = {"N": "nodes", "n": "ntasks", "p": "partition", "c": "cpus-per-task", "t": "time", "G": "gpus"}
_VARIABLES = {"SBATCH_PARTITION": "partition", "SBATCH_TIMELIMIT": "time", "SBATCH_GPUS_PER_NODE": "gpus-per-node"}


@dataclass(frozen=True)
class Request:
    """What a job asks for. gpus, cpus: of a node. time: as written. partition: names with commas, or empty."""

    nodes: int
    ranks: int
    gpus: int
    time: str
    partition: str
    cpus: int = 1

    @classmethod
    def of(cls, script: Path, options: Sequence[str]) -> Request:
        """Read `#SBATCH` lines, `sbatch`'s variables, and options; the latter win. Refuse what is no number of them."""
        lines = re.findall(r"^#SBATCH (\S+)", script.read_text(encoding="utf-8"), re.MULTILINE)
        variables = {name: os.environ[key] for key, name in _VARIABLES.items() if key in os.environ}
        given = dict(_parsed(options))
        asked = dict(_parsed(lines)) | variables | given
        nodes = _count("nodes", asked)
        gpus = _count("gres" if "gres" in given else "gpus-per-node", asked)
        if "gpus" in given:
            gpus = -(-_count("gpus", asked) // nodes)
        ranks = _count("ntasks", asked) if "ntasks" in given else nodes * _count("ntasks-per-node", asked)
        if os.environ.get("LAUNCH") == "torchrun":
            here = os.environ.get("NPROC", str(gpus))
            if not here.isdecimal() or int(here) == 0:
                raise refuse("NPROC", here, "the ranks of a node, for LAUNCH=torchrun", "Set it, or leave LAUNCH out.")
            ranks = nodes * int(here)
        elif 0 < gpus * nodes < ranks:
            remedy = "Set as many tasks as GPUs: one rank for each."
            raise refuse("--ntasks-per-node", -(-ranks // nodes), f"at most {gpus}, the GPUs of a node", remedy)
        tasks = -(-_count("ntasks", asked) // nodes) if "ntasks" in given else _count("ntasks-per-node", asked)
        cpus = tasks * _count("cpus-per-task", asked)
        return cls(nodes, ranks, gpus, asked.get("time", ""), asked.get("partition", ""), cpus)


def split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into `sbatch`'s options, which begin with `-` and may be followed by a value, and settings."""
    options: list[str] = []
    settings: list[str] = []
    for previous, word in pairwise(["", *words]):
        is_value = re.fullmatch(r"-\w|--[\w-]+", previous) and "=" not in word
        (options if word.startswith("-") or is_value else settings).append(word)
    return options, settings


def check_limits(request: Request) -> None:
    """Refuse what no partition of the request can give. Nothing is refused if `sinfo` does not answer."""
    nodes = _nodes()
    known = {each.partition.rstrip("*") for each in nodes}
    default = [each.partition.rstrip("*") for each in nodes if each.partition.endswith("*")][:1]
    refusals: list[ValueError] = []
    for name in (request.partition.split(",") if request.partition else default) if nodes else ():
        try:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                remedy = f"Did you mean {near[0]}?" if near else "`sinfo` lists them."
                raise refuse("--partition", name, f"one of {', '.join(sorted(known))}", remedy)
            _check_partition(name, request, [each for each in nodes if each.partition.rstrip("*") == name])
            return
        except ValueError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]


class _Nodes(NamedTuple):
    """Equal nodes of a partition, as `sinfo` describes them."""

    partition: str  # the default ends with `*`
    state: str
    time: str
    size: str  # how many a job may have: `1-4` or `1-infinite`
    number: str
    gres: str
    cpus: str


def _nodes() -> list[_Nodes]:
    words = ["sinfo", "--noheader", "--format=%P|%a|%l|%s|%D|%G|%c"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [_Nodes(*line.split("|")) for line in said.splitlines()]


def _check_partition(name: str, request: Request, nodes: Sequence[_Nodes]) -> None:
    of, first = f"of the partition {name}", nodes[0]
    if first.state != "up":
        raise refuse("--partition", name, f"one that is up; it is {first.state}", "Choose another: see `sinfo`.")
    if request.time and _minutes(request.time) > _minutes(first.time):
        remedy = "Lower it: a job that trains is requeued and goes on."
        raise refuse("--time", request.time, f"at most {first.time}, the time limit {of}", remedy)
    limit = first.size.rpartition("-")[2]
    most = min(sum(int(each.number) for each in nodes), int(limit) if limit.isdecimal() else request.nodes)
    if request.nodes > most:
        raise refuse("--nodes", request.nodes, f"at most {most}, the nodes that a job gets {of}", "Ask for fewer.")
    if request.gpus > (gpus := max(_gpus(each.gres) for each in nodes)):
        expected = f"at most {gpus}, the GPUs of a node {of}"
        raise refuse("--gpus-per-node", request.gpus, expected, "Ask for fewer, or choose another partition.")
    if request.cpus > (cpus := max(int(each.cpus.rstrip("+")) for each in nodes)):
        expected = f"at most {cpus}, the CPUs of a node {of}"
        raise refuse("--ntasks-per-node x --cpus-per-task", request.cpus, expected, "Lower one of them.")


def _parsed(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and value of every option: `--nodes=2`, `--nodes 2`, `-N2` or `-N 2`."""
    for word, following in pairwise([*options, "-"]):
        name, equals, value = word.lstrip("-").partition("=")
        if re.match(r"-\w", word):
            name, equals, value = _LETTERS.get(word[1], word[1]), word[2:], word[2:]
        if word.startswith("-"):
            yield name, value if equals or following.startswith("-") else following


def _count(name: str, asked: Mapping[str, str]) -> int:
    """Return a number of nodes, tasks or GPUs: the fewest of `2-4`, without the type of `h100:8` or `gpu:h100:8`."""
    value = asked.get(name, "1")
    number = str(_gpus(value)) if name == "gres" else value.split("-")[0].rpartition(":")[2]
    least = int(not name.startswith("g"))  # of GPUs there may be none
    if not number.isdecimal() or int(number) < least:
        raise refuse(f"--{name}", value, f"a number from {least} on", f"For example --{name}=2.")
    return int(number)


def _gpus(gres: str) -> int:
    """Return the GPUs of `gpu:h100:8(S:0-1),…`; `gpu` alone is one."""
    counts = re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres)
    return sum(map(int, counts)) or int("gpu" in gres.split(","))


def _minutes(time: str) -> float:
    """Return the minutes of Slurm's `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`; infinity for no limit."""
    if time.lower() in ("infinite", "unlimited"):
        return float("inf")
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        raise refuse("--time", time, "minutes, H:M:S or D-H:M:S", "For example --time=12:00:00.")
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (60.0, 1.0, 1 / 60) if dash or len(parts) == 3 else (1.0, 1 / 60)
    return 1440 * int(days or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))
