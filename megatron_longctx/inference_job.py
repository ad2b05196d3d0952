"""What inference verbs share: a run's checkpoint and settings, and the ranks that serve it.

Every rank makes the same calls. Rank 0 is the process that was started, so that it has the terminal.
"""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .comm.local_ranks import end_with_parent
from .compose import RESOLVED, load_config, override_config
from .config import Config, refuse
from .inference.engine import LongContextEngine
from .inference.figures import calibration_file
from .mcore import checkpoint, groups
from .mcore.inference import build_engine, check_cache, for_inference
from .mcore.model import fingerprint, padded_vocab_size
from .mcore.tokenizer import build_tokenizer
from .topology import load_cluster
from .training.launcher import JobFailed
from .training.preflight import device_type

_HOST = "127.0.0.1"
_GRACE_S = 5.0


@dataclass(frozen=True)
class InferenceJob:
    """A model to run. options: the verb's own."""

    config: Config
    checkpoints: Path
    iteration: int | None = None
    options: Any = None

    @property
    def world_size(self) -> int:
        par = self.config.parallelism
        return par.context_parallel_size * par.tensor_parallel_size


Work = Callable[[InferenceJob, LongContextEngine, Any], None]
"""What every rank does with the engine and the tokenizer; a module-level function."""


def split_words(words: Sequence[str], own_keys: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The verb's own `key=value` words, and the settings."""
    own = {key: value for key, _, value in (word.partition("=") for word in words) if key in own_keys}
    return own, [word for word in words if word.partition("=")[0] not in own_keys]


def job_of(own: Mapping[str, str], settings: Sequence[str], options: Any = None) -> InferenceJob:
    """The job of `checkpoint=RUN` and `iteration=N`, checked as far as one process can.

    Raises:
        ValueError: a checkpoint, settings or sizes that cannot be used.
    """
    if not own.get("checkpoint"):  # an empty one would be the current folder
        raise refuse("checkpoint", "", "checkpoint=RUN, the folder of a run", "Give runs/NAME of a training run.")
    iteration = own.get("iteration")
    if iteration is not None and not (iteration.isdecimal() and len(iteration) < 13):
        raise refuse("iteration", iteration, "a number", "Leave it out for the latest.")
    run = Path(own["checkpoint"])
    loaded = load_config(run / RESOLVED)
    # Training's own sizes say nothing about these two.
    whole = replace(loaded.parallelism, pipeline_parallel_size=1, data_parallel_size=None)
    config = for_inference(override_config(replace(loaded, parallelism=whole), settings))
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    checkpoints = run / "checkpoints"
    vocab_size = padded_vocab_size(config.model, tokenizer.vocab_size)
    if checkpoint.check(checkpoints, fingerprint(config, vocab_size)) is None:
        raise refuse("checkpoint", run, "a run with a checkpoint", "Train it with train.save=true first.")
    job = InferenceJob(config, checkpoints, None if iteration is None else int(iteration), options)
    device = device_type(config)
    cluster, n = config.parallelism.cluster, config.parallelism.context_parallel_size
    if cluster and n > 1 and not calibration_file(config, torch.device(device)).is_file():
        load_cluster(cluster).resized(n)  # what attention is to be priced by can be read
    if device == "cuda" and job.world_size > torch.cuda.device_count() and "RANK" not in os.environ:
        sizes = "parallelism.context_parallel_size x tensor_parallel_size"
        raise refuse(sizes, job.world_size, f"at most {torch.cuda.device_count()}, the GPUs here", "Set them lower.")
    return job


def run(job: InferenceJob, work: Work) -> None:
    """Run `work` on every rank, of this host or as torchrun has started them.

    Raises:
        ValueError: a cache that does not fit, or what `work` raised on all ranks.
        JobFailed: another rank ended.
    """
    if job.config.train.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    check_cache(job.config, _memory_of_a_rank(job))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if world != job.world_size:
            raise refuse("world size", world, f"context x tensor = {job.world_size}", "Start that many ranks.")
        _join(job, rank, int(os.environ.get("LOCAL_RANK", "0")), None)
        _work(job, work)
        dist.destroy_process_group()
        return
    with _ranks(job, work):
        _work(job, work)


def _memory_of_a_rank(job: InferenceJob) -> int:
    """Bytes: of a GPU, or this host's share."""
    if device_type(job.config) == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", job.world_size))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_here


@contextmanager
def _ranks(job: InferenceJob, work: Work) -> Iterator[None]:
    """The other ranks, for as long as the context takes; this process is rank 0."""
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    others: list[Any] = []
    if job.world_size > 1:
        args, count = (job, work, store.port), job.world_size - 1
        # A terminal's Ctrl-C goes to all processes. This one ends the others; were they to end first, it would wait for
        # them in the process group, where nothing interrupts it. It is blocked in them from their first moment on; one
        # that comes meanwhile reaches this process afterwards.
        resource_tracker.ensure_running()  # spawn's helper, whose start would unblock it
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            others = mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
                _other_rank, args=args, nprocs=count, join=False, daemon=True, start_method="spawn"
            ).processes
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    try:
        _join(job, 0, 0, store)
        yield
        dist.barrier()
    except RuntimeError as error:  # what a broken connection is to the process group
        for process in others:
            process.join(timeout=_GRACE_S)
        failed = [process for process in others if process.exitcode]
        if not failed:
            raise
        raise JobFailed(f"another rank ended with exit code {failed[0].exitcode}: {error}") from error
    except KeyboardInterrupt:
        for process in others:
            process.kill()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for process in others:
            process.join(timeout=_GRACE_S)
            if process.is_alive():
                process.kill()


def _other_rank(index: int, job: InferenceJob, work: Work, port: int) -> None:
    end_with_parent()
    limit = datetime.timedelta(seconds=job.config.parallelism.timeout_s)
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    _join(job, index + 1, index + 1, store)
    try:
        _work(job, work)
    except ValueError:
        return  # rank 0 has met it as well, and says so
    dist.barrier()
    dist.destroy_process_group()


def _join(job: InferenceJob, rank: int, local_rank: int, store: Any) -> None:
    """Become a rank of the job's process group; without a store by torchrun's environment."""
    limit = datetime.timedelta(seconds=job.config.parallelism.timeout_s)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.world_size))
    backend = "nccl" if cuda else "gloo"
    if store is None:
        dist.init_process_group(backend, timeout=limit)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=job.world_size, timeout=limit)
    if cuda:
        dist.all_reduce(torch.zeros(1, device="cuda"))


def _work(job: InferenceJob, work: Work) -> None:
    par = job.config.parallelism
    collection = groups.initialize(tensor=par.tensor_parallel_size, context=par.context_parallel_size)
    try:
        engine, tokenizer = build_engine(job.config, collection, job.checkpoints, job.iteration)
        try:
            work(job, engine, tokenizer)
        finally:
            engine.release()
    finally:
        groups.destroy()
