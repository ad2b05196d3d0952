"""Train several cases on the same ranks: `python -m analysis.training_cases CASES.yaml OUT [--ranks N]`.

CASES.yaml has a title, settings shared by all cases (as on the command line of `megatron-longctx train`) and settings
of every case. Every case becomes an ordinary run folder under `run.root`. All run one after the other in the same
processes, which compile and choose kernels once. `documents:` may name datasets to make if they are missing, from text
that is cut into documents of drawn lengths (`analysis.benchmarks.cases.dataset_documents`), for example
`data/x: {kind: log_normal, tokens: 1000000}`. OUT.json and OUT.md record the runs as `analysis.record` does. A case
that fails ends the job; earlier cases are recorded. The word `baseline=te_p2p` (or te_all_gather, te_a2a) in a case
replaces this project's attention by TransformerEngine's context parallelism, on GPUs.
"""

import argparse
import gc
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from analysis import transformer_engine
from analysis.benchmarks.cases import dataset_documents
from analysis.record import read_run, write
from analysis.transformer_engine import BASELINES
from megatron_longctx.config import Config, data_parallel_size
from megatron_longctx.config.gpus import max_gpu_ranks
from megatron_longctx.core.errors import refuse
from megatron_longctx.mcore.model import padded_vocab_size
from megatron_longctx.mcore.tokenizer import build_tokenizer
from megatron_longctx.planner import memory
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.preflight import check
from megatron_longctx.training.ranks import run_ranks
from megatron_longctx.training.run_folder import RunFolder
from megatron_longctx.training.text import Source, prepare, prepare_missing

_BASELINE = "baseline="


@dataclass(frozen=True)
class Cases:
    """The contents of a file of cases; each case is named by its run, and `documents` are datasets by prefix.

    baselines: TransformerEngine's attention in place of ours, keyed by the name of the case.
    """

    title: str
    note: str
    configs: tuple[Config, ...]
    documents: Mapping[str, Mapping[str, Any]]
    baselines: Mapping[str, str]


def read_cases(path: Path) -> Cases:
    """Return the cases of a file."""
    try:
        contents: Any = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise refuse("cases", path, "a readable YAML file", str(error)) from error
    if not isinstance(contents, Mapping) or not isinstance(contents.get("cases"), Mapping) or "title" not in contents:
        expected = "`title:`, `shared:` and `cases:`, names with lists of settings"
        raise refuse("cases", path, expected, "See analysis/cases.")
    shared = contents.get("shared", [])
    configs, baselines = [], {}
    for name, words in contents["cases"].items():
        settings = [word for word in words if not word.startswith(_BASELINE)]
        configs.append(compose_config([*shared, *settings, f"run.name={name}"]))
        for word in set(words) - set(settings):
            baselines[name] = word.removeprefix(_BASELINE)
            if baselines[name] not in BASELINES:
                raise refuse("baseline", baselines[name], f"one of {', '.join(BASELINES)}", f"Correct case {name}.")
    title, note = str(contents["title"]), str(contents.get("note", ""))
    return Cases(title, note, tuple(configs), contents.get("documents", {}), baselines)


def make_documents(prefix: Path, kind: str, tokens: int) -> None:
    """Write a dataset of byte-level tokens: text of the standard library in documents of a kind."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    lengths = dataset_documents(kind, tokens)
    with tempfile.TemporaryDirectory(dir=prefix.parent) as folder:
        source = Path(folder) / "documents.jsonl"
        with source.open("w") as file:
            for text in _cut(lengths):
                file.write(json.dumps({"text": text}) + "\n")
        prepare(Source(str(source)), prefix, "byte-level")


def _cut(lengths: Sequence[int]) -> Iterator[str]:
    """Yield texts of these lengths in bytes, minus the token that ends a document; the library is repeated."""
    files = cycle(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    left = ""
    for length in lengths:
        while len(left) < length:
            left += next(files).read_text(encoding="utf-8", errors="ignore").encode("ascii", "ignore").decode()
        yield left[: length - 1]
        left = left[length - 1 :]


def train_case(config: Config, baseline: str | None = None) -> dict[str, Any]:
    """Train a case on this rank in an ordinary run folder, and return its record; free the device's memory."""
    from megatron_longctx.mcore import groups
    from megatron_longctx.mcore.sequence import build_sequence
    from megatron_longctx.training.launcher import configure_logging
    from megatron_longctx.training.loop import Trainer
    from megatron_longctx.training.signals import StopRequest

    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    folder = RunFolder.of(config)
    if dist.get_rank() == 0:
        folder.prepare(config, None)
    dist.barrier()
    configure_logging(folder.log, dist.get_rank())
    build = build_sequence if baseline is None else partial(transformer_engine.build_sequence, baseline)
    try:
        Trainer(config, folder, StopRequest(), build_sequence=build).train()
    finally:
        groups.destroy()
    for _ in range(2):  # FP8 weights have methods in their own dictionaries, so they and their gradients take two
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if dist.get_rank():
        return {}
    recorded = read_run(folder.path)
    recorded["config"]["attention"]["baseline"] = baseline
    return recorded


def _rank(rank: int, cases: Cases, out: Path) -> None:
    """Train and record every case."""
    recorded = []
    for config in cases.configs:
        recorded.append(train_case(config, cases.baselines.get(config.run.name)))
        if rank == 0:
            write(recorded, out, cases.title, cases.note)


def predict(config: Config, ranks: int) -> None:
    """Write the predicted peak of the allocator's memory into the run's folder, for the table."""
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    vocab_size = padded_vocab_size(config.model, tokenizer.vocab_size)
    job = memory.Job(config, vocab_size, data_parallel_size(config, ranks), fused=torch.cuda.is_available())
    path = RunFolder.of(config).path
    path.mkdir(parents=True, exist_ok=True)
    gib = memory.predict(job).allocated_bytes / 2**30
    (path / "prediction.json").write_text(json.dumps({"predicted_peak_gib": gib}) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases and record them; return 2 if they are refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("out", type=Path, help="path of the result, without suffix")
    parser.add_argument("--ranks", type=int, help="ranks to start (default: one per GPU, or as many as the cases need)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="time limit for all cases, in seconds")
    arguments = parser.parse_args(argv)
    try:
        cases = read_cases(arguments.cases)
        gpus = max_gpu_ranks()
        ranks = arguments.ranks or gpus or max(c.parallelism.model_parallel_size for c in cases.configs)
        for prefix, kind in cases.documents.items():
            if not Path(f"{prefix}.bin").exists():
                make_documents(Path(prefix), **kind)
        for config in cases.configs:
            prepare_missing(config.data)
            check(config, ranks)
            predict(config, ranks)
    except ValueError as error:
        print(f"training_cases: {error}", file=sys.stderr)
        return 2
    backend = "nccl" if gpus else "gloo"
    run_ranks(_rank, ranks, cases, arguments.out, backend=backend, timeout=arguments.timeout)
    print(f"{arguments.out}.json, {arguments.out}.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
