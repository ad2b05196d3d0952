"""What a configuration may say: `validate` refuses what cannot run, before any rank starts."""

from __future__ import annotations

import math
from operator import attrgetter

from ..errors import refuse
from ..schedules.backward import ranks_to_sum
from ..schedules.mask import causal
from .bounds import check, check_is, keys_of
from .experts import check_expert_parallelism, check_experts
from .latent import check_latent, check_latent_parallelism
from .planned import configured_mode
from .rope_scaling import check_rope_scaling
from .tree import LEAST_WEIGHT, Config, InferenceConfig, ModelConfig


def check_value(name: str, value: object) -> None:
    """Refuse what the key `name` cannot be, where it is given without a configuration.

    Raises:
        ValueError: names the key and value, what was expected and what to do.
    """
    check(next(key for key in keys_of(Config)[name.partition(".")[0]] if key.name == name), value)


def check_inference(inference: InferenceConfig) -> None:
    """Check the settings of inference, also outside a `Config`.

    Raises:
        ValueError: names the key and value, what was expected and what to do.
    """
    for key in keys_of(Config)["inference"]:
        check(key, getattr(inference, key.name.removeprefix("inference.")))
    if inference.exact_reuse and inference.prefill_chunk is None:
        raise refuse("inference.prefill_chunk", None, "a number with inference.exact_reuse=true", "Set it to 2048.")


def _divides(key: str, value: int, of_key: str, of_value: int) -> None:
    if of_value % value:
        nearest = sorted(_divisors(of_value), key=lambda k: abs(k - value))[:3]
        raise refuse(
            key, value, f"a divisor of {of_key}={of_value}", f"Nearest that divide it: {', '.join(map(str, nearest))}."
        )


def _divisors(number: int) -> list[int]:
    """In ascending order."""
    small = [k for k in range(1, math.isqrt(number) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def _check_whole_model(model: ModelConfig) -> None:
    check_latent(model)
    if model.head_dim is None and not model.latent:
        _divides("model.num_attention_heads", model.num_attention_heads, "model.hidden_size", model.hidden_size)
    _divides("model.num_kv_heads", model.num_kv_heads, "model.num_attention_heads", model.num_attention_heads)
    if model.position_embedding == "rope" and model.rope_channels % 2:
        raise refuse("model.head_dim", model.kv_channels, "an even head dimension with rope", "Set model.head_dim.")
    if model.bias:
        beside = "with model.bias=true, which it is a part of"
        check_is("model.qkv_bias", model.qkv_bias, False, beside, "Leave it false.")
    if model.window is None:
        for key in ("window_pattern", "window_rope_base"):
            remedy = f"Set model.window, or leave {key} null: without windows all layers see everything."
            check_is(f"model.{key}", getattr(model, key), None, "with model.window=null", remedy)
    check_experts(model)
    _validate_rope(model)


def _validate_rope(model: ModelConfig) -> None:
    if model.position_embedding != "rope":
        beside, remedy = f"with model.position_embedding={model.position_embedding}", "Only RoPE turns tokens."
        check_is("model.rope_scaling.kind", model.rope_scaling.kind, "none", beside, remedy)
        check_is("model.window_rope_base", model.window_rope_base, None, beside, remedy)
    check_rope_scaling(model.rope_scaling, model.rope_channels, model.rope_base)


_OF_MODES = (
    ("max_attention_gib", None, ("auto",), "Only auto chooses by memory; leave it null."),
    (
        *("head_chunks", 1, ("ulysses",)),
        "Only ulysses exchanges heads in chunks, and auto chooses their number; leave it or choose ulysses.",
    ),
    (
        *("inner_size", None, ("double_ring", "usp")),
        "Only double_ring and usp divide the ranks; leave it null or choose one of them.",
    ),
    (
        *("outer_schedule", "zigzag", ("usp",)),
        "Only usp has a mode between groups; leave it or set parallelism.schedule=usp.",
    ),
    (
        *("max_buffer_tokens", None, ("all_gather",)),
        "Only all_gather groups its sources under a bound; leave it null or set parallelism.schedule=all_gather.",
    ),
)
"""Keys of parallelism that some schedules alone take: what they are elsewhere, these schedules, and what to do."""


def _validate_parallelism(config: Config) -> None:
    par, model = config.parallelism, config.model
    for key, unset, schedules, remedy in _OF_MODES:
        if getattr(par, key) != unset and par.schedule not in schedules:
            expected = "null" if unset is None else f"{unset}, its default,"
            expected += f" with parallelism.schedule={par.schedule}"
            raise refuse(f"parallelism.{key}", getattr(par, key), expected, remedy)
    if par.inner_size is not None:
        size = "parallelism.context_parallel_size"
        _divides("parallelism.inner_size", par.inner_size, size, par.context_parallel_size)
    if par.layout != "auto" and par.schedule != "auto":
        configured_mode(par).layout_of(causal(0), par.layout)
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
    if par.overlap_param_gather == "true" and config.no_param_gather is not None:
        expected = f"auto or false with {config.no_param_gather}"
        raise refuse(
            "parallelism.overlap_param_gather",
            "true",
            expected,
            "It needs both overlap_grad_reduce and optim.distributed.",
        )


def _validate_training(config: Config) -> None:
    train, optim, data = config.train, config.optim, config.data
    if optim.min_lr > optim.lr:
        raise refuse("optim.min_lr", optim.min_lr, f"at most optim.lr={optim.lr}", "Lower min_lr or raise lr.")
    if not optim.distributed:
        remedy = "Set optim.distributed=true: its states go to the host."
        check_is("optim.states_on_host", optim.states_on_host, False, "with optim.distributed=false", remedy)
    decay = optim.decay_steps or train.steps
    if optim.warmup_steps and optim.warmup_steps >= decay:
        raise refuse(
            "optim.warmup_steps",
            optim.warmup_steps,
            f"fewer steps than the decay ({decay}: optim.decay_steps, or train.steps where that is null)",
            "Lower optim.warmup_steps or raise train.steps.",
        )
    if (optim.decay_style == "WSD") is (optim.wsd_decay_steps is None):
        expected = "a number with optim.decay_style=WSD, null with any other"
        remedy = f"Set it to {max(1, decay // 10)}, say." if optim.wsd_decay_steps is None else "Leave it null."
        raise refuse("optim.wsd_decay_steps", optim.wsd_decay_steps, expected, remedy)
    if (optim.wsd_decay_steps or 0) > decay - optim.warmup_steps:
        expected = f"at most {decay - optim.warmup_steps}, the steps of the decay ({decay}) after those of the warm-up"
        raise refuse("optim.wsd_decay_steps", optim.wsd_decay_steps, expected, "Lower it, or raise optim.decay_steps.")
    if data.packing != "none":
        remedy = "A pack is one sequence of many documents; raise data.seq_length instead."
        check_is("train.micro_batch_size", train.micro_batch_size, 1, f"with data.packing={data.packing}", remedy)
    if not data.has_held_out:
        beside = f"with data.split={data.split}, which has no second part"
        remedy = "Set data.split=95,5,0, say, or leave it null."
        check_is("train.eval_interval", train.eval_interval, None, beside, remedy)
    if train.eval_interval is not None and train.eval_samples % train.micro_batch_size:
        expected = f"a multiple of train.micro_batch_size={train.micro_batch_size}"
        raise refuse("train.eval_samples", train.eval_samples, expected, "Change one of them.")
    total = sum(weight for weight, _ in data.datasets)
    if least := [prefix for weight, prefix in data.datasets if weight < LEAST_WEIGHT * total or total == 0]:
        expected = f"weights that are each at least 1/{round(1 / LEAST_WEIGHT)} of their sum; {least[0]} has less"
        raise refuse("data.prefix", data.prefix, expected, "Give it more weight, or leave it out.")
    if data.tokenizer != "byte-level" and data.tokenizer_path is None:
        raise refuse(
            "data.tokenizer_path", None, f"a path for data.tokenizer={data.tokenizer}", "Set data.tokenizer_path."
        )


def _validate_baseline(config: Config) -> None:
    baseline, size = config.attention.baseline, config.parallelism.context_parallel_size
    remedy = "Change it, or leave attention.baseline null."
    unserved = (
        ("recompute.mode", config.recompute.mode, config.recompute.mode in ("none", "layer"), "none or layer"),
        ("attention.deterministic", True, not config.attention.deterministic, "false"),
        ("attention.overlap", False, config.attention.overlap, "true"),
        ("model.sinks", config.model.sinks, config.model.sinks == "none", "none"),
        ("model.window", config.model.window, config.model.window is None or baseline != "te_p2p", "null"),
        ("train.device", "cpu", config.train.device != "cpu", "auto or cuda"),
    )
    for key, value, served, expected in unserved:
        if not served:
            raise refuse(key, value, f"{expected} with attention.baseline={baseline}", remedy)
    if size > 1:
        _divides("2 x parallelism.context_parallel_size", 2 * size, "data.seq_length", config.data.seq_length)


def check_model(model: ModelConfig) -> None:
    """Check a model that is given without a configuration.

    Raises:
        ValueError: names the key and value, what was expected and what to do.
    """
    for key in keys_of(Config)["model"]:
        check(key, attrgetter(key.name.partition(".")[2])(model))
    _check_whole_model(model)


def validate(config: Config) -> None:
    """Check everything that can be known without devices, data or ranks.

    Raises:
        ValueError: names the key and value, what was expected and what to do.
    """
    for keys in keys_of(Config).values():
        for key in keys:
            check(key, attrgetter(key.name)(config))
    _check_whole_model(config.model)
    _validate_parallelism(config)
    check_expert_parallelism(config)
    check_latent_parallelism(config)
    if config.parallelism.context_parallel_size > 1 and config.model.kv_channels % 4:
        beside = f"with model.head_dim={config.model.kv_channels}, which 4 does not divide"
        remedy = "Set it to false: an exact cache has no such condition."
        check_is("attention.kv_int8", config.attention.kv_int8, False, beside, remedy)
    if config.attention.keep_received == "true" and config.recompute.mode.startswith("attention_output"):
        raise refuse(
            "attention.keep_received",
            "true",
            f"auto or false with recompute.mode={config.recompute.mode}",
            "There forward runs without a graph, so that nothing is kept; set it to auto, or recompute=none or layer.",
        )
    par = config.parallelism
    if par.cluster is None:
        ranks_to_sum(config.attention.sum_in_node, None, par.context_parallel_size)
    if config.attention.baseline is not None:
        _validate_baseline(config)
    _validate_training(config)
    check_inference(config.inference)


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
    experts = par.tensor_size_of_experts * par.expert_model_parallel_size * par.pipeline_parallel_size
    if world_size % experts:
        raise refuse(
            "parallelism.expert_model_parallel_size",
            par.expert_model_parallel_size,
            f"one by which tensor {par.tensor_size_of_experts} of experts x expert x pipeline "
            f"{par.pipeline_parallel_size} divides the {world_size} ranks",
            "Change a size, or start other ranks.",
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
