"""The jobs of inference verbs: a run's checkpoint and settings, and the ranks that run it.

Every rank makes the same calls. Rank 0 is the process that was started, so that it has the terminal.
"""

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..config import Config
from ..config.gpus import for_other_nodes, max_gpu_ranks
from ..config.progress import Progress
from ..core.errors import JobFailed, refuse
from ..inference.engine import LongContextEngine
from ..inference.memory import check_cache
from ..mcore import checkpoint_folder, groups
from ..mcore.inference import build_engine, inference_config, tensor_size_of_experts, with_length
from ..mcore.model import RETRAINABLE, padded_vocab_size
from ..mcore.tokenizer import build_tokenizer
from ..training import forks
from ..training.compose import RESOLVED, check_names, load_config, override_config
from ..training.preflight import (
    check_delta_kernels,
    check_kernel,
    check_saved_weights,
    device_bytes,
    device_type,
    host_bytes,
)
from ..training.ranks import RankFailed, RankProcesses, exit_with_parent, explain_failure, quiet_fork, stopped_ranks
from ..training.rendezvous import RankInfo, connect_store, host_store, join_group, listen, rendezvous_store
from ..training.signals import blocked

_GRACE_S = 5.0
_OWN_ERROR_WITHIN_S = 30.0
_POLL_S = 0.2
_STOPPED, _ENDED = "longctx/stopped", "longctx/ended"
"""Keys of the store: rank 0 has been stopped, and how many other ranks know."""
_SIZES = ("context_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_READ = tuple(f"parallelism.{key}" for key in (*_SIZES, "timeout_s"))
"""The keys of `parallelism` that inference reads."""
_UNREAD = ("optim.", "logging.", "run.", "train.steps=", "train.save")
"""Beginnings of settings that only training reads."""


class Stopped(BaseException):
    """Raised by the work of rank 0 to end all ranks at once and without an error."""


@dataclass(frozen=True)
class InferenceJob:
    """A model to run."""

    config: Config
    checkpoints: Path
    iteration: int | None = None
    options: Any = None  # the verb's own

    @property
    def world_size(self) -> int:
        par = self.config.parallelism
        return par.context_parallel_size * par.tensor_parallel_size

    @property
    def timeout_s(self) -> float:
        return self.config.parallelism.timeout_s


Work = Callable[[InferenceJob, Any], None]
"""What every rank runs with its process groups; it can be pickled."""


def split_arguments(words: Sequence[str], own_keys: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split words into the verb's own, by key, and settings. A plain word, as `runs/first`, is the `checkpoint`.

    Refuse an own word that is given twice, and a setting of an unknown name.
    """
    own: dict[str, str] = {}
    settings = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals and "checkpoint" in {*own_keys} - {*own}:
            key, value = "checkpoint", word
        elif not equals or key not in own_keys:
            settings.append(word)
            continue
        if key in own:
            raise refuse(key, value, f"it once; {own[key]} is given as well", "Leave one out.")
        own[key] = value
    check_names(settings, own_keys)
    return own, settings


def refuse_unread(settings: Sequence[str]) -> None:
    """Refuse settings of attention that only training reads."""
    for word in settings:
        key, _, value = word.partition("=")
        if key == "attention.transport":
            raise refuse(key, value, "inference.transport, which inference reads instead", "Set that.")
        if key.startswith("parallelism.") and key not in _READ:
            remedy = "Leave it out; inference.mode says how ranks share attention over the cache."
            raise refuse(key, value, f"one of {', '.join(_READ)} for inference", remedy)


def checkpoint_of(own: Mapping[str, str]) -> tuple[Path, int | None]:
    """Return the folder and the number of `checkpoint=RUN` and `iteration=N`; `best` is that of `train.keep_best`.

    Refuse if `checkpoint` is missing, `iteration` is not a number, or there is no best one.
    """
    if not own.get("checkpoint"):  # an empty one would be the current folder
        raise refuse("checkpoint", "", "RUN or checkpoint=RUN, a run's folder", "Give runs/NAME of a training run.")
    run, iteration = Path(own["checkpoint"]), own.get("iteration")
    if iteration == "best":
        if (best := checkpoint_folder.best(run / "checkpoints")) is None:
            expected = f"a run with train.keep_best=true; {run} has no {checkpoint_folder.BEST}"
            raise refuse("iteration", iteration, expected, "Give a number, or leave it out for the latest.")
        return run, best[1]
    if iteration is not None and not (iteration.isdecimal() and len(iteration) < 13):
        raise refuse("iteration", iteration, "a number or best", "Leave it out for the latest.")
    return run, None if iteration is None else int(iteration)


def build_job(
    own: Mapping[str, str],
    settings: Sequence[str],
    options: Any = None,
    adapted: Callable[[Config], Config] = inference_config,
) -> InferenceJob:
    """Return the job of `checkpoint=RUN` and `iteration=N`. Refuse what cannot be used, as far as one process can tell.

    `adapted` adapts the run's configuration, with the settings applied, to the verb.
    """
    run, iteration = checkpoint_of(own)
    for key, _, value in (word.partition("=") for word in settings if word.startswith(_UNREAD)):
        raise refuse(key, value, "no value here: only training reads it", "Leave it out.")
    loaded = load_config(run / RESOLVED)
    # Drop training's own sizes.
    parallelism = replace(
        loaded.parallelism,
        pipeline_parallel_size=1,
        data_parallel_size=None,
        sequence_parallel=False,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=tensor_size_of_experts(loaded.model),
    )
    config = adapted(override_config(replace(loaded, parallelism=parallelism), settings, training=False))
    config = with_length(config, loaded)
    check_saved_weights("checkpoint", run, config, iteration, ignore=RETRAINABLE)
    job = InferenceJob(config, run / "checkpoints", iteration, options)
    device = device_type(config)
    check_kernel(config, device)
    check_delta_kernels(config, device, backward=False)
    alone = RankInfo.from_environment(os.environ) is None and not for_other_nodes()
    if device == "cuda" and job.world_size > max_gpu_ranks() and alone:
        sizes = "parallelism.context_parallel_size x tensor_parallel_size"
        raise refuse(sizes, job.world_size, f"at most {max_gpu_ranks()}, the GPUs here", "Set them lower.")
    return job


def start(job: InferenceJob, work: Work, first: Work | None = None) -> None:
    """Run `work` on every rank, on this host or as torchrun or Slurm has started them. Rank 0 runs `first` instead, if
    it is given, which need not be pickled.

    Raises ValueError: `work` raised it on all ranks. Raises JobFailed: another rank ended.
    """
    if job.config.train.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    place = RankInfo.from_environment(os.environ)
    if place is not None:
        if place.world_size != job.world_size:
            expected = f"context x tensor = {job.world_size}"
            raise refuse("world size", place.world_size, expected, "Start that many ranks.")
        place.export(os.environ)
        with Progress(f"waiting for {place.world_size} ranks", told=place.rank == 0):
            join_group(place, rendezvous_store(place, job.timeout_s), job.timeout_s, torch.cuda.is_available())
        with _stopped_together(place):
            _work(job, first or work)
        dist.destroy_process_group()
        return
    with suppress(Stopped), _ranks(job, work):
        _work(job, first or work)


@contextmanager
def _stopped_together(place: RankInfo) -> Iterator[None]:
    """When the work of rank 0 raises Stopped, all ranks that torchrun or Slurm started end without an error.

    The other ranks then wait for rank 0 in the middle of a round, where nothing but the end of their process helps.
    """
    store = distributed_c10d._get_default_store()
    if place.rank:
        threading.Thread(target=_end_when_stopped, args=(store,), name="end with rank 0", daemon=True).start()
    try:
        yield
    except Stopped:
        store.set(_STOPPED, "1")
        deadline = time.monotonic() + _GRACE_S
        while store.add(_ENDED, 0) < place.world_size - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _end_when_stopped(store: distributed_c10d.Store) -> None:
    with suppress(RuntimeError):  # the store ended: so did rank 0, with its own error
        while not store.check([_STOPPED]):
            time.sleep(_POLL_S)
        store.add(_ENDED, 1)
        os._exit(0)


def check_memory(job: InferenceJob) -> None:
    """Raise ValueError if the cache does not fit into a GPU, or into a rank's part of this host's memory."""
    on_gpus = device_type(job.config) == "cuda"
    capacity = device_bytes(job.config) if on_gpus else host_bytes(job.world_size)
    if capacity is not None:
        tokenizer = build_tokenizer(job.config.data.tokenizer, job.config.data.tokenizer_path)
        check_cache(job.config, padded_vocab_size(job.config.model, tokenizer.vocab_size), capacity)


@contextmanager
def _ranks(job: InferenceJob, work: Work) -> Iterator[None]:
    """Run the other ranks while the context is open; this process is rank 0."""
    listener, joined, ended = listen(), threading.Event(), threading.Event()
    # A terminal sends Ctrl-C to all processes. This one then ends the others. If they ended first, it would wait for
    # them in the process group, where nothing interrupts it. So SIGINT is blocked in them from the beginning; one that
    # arrives meanwhile reaches this process afterwards.
    with blocked((signal.SIGINT,)):
        how = forks.start_method() if job.world_size > 1 else "fork"
        args = job, work, listener
        others = RankProcesses(_other_rank, args, range(1, job.world_size), start_method=how, daemon=True)
    store = host_store(listener, job.timeout_s)  # it starts threads
    threading.Thread(target=_end_with, args=(others, joined, ended), name="end with ranks", daemon=True).start()
    try:
        with Progress(f"starting {job.world_size} ranks"):
            join_group(RankInfo.local(0, job.world_size), store, job.timeout_s, torch.cuda.is_available())
        joined.set()
        yield
        dist.barrier()
    except (KeyboardInterrupt, Stopped, JobFailed):  # others are in the middle of a round, and would report this end
        others.kill()
        raise
    except RuntimeError as error:  # raised by the process group for a broken connection, or a rank that hangs
        ended.set()
        message = str(error)
        try:
            others.wait(_GRACE_S)
        except RankFailed as failed:
            message = f"{failed.summary}\nrank 0 failed: {error}"
        message = explain_failure(message, stopped_ranks([os.getpid(), *others.pids]), job.timeout_s)
        if message == str(error):
            raise
        raise JobFailed(message) from error
    finally:
        ended.set()
        if dist.is_initialized():
            dist.destroy_process_group()
        others.end(_GRACE_S)


def _end_with(others: RankProcesses, joined: threading.Event, ended: threading.Event) -> None:
    """End this process when another rank has failed, as a thread: nothing else interrupts its wait for that rank.

    Args:
        joined: set once a broken connection may raise an error in this rank, which then ends in order.
        ended: set when this rank ends.
    """
    try:
        others.wait()
    except RankFailed as failed:
        if not ended.wait(_OWN_ERROR_WITHIN_S if joined.is_set() else 0.0):
            os.write(2, f"megatron-longctx: {failed.summary}\n".encode())
            os._exit(1)


def _other_rank(rank: int, job: InferenceJob, work: Work, listener: socket.socket) -> None:
    exit_with_parent()
    quiet_fork()
    with listener:
        port = listener.getsockname()[1]
    place, store = RankInfo.local(rank, job.world_size), connect_store(port, job.timeout_s)
    join_group(place, store, job.timeout_s, torch.cuda.is_available())
    _work(job, work)  # refusals are raised by rank 0 as well, which reports them
    dist.barrier()
    dist.destroy_process_group()


def _work(job: InferenceJob, work: Work) -> None:
    par = job.config.parallelism
    collection = groups.initialize(
        tensor=par.tensor_parallel_size,
        context=par.context_parallel_size,
        expert_tensor=par.expert_tensor_parallel_size,
    )
    gc.freeze()  # what is imported stays; a full collection of it, as before every CUDA graph, takes half a second
    try:
        work(job, collection)
    finally:
        gc.unfreeze()
        groups.destroy()


@contextmanager
def open_engine(job: InferenceJob, collection: Any) -> Iterator[tuple[LongContextEngine, Any]]:
    """Build the engine and the tokenizer of the job's checkpoint, for the time of the context. All ranks call it."""
    with Progress("loading the checkpoint", told=dist.get_rank() == 0):
        engine, tokenizer = build_engine(job.config, collection, job.checkpoints, job.iteration)
    try:
        yield engine, tokenizer
    finally:
        engine.release()
