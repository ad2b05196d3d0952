"""Layers that keep attention's result: the same gradients to the bit, attention and its messages once per step, and
what waits on the host not on the device."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_longctx.attention.run import Run
from megatron_longctx.comm import P2PTransport
from megatron_longctx.config import RecomputeConfig
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.model import build_model, transformer_config
from megatron_longctx.mcore.recompute import RecomputedLayer, with_recompute
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.mcore.spec import block_spec
from megatron_longctx.recompute import Store
from megatron_longctx.testing.distributed import run_distributed
from tests.shared.sequences import sequence_of
from tests.shared.training import tiny_config

MODES = ("none", "layer", "attention_output", "attention_output+offload")
LAYERS, MICRO_BATCHES, VOCABULARY = 2, 2, 64
CP, TP = "parallelism.context_parallel_size", "parallelism.tensor_parallel_size"
SCHEDULE = "parallelism.schedule"
LEARNED = {"model.position_embedding": "learned", "model.bias": True, "model.tie_embeddings": True}

# By number of ranks, of which those that are not named replicate: settings of a model. `dropout` is Megatron's, which
# no recipe sets.
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "alone": {"dropout": 0.2},
        "bf16": {"train.precision": "bf16"},
        "norms behind": {"model.post_norms": True, "model.qk_norm": True},
        "tp2": {TP: 2, "dropout": 0.2},
        "tp2 without sequence parallelism": {TP: 2, "parallelism.sequence_parallel": False, **LEARNED},
        **{mode: {CP: 2, SCHEDULE: mode} for mode in ("zigzag", "helper")},
    },
    6: {"cp3": {CP: 3, SCHEDULE: "helper"}, "cp3 tp2": {CP: 3, TP: 2, "dropout": 0.2}},
}


@dataclasses.dataclass
class Seen:
    """One rank's losses and gradients, and how often it ran attention and sent or received something."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    forward: int
    backward: int
    messages: int
    products: int  # of row-parallel layers: two a layer
    inputs: int  # of layers, whose own storages are there between forward and backward


def _counted(owner: Any, name: str, counts: dict[str, int], what: Callable[[Any], str]) -> Any:
    original = getattr(owner, name)

    @functools.wraps(original)
    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = what(self)
        counts[key] += sum(map(len, args[:2])) if key == "messages" else 1
        return original(self, *args, **kwargs)

    return mock.patch.object(owner, name, counting)


def _see(root: Path, mode: str, settings: dict[str, Any]) -> Seen:
    settings = dict(settings)
    dropout = settings.pop("dropout", 0.0)
    config = tiny_config(root, "recompute", {**settings, "data.seq_length": 38, "recompute.mode": mode})
    collection = groups.of_config(config.parallelism, seed=5)
    megatron = transformer_config(config)
    megatron.hidden_dropout = dropout
    sequence = build_sequence(config, collection.cp)
    gpt = build_model(config, megatron, collection, sequence, VOCABULARY)
    if megatron.bf16:
        gpt.bfloat16()
    counts = {"forward": 0, "backward": 0, "messages": 0, "products": 0}
    groups.seed_everything(5)
    losses: list[torch.Tensor] = []
    storages: list[weakref.ref[torch.UntypedStorage]] = []

    def see(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        storages.append(weakref.ref(kwargs["hidden_states"].untyped_storage()))

    for layer in gpt.decoder.layers:
        layer.register_forward_pre_hook(see, with_kwargs=True)
    with (
        _counted(Run, "__call__", counts, lambda run: "backward" if run._program.backward else "forward"),
        _counted(P2PTransport, "start", counts, lambda _: "messages"),
        _counted(RowParallelLinear, "_forward_impl", counts, lambda _: "products"),
    ):
        for index in range(MICRO_BATCHES):  # all in flight before the first backward, as pipeline stages have them
            tokens = torch.randint(VOCABULARY, (2, 39), generator=torch.Generator().manual_seed(index))
            batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": torch.arange(38).expand(2, -1)}
            mine = sequence.shard_batch(batch)
            losses.append(gpt(mine["tokens"], mine["positions"], None, labels=mine["labels"]))
        gc.collect()
        counts["inputs"] = sum(storage() is not None for storage in storages)
        for loss in losses:
            loss.float().sum().backward()
    groups.destroy()
    gradients = {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(gpt.parameters())) > 10
    return Seen([loss.detach() for loss in losses], gradients, **counts)


def _run(rank: int, root: Path, world: int) -> dict[Any, Any]:
    seen: dict[Any, Any] = {
        (name, mode): _see(root, mode, case) for name, case in CASES[world].items() for mode in MODES
    }
    return {**seen, "other uses": _other_uses(root)}


@functools.cache
def results(world: int, root: Path) -> list[dict[Any, Any]]:
    """What every rank of `world` saw; run once."""
    return run_distributed(_run, world, root, world)


@pytest.mark.parametrize("world", CASES, ids=lambda world: f"{world} ranks")
def test_attention_runs_once_and_gradients_are_equal_to_the_bit(world: int, root: Path) -> None:
    for rank, seen in enumerate(results(world, root)):
        for name, case in CASES[world].items():
            plain = seen[name, "layer"]
            calls = LAYERS * MICRO_BATCHES
            assert plain.forward == 2 * calls
            for mode in MODES:
                found, where = seen[name, mode], f"rank {rank}, {name}, {mode}"
                assert found.backward == calls, where
                # A repetition leaves out the last product of the MLP, unless a norm reads it.
                kept = 3 + ("model.post_norms" in case)
                assert found.products == {"none": 2, "layer": 4}.get(mode, kept) * calls, where
                assert all(map(torch.equal, found.losses, plain.losses)), where
                wrong = [key for key, value in plain.gradients.items() if not torch.equal(found.gradients[key], value)]
                assert not wrong, f"{where}: {wrong}"
                if mode != "none":  # of both micro-batches; with offload of the last two runs of layers
                    assert found.inputs == (2 if mode.endswith("offload") else calls), where
                if mode != "layer":
                    assert (found.forward, found.messages) == (calls, seen[name, "none"].messages), where
            if case.get(CP, 1) > 1:
                assert plain.messages > seen[name, "none"].messages > 0, "layer sends keys and values once more"


def _other_uses(root: Path) -> dict[str, Any]:
    config = tiny_config(root, "run", {"recompute.mode": "attention_output", "data.seq_length": 8})
    collection = groups.initialize(seed=5)
    gpt = build_model(config, transformer_config(config), collection, build_sequence(config, collection.cp), VOCABULARY)
    tokens = torch.arange(8)[None]
    loss = gpt(tokens, tokens, None).square().sum()  # Megatron's cross-entropy itself takes no second backward
    loss.backward(retain_graph=True)
    try:
        loss.backward()
        twice = ""
    except RuntimeError as error:
        twice = str(error)
    trained = loss.detach()
    gpt.eval()
    with_graph = gpt(tokens, tokens, None).square().sum()
    with torch.no_grad():
        without = gpt(tokens, tokens, None).square().sum()
    groups.destroy()
    return {"twice": twice, "eval": torch.equal(with_graph, trained), "no grad": torch.equal(without, trained)}


def test_other_uses(root: Path) -> None:
    found = results(2, root)[0]["other uses"]
    assert "expected one backward per forward" in found["twice"]
    assert found["eval"] and found["no grad"]


def _config(**settings: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
         "recompute_granularity=full: expected None with recompute.mode=attention_output"),
        ({"recompute_granularity": "selective"}, "recompute_granularity=selective: expected None"),
    ],
)  # fmt: skip
def test_other_savings_of_activations_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RecomputedLayer(_config(**settings), None, store=Store())


@pytest.mark.parametrize("name", ["fp8", "cpu_offloading", "fine_grained_activation_offloading"])
def test_other_features_that_touch_activations_are_refused(name: str) -> None:
    config = copy.copy(_config())
    setattr(config, name, True)
    with pytest.raises(ValueError, match=f"{name}=True: expected .* with recompute.mode=attention_output"):
        RecomputedLayer(config, None, store=Store())


def test_the_spec_is_a_copy_and_layers_share_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_longctx.mcore.spec.get_num_layers_to_build", lambda config: 2)
    original = get_gpt_layer_local_spec()
    store = Store()
    spec = with_recompute(original, store)
    assert original.module is TransformerLayer and original.params == {}
    assert issubclass(spec.module, RecomputedLayer) and spec.params["store"] is store
    block = block_spec(
        _config(), sequence_of(), transformer_engine=False, recompute=RecomputeConfig("attention_output+offload")
    )
    assert len({id(layer.params["store"]) for layer in block.layer_specs}) == 1

    class Special(TransformerLayer):
        pass

    special = with_recompute(ModuleSpec(module=Special, submodules=original.submodules), store)
    assert issubclass(special.module, Special) and special.module.__mro__.index(RecomputedLayer) == 1
    with pytest.raises(ValueError, match="expected a spec of a TransformerLayer"):
        with_recompute(ModuleSpec(module=IdentityOp), store)
