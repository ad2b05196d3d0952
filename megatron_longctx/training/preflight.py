"""Everything that can be refused before a rank starts."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path

import torch

from .. import memory
from ..config import Config, configured_mode, data_parallel_size, token_unit
from ..errors import refuse
from ..gpus import gpu_ranks, ranks_per_gpu
from ..kernels import KernelRequest, auto_order, available
from ..mcore import checkpoint
from ..mcore.corpus import check_corpus, check_tokenizer, identity
from ..mcore.data import check_packs, check_samples
from ..mcore.model import RETRAINABLE, fingerprint, padded_vocab_size, uses_transformer_engine
from ..mcore.spec import require_transformer_engine
from ..mcore.tokenizer import build_tokenizer
from ..schedules import build_plan
from . import saved_run
from .run_folder import RunFolder

logger = logging.getLogger(__name__)

_RANK_BYTES = 256 * 2**20  # of host memory that a rank takes at least, before its model
_SAMPLE_BYTES = 28  # of host memory for a token of a batch: its id, label, mask and position


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
    """Ranks to start on this host when nobody else says: one per GPU, or on CPU the fewest that the sizes ask for.

    Raises:
        ValueError: more are asked for than there are GPUs.
    """
    count, on_gpus = config.train.num_processes, device_type(config) == "cuda"
    if on_gpus and count is not None and count > gpu_ranks():
        remedy = "Leave it null for one rank per GPU."
        raise refuse("train.num_processes", count, f"at most {gpu_ranks()}, the GPUs here", remedy)
    if count is not None:
        return count
    if on_gpus:
        return gpu_ranks()
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
    _check_host(config, world_size)
    check_kernel(config, device)
    if device == "cpu" and config.attention.baseline is not None:
        raise refuse("attention.baseline", config.attention.baseline, "null on CPUs", "TransformerEngine needs GPUs.")
    if device == "cpu" and config.attention.transport == "peer":
        raise refuse("attention.transport", "peer", "auto or p2p on CPUs", "Only GPUs read each other's memory.")
    if config.logging.tensorboard and importlib.util.find_spec("tensorboard") is None:
        remedy = "Install it with pip install 'megatron-longctx[tensorboard]', or set it to false."
        raise refuse("logging.tensorboard", True, "the package tensorboard, which is not installed here", remedy)
    if uses_transformer_engine(config.model) or config.attention.baseline is not None:
        require_transformer_engine()
    par = config.parallelism
    heads = (config.model.num_attention_heads, config.model.num_kv_heads)
    tp = par.tensor_parallel_size
    mode = configured_mode(par)
    mode.check_heads(par.context_parallel_size, heads[0] // tp, heads[1] // tp)
    plan = build_plan(mode, par.context_parallel_size, config.data.seq_length, unit=token_unit(par), layout=par.layout)
    if config.data.packing != "best_fit" and not all(map(plan.queries.num_tokens, range(plan.n))):
        expected = (
            f"{2 * plan.n * token_unit(par)} or more, so that each of the {plan.n} context-parallel ranks has some"
        )
        raise refuse("data.seq_length", config.data.seq_length, expected, "Raise it, or take fewer ranks.")
    check_corpus(config.data)
    if config.train.eval_interval is not None:
        check_samples(config, 1, config.train.eval_samples, "train.eval_samples")
    check_packs(config)
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    if config.train.check_data:
        check_tokenizer(config.data, tokenizer)
    vocab_size = padded_vocab_size(config.model, tokenizer.vocab_size)
    if config.train.check_memory:
        _check_memory(config, world_size, vocab_size, device)
    folder = RunFolder.of(config)
    try:
        resumed = checkpoint.check(folder.checkpoints, fingerprint(config, vocab_size))
    except OSError as error:
        raise folder.unusable(error, config.run.root) from error
    if resumed is None:
        if config.train.init_from is not None:
            saved_run.check("train.init_from", Path(config.train.init_from), config, ignore=RETRAINABLE)
        return None
    if resumed.optimizer is None:
        remedy = f"Set another run.name, and train.init_from={folder.path}."
        raise refuse("run.name", config.run.name, f"a run that was trained; {folder.path} has weights alone", remedy)
    saved_run.check_resumed(config, folder.path, resumed, identity(config, tokenizer))
    return resumed.iteration


def host_bytes(world_size: int) -> int:
    """Memory of this host for each of its ranks."""
    env = os.environ
    ranks_here = int(env.get("LOCAL_WORLD_SIZE", world_size))
    if "LOCAL_WORLD_SIZE" not in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        ranks_here = -(-world_size // int(env.get("SLURM_STEP_NUM_NODES", "1")))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_here


def _check_host(config: Config, world_size: int) -> None:
    """Refuse more ranks, or larger batches of samples, than this host's memory can hold."""
    train, host = config.train, host_bytes(world_size)
    if host < _RANK_BYTES:
        expected = f"ranks of at least {_RANK_BYTES >> 20} MiB each on this host, which has {host >> 20} for each"
        raise refuse("world size", world_size, expected, "Lower the parallelism sizes or train.num_processes.")
    sample = config.data.seq_length * _SAMPLE_BYTES
    if sample > host:
        expected = (
            f"at most {host // _SAMPLE_BYTES} tokens, whose samples a rank's {host / 2**30:.1f} GiB of host memory hold"
        )
        raise refuse("data.seq_length", config.data.seq_length, expected, "Lower it.")
    count = train.global_batch_size // data_parallel_size(config, world_size)
    if count * sample > host:
        expected = (
            f"{host // sample} sequences a rank at most, whose samples its {host / 2**30:.1f} GiB of host memory hold"
        )
        raise refuse("train.global_batch_size", train.global_batch_size, expected, "Lower it, or data.seq_length.")


def _check_memory(config: Config, world_size: int, vocab_size: int, device: str) -> None:
    """Refuse, or warn of, what the devices here cannot hold."""
    on_gpus = device == "cuda"
    job = memory.Job(config, vocab_size, data_parallel_size(config, world_size), fused=on_gpus)
    if on_gpus:
        host = host_bytes(min(world_size, gpu_ranks()))
        logger.info(memory.summary(job))
        warning = memory.check(job, torch.cuda.get_device_properties(0).total_memory // ranks_per_gpu(), host)
    else:
        warning = memory.check(job, host_bytes(world_size))
    if warning:
        logger.warning(warning)


def check_kernel(config: Config, device: str) -> None:
    """Refuse `attention.kernel` where it, or for `auto` every provider, cannot be used on such a device.

    Raises:
        ValueError: names why, and those that can.
    """
    model, tp, name = config.model, config.parallelism.tensor_parallel_size, config.attention.kernel
    request = KernelRequest(
        device_type=device,
        dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
        head_dim=model.kv_channels,
        num_heads=model.num_attention_heads // tp,
        num_kv_heads=model.num_kv_heads // tp,
        deterministic=config.attention.deterministic,
        windows=model.window is not None,
        v_head_dim=model.v_head_dim,
    )
    # Not by `choose`, which also says what it took: that is for rank 0 and the run's log.
    reasons = dict(available(request))
    if name not in ("auto", *reasons):
        expected = ", ".join(("one of auto", *sorted(reasons)))
        raise refuse("attention.kernel", name, expected, "Set attention.kernel to one of these.")
    usable = [kernel for kernel in sorted(reasons) if reasons[kernel] is None]
    candidates = auto_order(device) if name == "auto" else (name,)
    if not any(kernel in usable for kernel in candidates):
        why = "; ".join(f"{kernel}: {reasons[kernel]}" for kernel in candidates)
        raise refuse(
            "attention.kernel",
            name,
            f"a kernel that can be used here ({why})",
            f"Set attention.kernel to one of {', '.join(usable)}." if usable else "Change precision, heads or device.",
        )
