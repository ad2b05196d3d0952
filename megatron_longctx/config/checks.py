"""What a configuration may say: `validate` refuses what cannot run, before any rank starts."""

from __future__ import annotations

from .tree import (
    CACHE_MODES,
    CACHE_RULES,
    CUDA_GRAPHS,
    DECODES,
    DEVICES,
    KEEP_RECEIVED,
    KERNELS,
    OUTER_SCHEDULES,
    PRECISIONS,
    RECOMPUTES,
    REDUCTION_TRANSPORTS,
    REDUCTIONS,
    SCHEDULES,
    TOKENIZERS,
    TRANSPORTS,
    WANDB_MODES,
    Config,
    InferenceConfig,
    ModelConfig,
    ReductionConfig,
    ServeConfig,
)

# Names that users of other systems try; the message says what ours is called.
_ALIASES = {"allgather": "all_gather", "all-gather": "all_gather", "p2p": "ring", "head_tail": "zigzag"}


def refuse(key: str, value: object, expected: str, remedy: str) -> ValueError:
    """The one form of a configuration error: what was given, what is possible, what to do."""
    return ValueError(f"{key}={value}: expected {expected}. {remedy}")


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        hint = _ALIASES.get(value)
        remedy = f"Did you mean {key}={hint}?" if hint in allowed else f"Set {key} to one of these."
        raise refuse(key, value, "one of " + ", ".join(allowed), remedy)


def _at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:  # not `<`, which NaN passes
        raise refuse(key, value, f"at least {least}", f"Raise {key}.")


def _divides(key: str, value: int, of_key: str, of_value: int) -> None:
    if of_value % value:
        legal = [k for k in range(1, of_value + 1) if of_value % k == 0]
        nearest = sorted(legal, key=lambda k: abs(k - value))[:3]
        raise refuse(
            key, value, f"a divisor of {of_key}={of_value}", f"Nearest that divide it: {', '.join(map(str, nearest))}."
        )


def _validate_model(model: ModelConfig) -> None:
    _one_of("model.normalization", model.normalization, ("rmsnorm", "layernorm"))
    _one_of("model.activation", model.activation, ("swiglu", "gelu"))
    _one_of("model.position_embedding", model.position_embedding, ("rope", "learned"))
    _one_of("model.implementation", model.implementation, ("auto", "local", "transformer_engine"))
    for name in ("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "ffn_hidden_size"):
        _at_least(f"model.{name}", getattr(model, name), 1)
    _at_least("model.vocab_multiple", model.vocab_multiple, 1)
    _at_least("model.vocab_size", model.vocab_size, 1)
    if model.head_dim is None:
        _divides("model.num_attention_heads", model.num_attention_heads, "model.hidden_size", model.hidden_size)
    _divides("model.num_kv_heads", model.num_kv_heads, "model.num_attention_heads", model.num_attention_heads)
    if model.position_embedding == "rope" and model.kv_channels % 2:
        raise refuse("model.head_dim", model.kv_channels, "an even head dimension with rope", "Set model.head_dim.")


def _validate_parallelism(config: Config) -> None:
    par, model = config.parallelism, config.model
    _one_of("parallelism.schedule", par.schedule, (*SCHEDULES, "auto"))
    if par.max_attention_gib is not None and (par.schedule != "auto" or not 0 < par.max_attention_gib < float("inf")):
        raise refuse(
            "parallelism.max_attention_gib",
            par.max_attention_gib,
            "null, or with parallelism.schedule=auto a number above 0",
            "Only auto chooses by memory; leave it null.",
        )
    for name in ("context_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        _at_least(f"parallelism.{name}", getattr(par, name), 1)
    _at_least("parallelism.max_buffer_tokens", par.max_buffer_tokens, 1)
    _at_least("parallelism.inner_size", par.inner_size, 1)
    _at_least("parallelism.head_chunks", par.head_chunks, 1)
    if par.head_chunks != 1 and par.schedule != "ulysses":
        raise refuse(
            "parallelism.head_chunks",
            par.head_chunks,
            f"1, its default, with parallelism.schedule={par.schedule}",
            "Only ulysses exchanges heads in chunks, and auto chooses their number; leave it or choose ulysses.",
        )
    _one_of("parallelism.outer_schedule", par.outer_schedule, OUTER_SCHEDULES)
    if par.inner_size is not None:
        if par.schedule not in ("double_ring", "usp"):
            raise refuse(
                "parallelism.inner_size",
                par.inner_size,
                f"null with parallelism.schedule={par.schedule}",
                "Only double_ring and usp divide the ranks; leave it null or choose one of them.",
            )
        size = "parallelism.context_parallel_size"
        _divides("parallelism.inner_size", par.inner_size, size, par.context_parallel_size)
    if par.outer_schedule != "zigzag" and par.schedule != "usp":
        raise refuse(
            "parallelism.outer_schedule",
            par.outer_schedule,
            f"zigzag, its default, with parallelism.schedule={par.schedule}",
            "Only usp has a mode between groups; leave it or set parallelism.schedule=usp.",
        )
    if not 0 < par.timeout_s < float("inf"):
        raise refuse("parallelism.timeout_s", par.timeout_s, "more than 0 seconds, and finite", "600 is the default.")
    if par.max_buffer_tokens is not None and par.schedule != "all_gather":
        raise refuse(
            "parallelism.max_buffer_tokens",
            par.max_buffer_tokens,
            f"null with parallelism.schedule={par.schedule}",
            "Only all_gather groups its sources under a bound; leave it null or set parallelism.schedule=all_gather.",
        )
    tp, key = par.tensor_parallel_size, "parallelism.tensor_parallel_size"
    _divides(key, tp, "model.num_kv_heads", model.num_kv_heads)
    _divides(key, tp, "model.ffn_hidden_size", model.ffn_hidden_size)
    if model.vocab_size is not None:
        _divides(key, tp, "model.vocab_size", model.vocab_size)
    else:
        _divides(key, tp, "model.vocab_multiple", model.vocab_multiple)
    if par.uses_sequence_parallel:
        _divides(key, tp, "data.seq_length", config.data.seq_length)
        _divides(key, tp, "model.hidden_size", model.hidden_size)
    _divides("parallelism.pipeline_parallel_size", par.pipeline_parallel_size, "model.num_layers", model.num_layers)
    if par.overlap_param_gather and not (par.overlap_grad_reduce and config.optim.distributed):
        raise refuse(
            "parallelism.overlap_param_gather",
            True,
            "parallelism.overlap_grad_reduce=true and optim.distributed=true beside it",
            "Set both, or leave overlap_param_gather false.",
        )


def _validate_reduction(reduction: ReductionConfig) -> None:
    _one_of("reduction.output_projection", reduction.output_projection, REDUCTIONS)
    _one_of("reduction.down_projection", reduction.down_projection, REDUCTIONS)
    _one_of("reduction.transport", reduction.transport, REDUCTION_TRANSPORTS)
    if reduction.group_size not in (32, 64, 128):
        raise refuse("reduction.group_size", reduction.group_size, "one of 32, 64, 128", "128 sends the fewest bytes.")
    if not 0 <= reduction.min_kib < float("inf"):
        raise refuse("reduction.min_kib", reduction.min_kib, "at least 0 KiB, and finite", "64 is the default.")


def _validate_training(config: Config) -> None:
    train, optim, data = config.train, config.optim, config.data
    _one_of("train.precision", train.precision, PRECISIONS)
    _one_of("train.device", train.device, DEVICES)
    _one_of("optim.decay_style", optim.decay_style, ("cosine", "linear", "constant"))
    _one_of("logging.wandb", config.logging.wandb, WANDB_MODES)
    for name in (
        "steps",
        "global_batch_size",
        "micro_batch_size",
        "save_interval",
        "keep_checkpoints",
        "num_processes",
    ):
        _at_least(f"train.{name}", getattr(train, name), 1)
    _at_least("logging.profile_step", config.logging.profile_step, 1)
    peak = config.logging.peak_tflops
    if peak is not None and not 0 < peak < float("inf"):
        raise refuse("logging.peak_tflops", peak, "a positive number of TFLOP/s", "Or null to look the device up.")
    for name in ("lr", "min_lr", "warmup_steps", "weight_decay", "clip_grad", "eps"):
        _at_least(f"optim.{name}", getattr(optim, name), 0)
    _at_least("optim.decay_steps", optim.decay_steps, 1)
    for name in ("beta1", "beta2"):
        value = getattr(optim, name)
        if not 0 <= value < 1:
            raise refuse(f"optim.{name}", value, "at least 0 and less than 1", "Adam's usual are 0.9 and 0.95.")
    if not optim.min_lr <= optim.lr < float("inf"):
        raise refuse("optim.min_lr", optim.min_lr, f"at most optim.lr={optim.lr}", "Lower min_lr or raise lr.")
    decay = optim.decay_steps or train.steps
    if optim.warmup_steps and optim.warmup_steps >= decay:
        raise refuse(
            "optim.warmup_steps",
            optim.warmup_steps,
            f"fewer steps than the decay ({decay}: optim.decay_steps, or train.steps where that is null)",
            "Lower optim.warmup_steps or raise train.steps.",
        )
    _one_of("data.tokenizer", data.tokenizer, TOKENIZERS)
    _at_least("data.seq_length", data.seq_length, 1)
    if data.tokenizer != "byte-level" and data.tokenizer_path is None:
        raise refuse(
            "data.tokenizer_path", None, f"a path for data.tokenizer={data.tokenizer}", "Set data.tokenizer_path."
        )
    if not config.run.name or "/" in config.run.name or config.run.name in (".", ".."):
        raise refuse("run.name", config.run.name, "a plain folder name", "Choose another run.name.")


def _validate_inference(inference: InferenceConfig) -> None:
    _one_of("inference.mode", inference.mode, CACHE_MODES)
    _one_of("inference.rule", inference.rule, CACHE_RULES)
    _one_of("inference.transport", inference.transport, TRANSPORTS)
    _one_of("inference.decode", inference.decode, DECODES)
    _one_of("inference.cuda_graphs", inference.cuda_graphs, CUDA_GRAPHS)
    for name in ("max_new_tokens", "top_k", "page_tokens", "cache_tokens", "prefill_chunk"):
        _at_least(f"inference.{name}", getattr(inference, name), 1)
    if inference.exact_reuse and inference.prefill_chunk is None:
        raise refuse("inference.prefill_chunk", None, "a number with inference.exact_reuse=true", "Set it to 2048.")
    if not 0 <= inference.temperature < float("inf"):
        raise refuse("inference.temperature", inference.temperature, "0 or a positive number", "0 is greedy.")
    if not 0 < inference.top_p <= 1:
        raise refuse("inference.top_p", inference.top_p, "above 0 and at most 1", "1 draws among all tokens.")


def _validate_serve(serve: ServeConfig) -> None:
    for name in ("max_active", "max_waiting", "max_connections", "max_body_bytes"):
        _at_least(f"serve.{name}", getattr(serve, name), 1)
    _at_least("serve.keep_sessions", serve.keep_sessions, 0)
    for name, default in (("timeout_s", 30), ("stalled_s", 10)):
        if not 0 < getattr(serve, name) < float("inf"):
            expected = "more than 0 seconds, and finite"
            raise refuse(f"serve.{name}", getattr(serve, name), expected, f"{default} is the default.")
    if not 0 <= serve.port < 2**16:
        raise refuse("serve.port", serve.port, "0 to 65535", "0 takes any free port.")


def validate(config: Config) -> None:
    """Check everything that can be known without devices, data or ranks.

    Raises:
        ValueError: names the key and value, what was expected and what to do.
    """
    _validate_model(config.model)
    _validate_parallelism(config)
    _one_of("attention.kernel", config.attention.kernel, KERNELS)
    _one_of("attention.transport", config.attention.transport, TRANSPORTS)
    if config.attention.graph_tokens < 0:
        raise refuse("attention.graph_tokens", config.attention.graph_tokens, "0 or more", "Take 0 for no graphs.")
    _one_of("attention.keep_received", config.attention.keep_received, KEEP_RECEIVED)
    if config.attention.kv_int8 and config.parallelism.context_parallel_size > 1 and config.model.kv_channels % 4:
        expected = f"false with model.head_dim={config.model.kv_channels}, which 4 does not divide"
        raise refuse("attention.kv_int8", True, expected, "Set it to false: an exact cache has no such condition.")
    _one_of("recompute.mode", config.recompute.mode, RECOMPUTES)
    if config.attention.keep_received == "true" and config.recompute.mode.startswith("attention_output"):
        raise refuse(
            "attention.keep_received",
            "true",
            f"auto or false with recompute.mode={config.recompute.mode}",
            "There forward runs without a graph, so that nothing is kept; set it to auto, or recompute=none or layer.",
        )
    for name in ("head_chunk_tokens", "mlp_tile_tokens"):
        _at_least(f"recompute.{name}", getattr(config.recompute, name), 1)
    _validate_reduction(config.reduction)
    _validate_training(config)
    _validate_inference(config.inference)
    _validate_serve(config.serve)


def data_parallel_size(config: Config, world_size: int) -> int:
    """Data-parallel ranks left in a world of `world_size` ranks; batch sizes are checked against it.

    Raises:
        ValueError: the sizes do not multiply to `world_size`, or the batch does not divide among the ranks.
    """
    par, train = config.parallelism, config.train
    product = (
        f"tensor {par.tensor_parallel_size} x context {par.context_parallel_size} "
        f"x pipeline {par.pipeline_parallel_size}"
    )
    if world_size % par.model_parallel_size:
        raise refuse(
            "world size",
            world_size,
            f"a multiple of {product} = {par.model_parallel_size}",
            "Start that many ranks or change the parallelism sizes.",
        )
    size = world_size // par.model_parallel_size
    if par.data_parallel_size not in (None, size):
        raise refuse(
            "parallelism.data_parallel_size",
            par.data_parallel_size,
            f"{size}, since {world_size} ranks / ({product}) = {size}",
            f"Set it to {size} or null, or start {par.model_parallel_size * (par.data_parallel_size or 1)} ranks.",
        )
    per_micro_step = train.micro_batch_size * size
    if train.global_batch_size % per_micro_step:
        below = train.global_batch_size // per_micro_step * per_micro_step
        raise refuse(
            "train.global_batch_size",
            train.global_batch_size,
            f"a multiple of train.micro_batch_size x data-parallel ranks = {train.micro_batch_size} x {size}",
            f"Nearest: {max(below, per_micro_step)} or {below + per_micro_step}.",
        )
    return size
