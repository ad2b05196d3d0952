"""Everything that can be refused before a rank starts."""

from __future__ import annotations

import torch

from ..config import Config, data_parallel_size, refuse
from ..kernels import KernelRequest, choose
from ..mcore import checkpoint
from ..mcore.data import check_corpus
from ..mcore.model import fingerprint, padded_vocab_size, uses_transformer_engine
from ..mcore.spec import require_transformer_engine
from ..mcore.tokenizer import build_tokenizer
from ..schedules import build_plan
from .run_folder import RunFolder


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
    if uses_transformer_engine(config.model):
        require_transformer_engine()
    par = config.parallelism
    unit = par.tensor_parallel_size if par.uses_sequence_parallel else 1
    build_plan(par.schedule, par.context_parallel_size, config.data.seq_length, True, par.max_buffer_tokens, unit)
    check_corpus(config.data)
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    vocab_size = padded_vocab_size(config.model, tokenizer.vocab_size)
    return checkpoint.check(RunFolder.of(config).checkpoints, fingerprint(config, vocab_size))


def _check_kernel(config: Config, device: str) -> None:
    model, tp = config.model, config.parallelism.tensor_parallel_size
    choose(
        config.attention.kernel,
        KernelRequest(
            device_type=device,
            dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
            head_dim=model.kv_channels,
            num_heads=model.num_attention_heads // tp,
            num_kv_heads=model.num_kv_heads // tp,
            deterministic=config.attention.deterministic,
        ),
    )
