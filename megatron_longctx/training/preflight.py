"""Checks of a job before its ranks start: sizes, kernels, data, memory, and the checkpoint that it resumes from.

All raise `ValueError` with the value, what was expected and what to do (`errors.refuse`).
"""

import importlib.util
import logging
import math
import os
import shutil
from importlib.metadata import version
from pathlib import Path

import torch
from packaging.version import Version

from ..config import Config, configured_mode, data_parallel_size, names_as_keys, token_unit, trained_length, workload_of
from ..config.cluster import GIB, load_cluster
from ..config.extras import install, version_of
from ..config.gpus import for_other_nodes, max_gpu_ranks, ranks_per_gpu, refuse_peer, uses_cuda
from ..core.errors import refuse
from ..core.kernels import KernelRequest, auto_order, available
from ..core.plans import build_plan
from ..mcore import checkpoint
from ..mcore.checkpoint import Saved
from ..mcore.corpus import check_corpus, check_tokenizer, check_values
from ..mcore.data import Identity, check_packs, check_samples, identity, identity_error, tokenizer_identity
from ..mcore.fp8 import require_fp8
from ..mcore.model import RETRAINABLE, fingerprint, padded_vocab_size, uses_transformer_engine
from ..mcore.spec import require_transformer_engine
from ..mcore.tokenizer import build_tokenizer
from ..mcore.version import require_hybrid_model
from ..planner import memory
from .compose import RESOLVED, load_config
from .run_folder import RunFolder

logger = logging.getLogger(__name__)

_RANK_BYTES = 256 * 2**20  # host memory that a rank needs at least, before its model
# Recipes that need another GPU than Ada: its name, the least compute capability, and the first one that has it not.
_FP8_DEVICES = {"blockwise": ("Hopper", (9, 0), (99, 0)), "mxfp8": ("Blackwell", (10, 0), (12, 0))}
_SAMPLE_BYTES = 20  # host memory of a batch's token: its id, label and mask


def device_type(config: Config) -> str:
    """Return `cuda` or `cpu`, as `train.device` and the machine allow. Refuse `cuda` without a CUDA device."""
    cuda = uses_cuda(config.train.device)
    if config.train.device == "cuda" and not cuda:
        expected, remedy = "a CUDA device here; torch sees none", "Set train.device=cpu, or see doctor."
        if for_other_nodes():
            expected, remedy = "nodes with GPUs; the job asks for none", "Set --gpus-per-node=8, or train.device=cpu."
        raise refuse("train.device", "cuda", expected, remedy)
    return "cuda" if cuda else "cpu"


def local_world_size(config: Config) -> int:
    """Return the number of ranks to start on this host if no launcher sets it. Refuse more ranks than GPUs.

    It is `train.num_processes`, by default one per GPU, or on CPUs as many as the parallel sizes need.
    """
    count, on_gpus = config.train.num_processes, device_type(config) == "cuda"
    if on_gpus and count is not None and count > max_gpu_ranks():
        remedy = "Leave it null for one rank per GPU."
        raise refuse("train.num_processes", count, f"at most {max_gpu_ranks()}, the GPUs here", remedy)
    if count is not None:
        return count
    if on_gpus:
        return max_gpu_ranks()
    return config.parallelism.model_parallel_size * (config.parallelism.data_parallel_size or 1)


def check(config: Config, world_size: int) -> tuple[int | None, Identity]:
    """Refuse a job that cannot run. Return the step it resumes from, None for a new run, and its data's identity."""
    device = device_type(config)
    data_parallel_size(config, world_size)
    _check_host(config, world_size)
    check_kernel(config, device)
    if device == "cpu":
        refuse_peer(config, "attention.transport", config.reduction.in_training)
    if config.logging.tensorboard and importlib.util.find_spec("tensorboard") is None:
        remedy = f"Run {install('tensorboard')}, or set it to false."
        raise refuse("logging.tensorboard", True, "the package tensorboard, which is not installed here", remedy)
    if uses_transformer_engine(config.model):
        require_transformer_engine()
    if config.train.fp8 != "none":
        _check_fp8(config, device)
    if config.model.builder == "hybrid":
        require_hybrid_model()
    check_delta_kernels(config, device)
    check_mode(config, config.data.seq_length, "data.seq_length", needs_tokens=config.data.packing != "best_fit")
    check_corpus(config.data)
    if config.train.eval_interval is not None:
        check_samples(config, 1, config.train.eval_samples, "train.eval_samples")
    check_packs(config)
    check_values(config)
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    if config.train.check_data:
        check_tokenizer(config.data, tokenizer)
    vocab_size = padded_vocab_size(config.model, tokenizer.vocab_size)
    job = memory.Job(config, vocab_size, data_parallel_size(config, world_size), fused=device == "cuda")
    if config.train.check_memory:
        _check_memory(job, world_size)
    folder, data = RunFolder.of(config), identity(config, tokenizer)
    try:
        saved = checkpoint.check(folder.checkpoints, fingerprint(config, vocab_size))
    except OSError as error:
        raise folder.unusable(error, config.run.root) from error
    if saved is None:
        if config.train.init_from is not None:
            check_saved_weights("train.init_from", Path(config.train.init_from), config, ignore=RETRAINABLE)
            _check_reach(config, Path(config.train.init_from))
        _check_disk(job, world_size, 0)
        return None, data
    if saved.optimizer is None:
        expected = f"a run that was trained; {folder.path} has weights alone"
        raise refuse("run.name", config.run.name, expected, f"Set another run.name, and train.init_from={folder.path}.")
    check_resumed(config, folder.path, saved, data)
    _check_disk(job, world_size, saved.iteration)
    return saved.iteration, data


def _check_fp8(config: Config, device: str) -> None:
    """Refuse FP8 on devices, or with a TransformerEngine, that cannot compute it."""
    fp8, (name, least, below) = config.train.fp8, _FP8_DEVICES.get(config.train.fp8, ("Ada", (8, 9), (99, 0)))
    if device == "cpu":
        raise refuse("train.fp8", fp8, "none on CPUs", "They have no products in FP8; leave it.")
    if for_other_nodes():
        return
    if not uses_transformer_engine(config.model):
        expected = "none without TransformerEngine, whose layers compute in FP8"
        raise refuse("train.fp8", fp8, expected, f"Run {install('gpu')}, or leave it.")
    if not least <= (capability := torch.cuda.get_device_capability()) < below:
        expected = f"a recipe of this GPU, of compute capability {capability[0]}.{capability[1]}"
        remedy = f"{fp8} needs {least[0]}.{least[1]} ({name}) or later" + f", below {below[0]}.0" * (below[0] < 99)
        raise refuse("train.fp8", fp8, expected, f"{remedy}.")
    require_fp8(fp8)


def check_delta_kernels(config: Config, device: str, backward: bool = True) -> None:
    """Refuse recurrent layers on GPUs without fla-core, or for `backward` with a Triton whose gradients are wrong."""
    fast, pattern = device == "cuda" and config.train.precision == "bf16", config.model.pattern
    if not (config.model.recurrent and fast) or config.attention.deterministic:
        return
    if importlib.util.find_spec("fla") is None:
        expected = "null without the package fla-core, whose kernels compute recurrent layers on GPUs"
        remedy = "Run pip install fla-core==0.6.0, which is part of the extra gpu."
        raise refuse("model.pattern", pattern, expected, remedy)
    ranks, installed = config.parallelism.context_parallel_size, version_of("fla-core") or "?"
    if backward and ranks > 1 and not {*"GK"}.isdisjoint(config.model.mixers) and not installed.startswith("0.6."):
        expected = f"null over {ranks} ranks with fla-core {installed}, whose inner functions are called"
        raise refuse("model.pattern", pattern, expected, "Run pip install fla-core==0.6.0.")
    if not {*"GK"}.isdisjoint(config.model.mixers) and (size := config.model.linear_key_head_dim or 0) > 256:
        remedy = "fla-core's kernels take no larger ones; attention.deterministic=true computes with torch."
        raise refuse("model.linear_key_head_dim", size, "256 or less with layers G or K on GPUs in bf16", remedy)
    other_kernels = not backward or for_other_nodes() or importlib.util.find_spec("tilelang")
    if other_kernels or torch.cuda.get_device_capability()[0] != 9:
        return
    # fla-org/flash-linear-attention#640: fla-core itself refuses them, but only in the first backward pass.
    if Version("3.4") <= Version(found := version("triton")) < Version("3.7.1"):
        expected = f"null on Hopper with Triton {found}: with 3.4 to 3.7.0, gradients of fla-core's kernels are wrong"
        remedy = "Run pip install 'triton>=3.7.1', or pip install tilelang, whose kernels fla-core then takes."
        raise refuse("model.pattern", pattern, expected, remedy)


@names_as_keys()
def check_mode(config: Config, length: int, key: str, needs_tokens: bool = True) -> None:
    """Refuse a mode that cannot divide the heads or plan sequences of `length` tokens, the value of the setting `key`.

    With `needs_tokens`, also one that leaves a context-parallel rank without tokens. Packs have other lengths.
    """
    par, workload = config.parallelism, workload_of(config)
    n, unit, mode = par.context_parallel_size, token_unit(config), configured_mode(par)
    mode.check_heads(n, workload.num_heads, workload.num_kv_heads)
    plan = build_plan(mode, n, length, unit=unit, layout=config.layout)
    if needs_tokens and not all(map(plan.queries.num_tokens, range(n))):
        expected = f"{2 * n * unit} or more, so that each of the {n} context-parallel ranks has some"
        raise refuse(key, length, expected, "Raise it, or take fewer ranks.")


def host_bytes(world_size: int) -> int | None:
    """Return this host's memory per rank; None for other nodes, whose memory is not known here."""
    if for_other_nodes():
        return None
    env = os.environ
    ranks_here = int(env.get("LOCAL_WORLD_SIZE", world_size))
    if "LOCAL_WORLD_SIZE" not in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        ranks_here = -(-world_size // int(env.get("SLURM_STEP_NUM_NODES", "1")))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_here


def _check_host(config: Config, world_size: int) -> None:
    """Refuse more ranks, or larger batches of samples, than this host's memory can hold."""
    train, host = config.train, host_bytes(world_size)
    if host is None:
        return
    if host < _RANK_BYTES:
        expected = f"ranks of at least {_RANK_BYTES >> 20} MiB each on this host, which has {host >> 20} for each"
        raise refuse("world size", world_size, expected, "Lower the parallelism sizes or train.num_processes.")
    sample, gib = config.data.seq_length * _SAMPLE_BYTES, f"{host / 2**30:.1f} GiB of host memory"
    if sample > host:
        expected = f"at most {host // _SAMPLE_BYTES} tokens, whose samples a rank's {gib} hold"
        raise refuse("data.seq_length", config.data.seq_length, expected, "Lower it.")
    if train.global_batch_size // data_parallel_size(config, world_size) * sample > host:
        expected = f"at most {host // sample} sequences a rank, whose samples its {gib} hold"
        raise refuse("train.global_batch_size", train.global_batch_size, expected, "Lower it, or data.seq_length.")


def device_bytes(config: Config) -> int | None:
    """Return a rank's memory on its GPU. On other nodes it is that of `parallelism.cluster`, None if that has none."""
    if not for_other_nodes():
        return torch.cuda.get_device_properties(0).total_memory // ranks_per_gpu()
    gib = load_cluster(config.parallelism.cluster).device.memory_gib if config.parallelism.cluster else None
    return None if gib is None else int(gib * GIB) // ranks_per_gpu()


def _check_memory(job: memory.Job, world_size: int) -> None:
    """Refuse a step that the devices cannot hold, and warn of one that they may not hold."""
    if job.fused:
        host, capacity = host_bytes(min(world_size, max_gpu_ranks())), device_bytes(job.config)
        logger.info(memory.summary(job))
    else:
        host, capacity = None, host_bytes(world_size)
    if capacity is None:
        logger.info("not compared with the nodes' memory: parallelism.cluster=NAME would say how much a device has")
    elif warning := memory.check(job, capacity, host):
        logger.warning(warning)


def _check_disk(job: memory.Job, world_size: int, step: int) -> None:
    """Refuse a run whose next checkpoints after `step`, as many as lie there at one time, do not fit on its disk."""
    train, root = job.config.train, Path(job.config.run.root).absolute()
    checkpoints = RunFolder.of(job.config).checkpoints
    count = math.ceil((train.steps - step) / (train.save_interval or train.steps)) if train.save else 0
    if train.keep_checkpoints is not None:  # an old one is deleted when a new one is complete
        there = len([*checkpoints.glob("iter_*")])
        others = (train.steps - step) // train.keep_every if train.keep_every else 0
        count = min(count, max(1, train.keep_checkpoints + 1 - there) + others)
    folder = next(each for each in (checkpoints, *checkpoints.parents) if each.exists())
    size, free = memory.checkpoint_bytes(job) * world_size / GIB, shutil.disk_usage(folder).free / GIB
    if count * size > free:
        expected = f"{count * size:.3g} GiB for {count} checkpoints of {size:.3g}; its disk has {free:.3g} free"
        raise refuse("run.root", root, expected, "Set train.keep_checkpoints=1, or a folder of another disk.")


def _check_reach(config: Config, run: Path) -> None:
    """Refuse sequences beyond those for which the RoPE of a run's weights was trained or scaled, if it is unchanged."""
    if not config.train.check_data or config.model.position_embedding != "rope":
        return
    earlier, model, length = load_config(run / RESOLVED), config.model, config.data.seq_length
    reach, before = trained_length(earlier), earlier.model
    if length > reach and (model.rope_base, model.rope_scaling) == (before.rope_base, before.rope_scaling):
        expected = f"at most {reach}, for which the RoPE of {run} was trained or scaled"
        remedy = (
            f"Set model.rope_scaling.kind=yarn model.rope_scaling.factor={math.ceil(length / reach)} "
            f"model.rope_scaling.original_length={reach}, or a higher model.rope_base; train.check_data=false goes on "
            "without."
        )
        raise refuse("data.seq_length", length, expected, remedy)


def check_kernel(config: Config, device: str) -> None:
    """Refuse `attention.kernel` if it, or every provider for `auto`, cannot be used on such a device."""
    model, tp, name = config.model, config.parallelism.tensor_parallel_size, config.attention.kernel
    request = KernelRequest(
        device_type=device,
        dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
        head_dim=model.kv_channels,
        num_heads=model.num_attention_heads // tp,
        num_kv_heads=max(1, model.num_kv_heads // tp),
        deterministic=config.attention.deterministic,
        windows=model.window is not None,
        v_head_dim=model.v_head_dim,
    )
    # `choose` would also log its choice, which belongs into the run's log.
    reasons = dict(available(request))
    if name not in ("auto", *reasons):
        expected = ", ".join(("one of auto", *sorted(reasons)))
        raise refuse("attention.kernel", name, expected, "Set attention.kernel to one of these.")
    if for_other_nodes():
        return
    usable = [kernel for kernel in sorted(reasons) if reasons[kernel] is None]
    candidates = auto_order(device) if name == "auto" else (name,)
    if not any(kernel in usable for kernel in candidates):
        why = "; ".join(f"{kernel}: {reasons[kernel]}" for kernel in candidates)
        others = f"Set attention.kernel to one of {', '.join(usable)}."
        remedy = others if usable else "Change precision, heads or device."
        raise refuse("attention.kernel", name, f"a kernel that can be used here ({why})", remedy)


def check_saved_weights(
    key: str,
    run: Path,
    config: Config,
    iteration: int | None = None,
    ignore: tuple[str, ...] = (),
    tensor_files: bool = False,
) -> Saved:
    """Refuse a checkpoint of `run` whose weights do not fit the configured model and tokenizer.

    Args:
        key: the setting that names the run.
        iteration: the checkpoint; None for the latest.
        ignore: prefixes of fingerprint keys that may differ.
        tensor_files: also compare the digests of files with tensors. Needed if no ranks load them afterwards.
    """
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    vocab_size = padded_vocab_size(config.model, tokenizer.vocab_size)
    saved = checkpoint.check(run / "checkpoints", fingerprint(config, vocab_size), iteration, ignore, tensor_files)
    if saved is None:
        remedy = f"Make it with `megatron-longctx import FOLDER out={run}`, or train it with train.save=true."
        raise refuse(key, run, "a run with a checkpoint", remedy)
    error = identity_error(saved.extra.get("data", {}), {"data.tokenizer": tokenizer_identity(config, tokenizer)}, run)
    if error is not None and config.train.check_data:
        raise error
    if (rows := saved.fingerprint["vocab_size"]) < tokenizer.vocab_size:
        tokens = f"each of the tokenizer's {tokenizer.vocab_size} tokens"
        expected = f"a run with a row of the vocabulary for {tokens}; it has {rows}"
        raise refuse(key, run, expected, "Take its own tokenizer.")
    return saved


def check_resumed(config: Config, run: Path, saved: Saved, now: Identity) -> str | None:
    """Refuse to resume a run with another batch size, dataset, tokenizer, length, split or seed than before.

    `now` is the identity of the data that training would continue with. Return a warning if something was not compared,
    or differs and `train.check_data=false` allows it.
    """
    batch, samples = config.train.global_batch_size, saved.extra["consumed_samples"]
    if samples != saved.iteration * batch:
        expected = f"{samples // saved.iteration}, with which {run} has been trained so far"
        remedy = "Set it back, or start a run of another run.name."
        raise refuse("train.global_batch_size", batch, expected, remedy)
    if "data" not in saved.extra:
        return f"step {saved.iteration} of {run} does not record its training data, which was therefore not compared"
    error = identity_error(saved.extra["data"], now, run)
    if error is None:
        return None
    if config.train.check_data:
        raise error
    return f"train.check_data=false lets the run go on from sample {samples}: {error}"
