"""Layers that run directly: bit-identical to Megatron's, with a fraction of their host work."""

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_longctx.config import Config
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.lowbit.reduction import ReductionPolicy
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.direct import DirectLayer, Stream, why_not_direct
from megatron_longctx.mcore.inference import CachedGPT, build_engine, inference_config
from megatron_longctx.testing.distributed import run_distributed
from tests.shared.training import GPT2, tiny_config

GEMMA = {
    "model.activation": "geglu",
    "model.zero_centered_norms": True,
    "model.qk_norm": True,
    "model.post_norms": True,
    "model.scale_embedding": True,
    "model.attention_scale": 0.3,
    "model.window": 5,
    "model.window_pattern": 2,
    "model.window_rope_base": 100.0,
    "model.rope_scaling.kind": "linear",
    "model.rope_scaling.factor": 8.0,
}
FP8 = {"train.precision": "bf16", "inference.weights": "fp8"}
ALONE: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama in bf16": {"train.precision": "bf16"},
    "gpt2": {**GPT2, "model.num_kv_heads": 2},
    "biased swiglu": {"model.bias": True},
    "a KV head a query": {"model.num_kv_heads": 4},
    "half of each head rotated": {"model.rotary_percent": 0.5},
    "gemma": GEMMA,
    "gemma in bf16": {**GEMMA, "train.precision": "bf16"},
    "biased swiglu in fp8": {"model.bias": True, **FP8},
    "windows and sinks": {"model.window": 5, "model.window_pattern": 2, "model.sinks": "learnable"},
}
REDUCED = {"reduction.output_projection": "int8", "reduction.down_projection": "int4", "reduction.min_kib": 0.0}


class Ops(TorchDispatchMode):
    """A count of torch's operations other than views; on a GPU each launches one or more kernels."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def engine_of(config: Config) -> tuple[LongContextEngine, CachedGPT]:
    """Build an engine and its model, whose biases and norms are not left at their initial values."""
    collection = groups.from_config(config.parallelism, seed=5)
    engine, _ = build_engine(inference_config(config), collection, None)
    assert isinstance(engine.model, CachedGPT)
    gen = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in engine.model._gpt.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn(parameter.shape, generator=gen).to(parameter.dtype) / 4
    return engine, engine.model


def logits_of(engine: LongContextEngine) -> Tensor:
    """Return logits of three passes with different plans: two prompts, more of one prompt, one token of each."""
    first, second = engine.open(), engine.open()
    found = []
    for new in (
        {first: range(40, 69), second: range(90, 95)},
        {first: range(70, 81)},
        {first: range(5, 6), second: range(8, 9)},
    ):
        engine.append({session: list(tokens) for session, tokens in new.items()})
        found.append(engine.next_logits([first, second]))
    for session in (first, second):
        session.close()
    return torch.cat(found)


def same_bits(rank: int, configs: list[Config]) -> list[bool]:
    found = []
    for config in configs:
        engine, model = engine_of(config)
        direct_layers = model._layers
        assert direct_layers is not None
        policies = (None,)
        if config.reduction.output_projection != "none":
            policies = (None, ReductionPolicy("none"), ReductionPolicy("auto", min_kib=1e6))
        for fused in sorted({False, config.model.activation == "swiglu"}):
            for layer, *_ in direct_layers:
                layer._fused = fused
            model._gpt.config.bias_activation_fusion = fused
            for policy in policies:
                for module in model.reduced() if policy is not None else ():
                    module.set_policy(policy)
                ours, model._layers = logits_of(engine), None
                theirs, model._layers = logits_of(engine), direct_layers
                found.append(torch.equal(ours, theirs) and bool(ours.std() > 0.01))
        groups.destroy()
    return found


@pytest.mark.parametrize(
    ("tensor", "context", "variants"),
    [
        (1, 1, list(ALONE.values())),
        (1, 2, [{}, GPT2]),
        (2, 1, [{}, GPT2, REDUCED, {**GPT2, **REDUCED}, {**FP8, **REDUCED}]),
    ],
)
def test_results_are_megatrons_bit_for_bit(
    tensor: int, context: int, variants: list[dict[str, Any]], tmp_path: Path
) -> None:
    sizes = {"parallelism.tensor_parallel_size": tensor, "parallelism.context_parallel_size": context}
    configs = [tiny_config(tmp_path, "x", {**sizes, **variant}) for variant in variants]
    for found in run_distributed(same_bits, tensor * context, configs):
        assert all(found) and len(found) >= len(variants)


def _work(call: Callable[[], object]) -> tuple[int, int]:
    """Return the number of torch operations other than views, and of calls of Python and C functions."""
    with Ops() as ops:
        call()
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return ops.count, calls


def work_of_a_layer(rank: int, configs: list[Config]) -> tuple[float, float]:
    """Return the work of one layer: the difference of a prompt's pass with 6 layers and with 2, divided by 4."""
    found = []
    for config in configs:
        engine, _ = engine_of(config)

        def prompt(engine: LongContextEngine = engine) -> None:
            session = engine.open()
            session.append(list(range(40, 60)))
            session.close()

        prompt()
        found.append(_work(prompt))
        groups.destroy()
    (few_ops, few_calls), (ops, calls) = found
    return (ops - few_ops) / 4, (calls - few_calls) / 4


def test_a_layers_host_work_is_bounded(tmp_path: Path) -> None:
    """On CPUs, a norm takes 8 of the operations and a rotation 10; on GPUs, each is one kernel."""
    configs = [tiny_config(tmp_path, "x", {"model.num_layers": n, "train.precision": "bf16"}) for n in (2, 6)]
    ((ops, calls),) = run_distributed(work_of_a_layer, 1, configs)
    assert ops <= 36, "torch operations"
    assert calls <= 260, "function calls: Megatron's own layers take more than 700"


def freed_inputs(rank: int, config: Config) -> list[bool]:
    """Return whether the tensors that queries, keys and values are views of are freed when the MLP begins."""
    gpt, bases = engine_of(config)[1]._gpt, []

    def attend(q: Tensor, k: Tensor, v: Tensor, _: Any) -> Tensor:
        bases.extend(weakref.ref(x._base) for x in (q, k, v))
        return torch.zeros_like(q.flatten(2, 3))

    freed: list[bool] = []
    layer = gpt.decoder.layers[0]
    layer.pre_mlp_layernorm.register_forward_pre_hook(lambda *_: freed.extend(base() is None for base in bases))
    rotation = gpt.rotary_pos_emb.rotations(torch.arange(9)).full
    with torch.no_grad():
        ones = torch.ones(9, 1, config.model.hidden_size)
        DirectLayer(layer)(Stream(ones, ones), rotation, attend, layer.input_layernorm)
    groups.destroy()
    return freed


def test_attentions_inputs_are_freed_before_the_mlp(tmp_path: Path) -> None:
    """A long prompt's peak of memory is in the MLP."""
    assert run_distributed(freed_inputs, 1, tiny_config(tmp_path, "x")) == [[True] * 3]


def reasons(rank: int, config: Config) -> list[str | None]:
    engine, model = engine_of(config)
    gpt = model._gpt
    found = [why_not_direct(gpt)]
    for key, value in (("attention_output_gate", True), ("glu_linear_offset", 1.0), ("num_query_groups", 0)):
        before = getattr(gpt.config, key)
        setattr(gpt.config, key, value)
        found.append(why_not_direct(gpt))
        setattr(gpt.config, key, before)
    wanted, layer = logits_of(engine), gpt.decoder.layers[1]
    for module in (layer.mlp, layer.mlp.linear_fc1):
        plain = type(module)
        module.__class__ = type(f"Other{plain.__name__}", (plain,), {})
        found.append(why_not_direct(gpt))
        model._layers = model._direct_layers(gpt)
        assert model._layers is None and torch.equal(logits_of(engine), wanted)
        module.__class__ = plain
    layer.self_attention.q_layernorm = torch.nn.Identity()
    found.append(why_not_direct(gpt))
    groups.destroy()
    return found


def test_other_layers_run_as_megatrons_own(tmp_path: Path) -> None:
    (found,) = run_distributed(reasons, 1, tiny_config(tmp_path, "x"))
    assert found == [
        None,
        "attention_output_gate is True",
        "glu_linear_offset is 1.0",
        "tensor-parallel ranks share KV heads",
        "layer 1's mlp is OtherMLP",
        "layer 1's mlp.linear_fc1 is OtherColumnParallelLinear",
        "layer 1's self_attention.q_layernorm is Identity",
    ]
