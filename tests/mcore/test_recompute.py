"""Layers that store few activations: the same gradients, how often each part runs, and what is stored where."""

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
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_longctx.config import RecomputeConfig
from megatron_longctx.core.attention.execute import Pass
from megatron_longctx.core.comm import P2PTransport
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.model import build_model, transformer_config
from megatron_longctx.mcore.recompute import RecomputedLayer, TiledMLP, with_mlp_tiles, with_recompute
from megatron_longctx.mcore.sequence import ShardedSequence, build_sequence
from megatron_longctx.mcore.spec import block_spec
from megatron_longctx.mcore.stores import Store
from megatron_longctx.mcore.version import mlp_spec
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.tolerances import relative_error
from tests.shared.sequences import sequence_of
from tests.shared.training import GPT2, tiny_config

LENGTH, BATCH, LAYERS, MICRO_BATCHES, VOCABULARY = 22, 2, 2, 2, 64
CP, TP, SCHEDULE = (f"parallelism.{key}" for key in ("context_parallel_size", "tensor_parallel_size", "schedule"))
PRECISION, TILE, MODE = "train.precision", "recompute.mlp_tile_tokens", "recompute.mode"
WITHOUT_SP = {TP: 2, "parallelism.sequence_parallel": False}
LEARNED = {"model.position_embedding": "learned", "model.bias": True, "model.tie_embeddings": True}


def _build(root: Path, settings: dict[str, Any], dropout: float = 0.0) -> tuple[GPTModel, ShardedSequence]:
    """Ranks that the settings do not use are data parallel. The weights are numbers of bf16 in any precision."""
    config = tiny_config(root, "gpt", {"data.seq_length": LENGTH, **settings})
    collection = groups.from_config(config.parallelism, seed=5)
    megatron = transformer_config(config)
    megatron.hidden_dropout = dropout  # Megatron's, which no recipe sets
    sequence = build_sequence(config, collection.cp)
    gpt = build_model(config, megatron, collection, sequence, VOCABULARY).bfloat16()
    return gpt if megatron.bf16 else gpt.float(), sequence


def _losses(gpt: GPTModel, sequence: ShardedSequence, seed: int) -> torch.Tensor:
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mine = sequence.shard_batch({"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": positions})
    return gpt(mine["tokens"], mine["positions"], None, labels=mine["labels"])


MODES = ("none", "layer", "attention_output", "attention_output+offload")
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "alone": {"dropout": 0.2},
        "bf16": {PRECISION: "bf16"},
        "post norms": {"model.post_norms": True, "model.qk_norm": True},
        "tp2": {TP: 2, "dropout": 0.2},
        "tp2 without sequence parallelism": {**WITHOUT_SP, **LEARNED},
        **{mode: {CP: 2, SCHEDULE: mode} for mode in ("zigzag", "helper")},
    },
    6: {"cp3 tp2": {CP: 3, TP: 2, "dropout": 0.2}},
}
"""Settings of models, keyed by the number of ranks."""


@dataclasses.dataclass
class Seen:
    """One rank's losses and gradients, and how often it ran attention and sent or received something."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    forward: int
    backward: int
    messages: int
    products: int  # of row-parallel layers: two per layer
    inputs: int  # of layers, whose storages exist between forward and backward


def _counted(owner: Any, name: str, counts: dict[str, int], key_of: Callable[[Any], str]) -> Any:
    original = getattr(owner, name)

    @functools.wraps(original)
    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = key_of(self)
        counts[key] += sum(map(len, args[:2])) if key == "messages" else 1
        return original(self, *args, **kwargs)

    return mock.patch.object(owner, name, counting)


def _see(root: Path, mode: str, settings: dict[str, Any]) -> Seen:
    settings = {**settings, MODE: mode}
    gpt, sequence = _build(root, settings, settings.pop("dropout", 0.0))
    counts = {"forward": 0, "backward": 0, "messages": 0, "products": 0}
    groups.seed_everything(5)
    storages: list[weakref.ref[torch.UntypedStorage]] = []

    def see(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        storages.append(weakref.ref(kwargs["hidden_states"].untyped_storage()))

    for layer in gpt.decoder.layers:
        layer.register_forward_pre_hook(see, with_kwargs=True)
    with (
        _counted(Pass, "run", counts, lambda each: "backward" if each.recording.backward else "forward"),
        _counted(P2PTransport, "start", counts, lambda _: "messages"),
        _counted(RowParallelLinear, "_forward_impl", counts, lambda _: "products"),
    ):
        # All micro-batches are in flight before the first backward, as in pipeline stages.
        losses = [_losses(gpt, sequence, index) for index in range(MICRO_BATCHES)]
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
    half = _see(root, "attention_output", {CP: 2, SCHEDULE: "zigzag", "recompute.kept_results": 0.5})
    return {**seen, "half": half, "other uses": _other_uses(root)}


@functools.cache
def results(world: int, root: Path) -> list[dict[Any, Any]]:
    return run_distributed(_run, world, root, world)


@pytest.mark.parametrize("world", CASES, ids=lambda world: f"{world} ranks")
def test_attention_runs_once_and_gradients_are_bit_identical(world: int, root: Path) -> None:
    for rank, seen in enumerate(results(world, root)):
        for name, case in CASES[world].items():
            plain = seen[name, "layer"]
            calls = LAYERS * MICRO_BATCHES
            assert plain.forward == 2 * calls
            for mode in MODES:
                found, where = seen[name, mode], f"rank {rank}, {name}, {mode}"
                assert found.backward == calls, where
                # The second run omits the last product of the MLP, unless a norm reads it.
                products = {"none": 2, "layer": 4}.get(mode, 3 + ("model.post_norms" in case))
                assert found.products == products * calls, where
                assert all(map(torch.equal, found.losses, plain.losses)), where
                wrong = [key for key, value in plain.gradients.items() if not torch.equal(found.gradients[key], value)]
                assert not wrong, f"{where}: {wrong}"
                if mode != "none":  # of both micro-batches; with offload of the last two layer runs
                    assert found.inputs == (2 if mode.endswith("offload") else calls), where
                if mode != "layer":
                    assert (found.forward, found.messages) == (calls, seen[name, "none"].messages), where
            if case.get(CP, 1) > 1:
                assert plain.messages > seen[name, "none"].messages > 0, "layer sends keys and values once more"


def test_results_that_are_not_kept_are_computed_again(root: Path) -> None:
    for seen in results(2, root):
        half, whole = seen["half"], seen["zigzag", "attention_output"]
        assert (half.forward, whole.forward) == (2 * LAYERS * MICRO_BATCHES, LAYERS * MICRO_BATCHES)
        assert all(map(torch.equal, half.losses, whole.losses)) and half.products == whole.products
        for name, gradient in whole.gradients.items():
            assert relative_error(half.gradients[name], gradient) < 2e-6, name


def _other_uses(root: Path) -> dict[str, Any]:
    gpt, _ = _build(root, {MODE: "attention_output", "data.seq_length": 8})
    tokens = torch.arange(8)[None]
    loss = gpt(tokens, tokens, None).square().sum()  # Megatron's cross-entropy itself refuses a second backward
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as twice:
        loss.backward()
    trained = loss.detach()
    gpt.eval()
    with_graph = gpt(tokens, tokens, None).square().sum()
    with torch.no_grad():
        without = gpt(tokens, tokens, None).square().sum()
    groups.destroy()
    same = {"eval": torch.equal(with_graph, trained), "no grad": torch.equal(without, trained)}
    return {"twice": str(twice.value), **same}


def test_other_uses(root: Path) -> None:
    found = results(2, root)[0]["other uses"]
    assert "expected one backward per forward" in found["twice"]
    assert found["eval"] and found["no grad"]


TILED_CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2 tp2": {**GPT2, **WITHOUT_SP},
    "layer": {MODE: "layer"},
    "attention_output": {MODE: "attention_output"},
    "offload tp2": {TP: 2, MODE: "attention_output+offload"},
    "bf16": {PRECISION: "bf16", MODE: "attention_output"},
    "frozen": {MODE: "attention_output"},  # the MLP's last weight
}
TILES = (None, 1, 12, 1000)


def _see_tiles(rank: int, root: Path) -> dict[tuple[str, int | None], dict[str, Any]]:
    return {
        (name, tile): _see_tile(root, {**case, TILE: tile}, name == "frozen")
        for name, case in TILED_CASES.items()
        for tile in TILES
    }


def _see_tile(root: Path, settings: dict[str, Any], is_frozen: bool) -> dict[str, Any]:
    gpt, sequence = _build(root, settings)
    for layer in gpt.decoder.layers if is_frozen else ():
        layer.mlp.linear_fc2.weight.requires_grad_(False)
    trained = {name: parameter for name, parameter in gpt.named_parameters() if parameter.requires_grad}
    rows: list[int] = []
    hooks: dict[str, int] = {}
    plain = MLP.forward

    def forward(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(hidden.shape[0])
        return plain(self, hidden, *args, **kwargs)

    for name, parameter in trained.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: hooks.update({name: hooks.get(name, 0) + 1}))
    with mock.patch.object(MLP, "forward", forward):
        losses = _losses(gpt, sequence, 1)
        before = len(rows)
        losses.float().sum().backward()
    groups.destroy()
    values = {"losses": losses.detach(), **{name: p.grad.clone() for name, p in trained.items()}}
    calls = {"forward": before, "backward": len(rows) - before, "largest": max(rows)}
    return {"values": values, "calls": calls, "hooks": hooks, "names": list(gpt.state_dict())}


def test_tiles_compute_what_the_whole_mlp_does(root: Path) -> None:
    for rank, seen in enumerate(run_distributed(_see_tiles, 2, root)):
        for (name, tile), found in seen.items():
            if tile is None:
                continue
            where, whole = f"rank {rank}, {name}, tile {tile}", seen[name, None]
            assert len(whole["values"]) > 10 and found["names"] == whole["names"], "parameters keep their names"
            assert found["hooks"] == whole["hooks"] and set(found["hooks"].values()) == {1}, where
            for key, value in whole["values"].items():
                if name == "bf16":
                    exact = seen["attention_output", None]["values"][key]
                    allowed = 2 * relative_error(value, exact) + 1e-3
                    assert relative_error(found["values"][key], exact) < allowed, (where, key)
                else:
                    assert relative_error(found["values"][key], value) < 2e-6, (where, key)
            ranks = 2 if name == "offload tp2" else 1  # of sequence parallelism
            rows, size = LENGTH // ranks, max(1, tile // (BATCH * ranks))
            count = LAYERS * -(-rows // size)
            # Megatron's own recomputation does not know that the second run's output is not read.
            backward = count * (2 if name == "layer" else 1)
            assert found["calls"] == {"forward": count, "backward": backward, "largest": min(size, rows)}, where


def _config(**settings: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, **settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("recompute_granularity", "full"),
        ("recompute_granularity", "selective"),
        *((name, True) for name in ("fp4", "cpu_offloading", "fine_grained_activation_offloading")),
    ],
)
def test_other_settings_that_save_activations_are_refused(name: str, value: Any) -> None:
    config = copy.copy(_config())
    setattr(config, name, value)
    with pytest.raises(ValueError, match=f"{name}={value}: expected .* with recompute.mode=attention_output"):
        RecomputedLayer(config, None, store=Store())


@pytest.mark.parametrize(
    "layer",
    [
        ModuleSpec(module=IdentityOp),
        ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules()),
        get_gpt_layer_local_spec(num_experts=2),
    ],
    ids=["no layer", "no mlp", "experts"],
)
def test_tiles_of_layers_without_a_dense_mlp_are_refused(layer: ModuleSpec) -> None:
    with pytest.raises(ValueError, match=r"recompute.mlp_tile_tokens=4: expected null for layers without"):
        with_mlp_tiles(layer, 4)


def test_specs_are_copies_and_layers_share_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
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

    class SpecialLayer(TransformerLayer):
        pass

    special = with_recompute(ModuleSpec(module=SpecialLayer, submodules=original.submodules), store)
    assert issubclass(special.module, SpecialLayer) and special.module.__mro__.index(RecomputedLayer) == 1
    with pytest.raises(ValueError, match="expected a spec of a TransformerLayer"):
        with_recompute(ModuleSpec(module=IdentityOp), store)

    tiled = with_mlp_tiles(original, 4)
    assert mlp_spec(original).module is MLP and issubclass(mlp_spec(tiled).module, TiledMLP)
    assert mlp_spec(tiled).submodules is mlp_spec(original).submodules

    class SpecialMLP(MLP):
        pass

    original.submodules.mlp = ModuleSpec(module=SpecialMLP, submodules=mlp_spec(original).submodules)
    assert mlp_spec(with_mlp_tiles(original, 4)).module.__mro__[1:3] == (TiledMLP, SpecialMLP)
