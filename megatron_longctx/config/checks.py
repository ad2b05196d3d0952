"""The validation of a configuration: `validate` refuses everything that cannot run, before any rank starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..core.errors import nearest, refuse
from ..core.plans.mask import causal
from .bounds import check, keys_of
from .model import ModelConfig
from .planned import configured_mode, names_as_keys, token_unit
from .rules import RULES
from .tree import Config, DataConfig, InferenceConfig

# The least weight of a dataset as a part of all weights: less might not come up before a blend repeats.
_MIN_WEIGHT = 1e-4


def check_value(name: str, value: object) -> None:
    """Refuse a value that the key `name` cannot have, without a configuration."""
    check(keys_of(Config)[name], value)


def check_datasets(data: DataConfig) -> None:
    """Refuse `data.prefix` if a dataset of it is missing."""
    for _, prefix in data.datasets:
        check_dataset(data, prefix)


def check_dataset(data: DataConfig, prefix: str) -> None:
    """Refuse `data.prefix` if a file of the dataset `prefix`, one of it or beside it, is missing."""
    missing = [path for path in (f"{prefix}.idx", f"{prefix}.bin") if not Path(path).is_file()]
    if missing:
        remedy = "Write it with `megatron-longctx data`, or set data.prefix to another."
        if prefix.endswith((".bin", ".idx")):
            remedy = f"Leave the ending out: data.prefix={prefix[:-4]}."
        elif " " in prefix:
            remedy = "A blend has a weight before each of two datasets or more: data.prefix='0.7 data/a 0.3 data/b'."
        raise refuse("data.prefix", data.prefix, f"the files {prefix}.idx and .bin; {missing[0]} is missing", remedy)


def check_model(model: ModelConfig) -> None:
    """Refuse a model, without the rest of a configuration, as `validate` does."""
    config = Config(model=model)
    _check_keys(config)
    _check_model(model)


def validate(config: Config, training: bool = True) -> None:
    """Refuse what cannot run, as far as that can be known without devices, data or ranks.

    `training` is whether the model is trained; inference has other conditions for its parallel sizes.
    """
    _check_keys(config)
    _check_model(config.model)
    _check_parallelism(config, training)
    _check_training(config)
    if config.train.fp8 != "none":
        _check_fp8(config, training)


def check_inference(inference: InferenceConfig) -> None:
    """Refuse settings of inference alone, outside a `Config`, as `validate` does."""
    _check_keys(SimpleNamespace(inference=inference), "inference.")


def _check_keys(config: Any, group: str = "") -> None:
    """Check every key of a group alone, and then beside the keys that restrict it."""
    keys = {name: key for name, key in keys_of(Config).items() if name.startswith(group)}
    for name, key in keys.items():
        check(key, attrgetter(name)(config))
    for selector, applies, names, allowed, remedy in RULES:
        if selector not in keys:
            continue
        selected = attrgetter(selector)(config)
        for name in names if applies(selected) else ():
            values = (keys[name].default,) if allowed is None else allowed
            _check_is(name, attrgetter(name)(config), values, f"with {selector}={_spelled(selected)}", remedy)


def _check_is(name: str, value: object, allowed: tuple[object, ...] | str, condition: str, remedy: str) -> None:
    """Refuse a value that is not among `allowed`, or is null where `allowed` is a word for any other value."""
    is_word = isinstance(allowed, str)
    if value is None if is_word else value not in allowed:
        expected = allowed if is_word else " or ".join(map(_spelled, allowed))
        raise refuse(name, value, f"{expected} {condition}", remedy)


def _spelled(value: object) -> str:
    """Return a value as a user writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _check_divides(name: str, value: int, multiples: Mapping[str, int]) -> None:
    """Refuse a value that does not divide all of `multiples`, which are keyed by their names."""
    for key, multiple in multiples.items():
        if multiple % value:
            small = [k for k in range(1, math.isqrt(multiple) + 1) if multiple % k == 0]
            divisors = sorted({*small, *(multiple // k for k in small)})
            close = ", ".join(map(str, sorted(divisors, key=lambda k: abs(k - value))[:3]))
            raise refuse(name, value, f"a divisor of {key}={multiple}", f"Nearest divisors: {close}.")


def _check_model(model: ModelConfig) -> None:
    if model.latent:
        condition = f"with model.kv_lora_rank={model.kv_lora_rank}"
        remedy = "Every query head has its own keys and values, computed from the latent."
        _check_is("model.num_kv_heads", model.num_kv_heads, (model.num_attention_heads,), condition, remedy)
        if model.rope_channels % 2:
            raise refuse("model.qk_pos_emb_head_dim", model.rope_channels, "an even number", "RoPE rotates pairs.")
    elif model.head_dim is None:
        hidden = {"model.hidden_size": model.hidden_size}
        _check_divides("model.num_attention_heads", model.num_attention_heads, hidden)
    heads = {"model.num_attention_heads": model.num_attention_heads}
    _check_divides("model.num_kv_heads", model.num_kv_heads, heads)
    if model.position_embedding == "rope" and model.rope_channels % 2:
        expected = "an even head dimension with rope, and an even share of it by model.rotary_percent"
        raise refuse("model.head_dim", model.kv_channels, expected, "Set model.head_dim.")
    if not model.latent and model.rope_channels != model.kv_channels * model.rotary_percent:
        expected = f"a share of the {model.kv_channels} elements of a head that is a whole number"
        raise refuse("model.rotary_percent", model.rotary_percent, expected, "RoPE rotates pairs of elements.")
    _check_rope_scaling(model)
    if model.num_moe_experts is not None:
        _check_expert_layers(model, model.num_moe_experts)
    if model.pattern is not None:
        _check_pattern(model, model.pattern)


def _check_pattern(model: ModelConfig, pattern: str) -> None:
    """Refuse a pattern that does not fit the number of layers, the layers of experts, or the heads."""
    layers = len(pattern) // 2
    if model.num_layers % layers:
        expected = f"a number of layers, now {layers}, that divides model.num_layers={model.num_layers}"
        raise refuse("model.pattern", pattern, expected, "Two symbols are a layer. Change one of them.")
    experts = tuple(pattern[2 * (layer % layers) + 1] == "E" for layer in range(model.num_layers))
    if experts != model.expert_layers:
        has = "".join("-E"[each] for each in model.expert_layers)
        expected = f"E in layers with experts and - in others: {has} by model.num_moe_experts and model.moe_layer_freq"
        raise refuse("model.pattern", pattern, expected, "Change one of them.")
    if len({*"GKM"} & {*pattern}) > 1:
        raise refuse("model.pattern", pattern, "one kind of recurrent layers", "Keep G, K or M: they share keys.")
    if model.recurrent:
        heads = {"model.linear_num_value_heads": model.linear_num_value_heads or 0}
        if "K" in pattern:
            heads["model.linear_value_head_dim"] = model.linear_value_head_dim or 0
        _check_divides("model.linear_num_key_heads", model.linear_num_key_heads or 1, heads)


def _check_rope_scaling(model: ModelConfig) -> None:
    """Refuse values from which the kind of scaling computes no frequencies."""
    name, scaling = "model.rope_scaling", model.rope_scaling
    ramps = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
    if scaling.kind in ramps:
        lower, upper = ramps[scaling.kind]
        low, high = getattr(scaling, lower), getattr(scaling, upper)
        if high <= low:
            raise refuse(f"{name}.{upper}", high, f"more than {name}.{lower}={low}", "Raise it, or lower the other.")
    if scaling.kind == "ntk" and model.rope_channels < 4:
        remedy = "A single pair has no slower one."
        raise refuse("model.head_dim", model.rope_channels, f"at least 4 with {name}.kind=ntk", remedy)
    if scaling.kind == "yarn" and model.rope_base <= 1:
        remedy = "All pairs would rotate equally fast."
        raise refuse("model.rope_base", model.rope_base, f"more than 1 with {name}.kind=yarn", remedy)


def _check_expert_layers(model: ModelConfig, experts: int) -> None:
    topk, first, layers = model.moe_router_topk, model.moe_first_dense_layers, model.moe_layer_freq
    if topk > experts:
        raise refuse("model.moe_router_topk", topk, f"at most model.num_moe_experts={experts}", "Lower it.")
    if layers.startswith("["):
        if (count := len(model.expert_layers)) != model.num_layers:
            expected = f"model.num_layers={model.num_layers} numbers, not {count}"
            raise refuse("model.moe_layer_freq", layers, expected, "Give a 0 or 1 for every layer.")
        if first:
            expected = "0 with a list in model.moe_layer_freq"
            raise refuse("model.moe_first_dense_layers", first, expected, "The list has a number for every layer.")
        if not any(model.expert_layers):
            remedy = "Set model.num_moe_experts=null for a dense model."
            raise refuse("model.moe_layer_freq", layers, "a 1 in the list", remedy)
    elif first >= model.num_layers:
        expected = f"less than model.num_layers={model.num_layers}"
        raise refuse("model.moe_first_dense_layers", first, expected, "Lower it.")


def _check_parallelism(config: Config, training: bool) -> None:
    par, model, attention = config.parallelism, config.model, config.attention
    tp, cp = par.tensor_parallel_size, par.context_parallel_size
    shards, divisor = tp, "parallelism.tensor_parallel_size"
    if not training and config.inference.shard_weights and cp > 1:
        shards, divisor = cp * tp, "parallelism.context_parallel_size x tensor_parallel_size with shard_weights"
    if par.inner_size is not None:
        _check_divides("parallelism.inner_size", par.inner_size, {"parallelism.context_parallel_size": cp})
    if config.layout != "auto" and par.schedule != "auto":
        with names_as_keys():
            mode = configured_mode(par)
            mode.layout_of(causal(0), config.layout)
        if training and model.recurrent and cp > 1 and par.layout == "auto" and mode.layout != config.layout:
            remedy = "Set parallelism.schedule=helper, or parallelism.layout=contiguous to run it unbalanced."
            expected = "one that balances contiguous tokens, which the recurrent layers of model.pattern need"
            raise refuse("parallelism.schedule", par.schedule, expected, remedy)
    if model.recurrent:
        _check_recurrent(config)
    vocab = "model.vocab_multiple" if model.vocab_size is None else "model.vocab_size"
    names = [*(["model.num_kv_heads"] if training else []), "model.ffn_hidden_size", vocab]
    if not training:
        for name, size in {"parallelism.tensor_parallel_size": tp, divisor: shards}.items():
            _check_shared_heads(model, name, size)
    if training and par.uses_sequence_parallel:
        names += ["data.seq_length", "model.hidden_size"]
    multiples = {name: attrgetter(name)(config) for name in names}
    if model.latent:  # tensor-parallel ranks share the products that make latents
        multiples["model.kv_lora_rank + model.qk_pos_emb_head_dim"] = model.kv_latent_channels
        multiples["model.q_lora_rank"] = model.q_lora_rank or 0
    _check_divides(divisor, shards, multiples)
    layers = {"model.num_layers": model.num_layers}
    _check_divides("parallelism.pipeline_parallel_size", par.pipeline_parallel_size, layers)
    for used, what, why in (
        (model.num_moe_experts is not None, "experts", "Megatron trains experts only with it."),
        (model.latent, "model.kv_lora_rank", "Megatron's gradients of MLA are wrong without it."),
    ):
        if training and used and tp > 1:
            condition = f"with {what} and parallelism.tensor_parallel_size > 1"
            _check_is("parallelism.sequence_parallel", par.sequence_parallel, (True,), condition, why)
    if model.num_moe_experts is not None:
        _check_expert_sizes(config, model.num_moe_experts, training)
    if cp > 1 and model.kv_channels % 4:
        condition = f"with model.head_dim={model.kv_channels}, which 4 does not divide"
        remedy = "Set it to false: an exact cache has no such condition."
        _check_is("attention.kv_int8", attention.kv_int8, (False,), condition, remedy)
    if par.cluster is None and attention.sum_in_node == "true" and cp > 1:
        remedy = "Name the cluster, or set it to auto or false."
        raise refuse("attention.sum_in_node", "true", "parallelism.cluster, which defines the nodes", remedy)


def _check_recurrent(config: Config) -> None:
    """Refuse what recurrent layers of `model.pattern` do not support."""
    par, condition = config.parallelism, f"with model.pattern={config.model.pattern}"
    why = "Its recurrent layers read a document's tokens one after another, so every rank holds contiguous ones."
    _check_is("parallelism.layout", par.layout, ("auto", "contiguous"), condition, why)
    heads = {"model.linear_num_key_heads": config.model.linear_num_key_heads or 1}
    _check_divides("parallelism.tensor_parallel_size", par.tensor_parallel_size, heads)


def _check_fp8(config: Config, training: bool) -> None:
    """Refuse sizes that products in FP8 cannot have."""
    model, par, train = config.model, config.parallelism, config.train
    block, tp, condition = train.fp8_block, par.tensor_parallel_size, f"with train.fp8={train.fp8}"
    if not training:
        raise refuse("train.fp8", train.fp8, "none in inference, which computes in train.precision", "Leave it.")
    heads, shared = model.num_attention_heads, model.moe_shared_expert_intermediate_size or 0
    latent_columns = heads * ((model.qk_head_dim or 0) + model.value_channels) if model.latent else 0
    widths = {
        "model.hidden_size": model.hidden_size,
        "model.ffn_hidden_size / tensor_parallel_size": model.ffn_hidden_size // tp,
        "the columns of queries, keys and values / tensor_parallel_size": model.num_kv_heads * model.kv_channels // tp,
        "the columns of attention's output / tensor_parallel_size": heads * model.value_channels // tp,
        "model.moe_ffn_hidden_size / expert_tensor_parallel_size": model.expert_width // par.tensor_size_of_experts,
        "model.moe_shared_expert_intermediate_size / tensor_parallel_size": shared // tp,
        "the columns of MLA's keys and values / tensor_parallel_size": latent_columns // tp,
        "model.kv_lora_rank": model.kv_lora_rank or 0,
        "model.kv_lora_rank + model.qk_pos_emb_head_dim": model.kv_latent_channels,
        "model.q_lora_rank": model.q_lora_rank or 0,
    }
    for name, width in widths.items():
        if width % block:
            raise refuse(name, width, f"a multiple of {block} {condition}", "Set train.fp8=none for this model.")
    unit = token_unit(config)
    sequences = {"data.seq_length": 1}
    if config.recompute.mlp_tile_tokens is not None:
        sequences["recompute.mlp_tile_tokens"] = train.micro_batch_size
    for name, count in sequences.items():
        tokens = attrgetter(name)(config)
        if tokens // count % unit or tokens < count:
            sizes = f"{block}" + f" x parallelism.tensor_parallel_size={tp}" * (unit > block)
            remedy = f"Nearest: {nearest(tokens, unit * count)}."
            raise refuse(name, tokens, f"a multiple of {sizes} for each sequence {condition}", remedy)
    most = min(model.num_layers // par.pipeline_parallel_size, model.num_layers - 1)
    for name in ("train.bf16_layers_at_start", "train.bf16_layers_at_end"):
        if (layers := attrgetter(name)(config)) > most:
            raise refuse(name, layers, f"at most {most}, so that a stage's layers are enough", "Lower it.")
    if train.bf16_layers_at_start + train.bf16_layers_at_end >= model.num_layers:
        expected = f"fewer than model.num_layers={model.num_layers} together with train.bf16_layers_at_end"
        raise refuse("train.bf16_layers_at_start", train.bf16_layers_at_start, expected, "Lower one of them.")


def _check_shared_heads(model: ModelConfig, name: str, ranks: int) -> None:
    """Refuse a number of ranks that cannot share the heads: several may have the same keys and values."""
    heads, kv_heads = model.num_attention_heads, model.num_kv_heads
    products = 2 * kv_heads * model.kv_channels  # Megatron shards the rows that make keys and values evenly
    sizes = [
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and (kv_heads % size == 0 or (size % kv_heads == 0 and products % size == 0))
    ]
    if ranks not in sizes:
        has = f"one of {', '.join(map(str, sizes))} with {heads} query heads and {kv_heads} key/value heads"
        remedy = "parallelism.context_parallel_size shares sequences, without inference.shard_weights."
        raise refuse(name, ranks, has, remedy)


def _check_expert_sizes(config: Config, experts: int, training: bool) -> None:
    """Refuse sizes by which ranks cannot share the experts."""
    par, model = config.parallelism, config.model
    tp, ep, etp = par.tensor_parallel_size, par.expert_model_parallel_size, par.tensor_size_of_experts
    name = "parallelism.expert_tensor_parallel_size"
    _check_divides("parallelism.expert_model_parallel_size", ep, {"model.num_moe_experts": experts})
    width = "model.ffn_hidden_size" if model.moe_ffn_hidden_size is None else "model.moe_ffn_hidden_size"
    _check_divides(name, etp, {width: model.expert_width})
    if training and ep == 1 and etp != tp:
        expected = f"null or {tp}, the tensor-parallel size, with parallelism.expert_model_parallel_size=1"
        remedy = "Megatron would not sum the gradients of experts that tensor-parallel ranks hold whole."
        raise refuse(name, etp, expected, remedy)
    if etp > 1 and model.bias:
        given = "null" if par.expert_tensor_parallel_size is None else etp
        raise refuse(name, given, "1 with model.bias=true", "Megatron shards no biases of experts.")


def _check_training(config: Config) -> None:
    train, optim, data = config.train, config.optim, config.data
    if optim.min_lr > optim.lr:
        raise refuse("optim.min_lr", optim.min_lr, f"at most optim.lr={optim.lr}", "Lower min_lr or raise lr.")
    decay = optim.decay_steps or train.steps
    if optim.warmup_steps and optim.warmup_steps >= decay:
        expected = f"fewer steps than the decay ({decay}: optim.decay_steps, or train.steps where that is null)"
        remedy = "Lower optim.warmup_steps or raise train.steps."
        raise refuse("optim.warmup_steps", optim.warmup_steps, expected, remedy)
    if (optim.decay_style == "WSD") is (optim.wsd_decay_steps is None):
        expected = "a number with optim.decay_style=WSD, null with any other"
        remedy = f"Set it to {max(1, decay // 10)}, say." if optim.wsd_decay_steps is None else "Leave it null."
        raise refuse("optim.wsd_decay_steps", optim.wsd_decay_steps, expected, remedy)
    if (optim.wsd_decay_steps or 0) > decay - optim.warmup_steps:
        expected = f"at most {decay - optim.warmup_steps}, the steps of the decay ({decay}) after the warm-up"
        raise refuse("optim.wsd_decay_steps", optim.wsd_decay_steps, expected, "Lower it, or raise optim.decay_steps.")
    if not data.has_validation_split:
        condition = f"with data.split={data.split}, which has no second part"
        remedy = "Set data.split=95,5,0, say, or leave it null."
        _check_is("train.eval_interval", train.eval_interval, (None,), condition, remedy)
    if train.eval_interval is not None and train.eval_samples % train.micro_batch_size:
        expected = f"a multiple of train.micro_batch_size={train.micro_batch_size}"
        raise refuse("train.eval_samples", train.eval_samples, expected, "Change one of them.")
    if train.keep_best and (not train.eval_interval or (train.save_interval or 1) % train.eval_interval):
        expected = f"train.save_interval={_spelled(train.save_interval)} to be a multiple of train.eval_interval"
        expected += f"={_spelled(train.eval_interval)}, so that checkpoints have a validation loss"
        raise refuse("train.keep_best", "true", expected, "Set both, for example to the same number of steps.")
    total = sum(weight for weight, _ in data.datasets)
    if light := [prefix for weight, prefix in data.datasets if weight < _MIN_WEIGHT * total or total == 0]:
        expected = f"weights that are each at least 1/{round(1 / _MIN_WEIGHT)} of their sum; {light[0]} has less"
        raise refuse("data.prefix", data.prefix, expected, "Give it more weight, or leave it out.")
