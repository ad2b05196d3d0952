"""What a Slurm job asks for, by its script and `sbatch`'s options, and whether its partition can give it."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ..core.errors import refuse

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
        """Read the `#SBATCH` lines of a script, `sbatch`'s variables, and options; the latter win.

        Raises:
            ValueError: something that is no number, or fewer GPUs than ranks.
        """
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
