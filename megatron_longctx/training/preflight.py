"""Everything that can be refused before a rank starts."""

from __future__ import annotations

import logging
import os

import torch

from .. import memory
from ..compose import load_config
from ..config import Config, data_parallel_size, refuse
from ..kernels import AUTO_ORDER, KernelRequest, available
from ..mcore import checkpoint
from ..mcore.data import check_corpus, mend_cache
from ..mcore.model import fingerprint, padded_vocab_size, uses_transformer_engine
from ..mcore.spec import require_transformer_engine
from ..mcore.tokenizer import build_tokenizer
from ..schedules import PlanOptions, build_plan, check_heads
from .run_folder import RunFolder

logger = logging.getLogger(__name__)


def device_type(config: Config) -> str:
    """`cuda` or `cpu`, as `train.device` asks and the machine has.

    Raises:
        ValueError: CUDA asked for and not there.
    """
    if config.train.device == "cuda" and not torch.cuda.is_available():
        raise refuse(
            "train.device", "cuda", "a CUDA device here; torch sees none", "Set train.device=cpu, or see doctor."
        )
    return "cuda" if torch.cuda.is_available() and config.train.device != "cpu" else "cpu"


def local_world_size(config: Config) -> int:
    """Ranks to start on this host when nobody else says: one per GPU, or on CPU the fewest that the sizes ask for."""
    if config.train.num_processes is not None:
        return config.train.num_processes
    if device_type(config) == "cuda":
        return torch.cuda.device_count()
    return config.parallelism.model_parallel_size * (config.parallelism.data_parallel_size or 1)


def check(config: Config, world_size: int) -> int | None:
    """Refuse a job that cannot run.

    Returns:
        the step that the run resumes from; None for a new one.

    Raises:
        ValueError: names the value, what was expected and what to do.
    """
    device = device_type(config)
    data_parallel_size(config, world_size)
    _check_kernel(config, device)
    if device == "cpu" and config.attention.transport == "peer":
        raise refuse("attention.transport", "peer", "auto or p2p on CPUs", "Only GPUs read each other's memory.")
    if uses_transformer_engine(config.model):
        require_transformer_engine()
    par = config.parallelism
    options = PlanOptions.of(par)
    heads = (config.model.num_attention_heads, config.model.num_kv_heads)
    tp = par.tensor_parallel_size
    check_heads(par.schedule, par.context_parallel_size, heads[0] // tp, heads[1] // tp, options)
    build_plan(par.schedule, par.context_parallel_size, config.data.seq_length, True, options)
    check_corpus(config.data)
    mend_cache(config.data.prefix)
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    vocab_size = padded_vocab_size(config.model, tokenizer.vocab_size)
    if device == "cuda" and config.train.check_memory:
        _check_memory(config, world_size, vocab_size)
    folder = RunFolder.of(config)
    try:
        resumed = checkpoint.check(folder.checkpoints, fingerprint(config, vocab_size))
    except OSError as error:
        raise folder.unusable(error, config.run.root) from error
    if resumed is not None:
        _check_batch(config, folder)
    return resumed


def _check_memory(config: Config, world_size: int, vocab_size: int) -> None:
    """Refuse, or warn of, what the devices here cannot hold."""
    job = memory.Job(config, vocab_size, data_parallel_size(config, world_size))
    capacity = torch.cuda.get_device_properties(0).total_memory
    ranks_here = min(world_size, torch.cuda.device_count())
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_here
    logger.info(memory.summary(job))
    if warning := memory.check(job, capacity, host):
        logger.warning(warning)


def _check_batch(config: Config, folder: RunFolder) -> None:
    """Refuse another batch size than the run's own, since the order of samples goes by it."""
    try:
        earlier = load_config(folder.resolved).train.global_batch_size
    except ValueError:  # missing, or of another version: the checkpoint itself is asked when it is loaded
        return
    if earlier != config.train.global_batch_size:
        raise refuse(
            "train.global_batch_size",
            config.train.global_batch_size,
            f"{earlier}, with which {folder.path} has been trained so far",
            "Set it back, or start a run of another run.name.",
        )


def _check_kernel(config: Config, device: str) -> None:
    model, tp, name = config.model, config.parallelism.tensor_parallel_size, config.attention.kernel
    request = KernelRequest(
        device_type=device,
        dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
        head_dim=model.kv_channels,
        num_heads=model.num_attention_heads // tp,
        num_kv_heads=model.num_kv_heads // tp,
        deterministic=config.attention.deterministic,
    )
    reasons = dict(
        available(request)
    )  # not `choose`, which also says what it took: that is for rank 0 and the run's log
    usable = [kernel for kernel, reason in reasons.items() if reason is None]
    candidates = AUTO_ORDER[device] if name == "auto" else (name,)
    if not any(kernel in usable for kernel in candidates):
        why = "; ".join(f"{kernel}: {reasons[kernel]}" for kernel in candidates)
        raise refuse(
            "attention.kernel",
            name,
            f"a kernel that can be used here ({why})",
            f"Set attention.kernel to one of {', '.join(usable)}." if usable else "Change precision, heads or device.",
        )
