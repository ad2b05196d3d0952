"""The MLP in tiles: Megatron's numbers, its parameters, one gradient for each, and how often it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_longctx.mcore import groups
from megatron_longctx.mcore.model import build_model, transformer_config
from megatron_longctx.mcore.recompute import TiledMLP, with_mlp_tiles
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.mcore.version import mlp_of
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.recorded import relative_error
from tests.shared.training import GPT2, tiny_config

TP, MODE, TILE = "parallelism.tensor_parallel_size", "recompute.mode", "recompute.mlp_tile_tokens"
LENGTH, BATCH, LAYERS, VOCABULARY = 22, 2, 2, 64
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": GPT2,
    "tp2": {TP: 2},
    "gpt2 tp2": {TP: 2, **GPT2, "parallelism.sequence_parallel": False},
    "layer": {MODE: "layer"},
    "kept": {MODE: "attention_output"},
    "kept tp2": {TP: 2, MODE: "attention_output+offload"},
    "bf16": {"train.precision": "bf16", MODE: "attention_output"},
    "exact": {"train.precision": "fp32", MODE: "attention_output"},  # of `bf16`: the same weights, rounded
}
TILES = (None, 1, 12, 1000)
Found = dict[str, Any]


def _see(root: Path, settings: dict[str, Any], tile: int | None) -> Found:
    config = tiny_config(root, "tiles", {**settings, "data.seq_length": LENGTH, TILE: tile})
    collection = groups.initialize(tensor=config.parallelism.tensor_parallel_size, seed=5)
    gpt = build_model(config, transformer_config(config), collection, build_sequence(config, collection.cp), VOCABULARY)
    if config.recompute.mode == "attention_output" and config.parallelism.tensor_parallel_size == 1:
        gpt.bfloat16()
        if config.train.precision == "fp32":
            gpt.float()
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    seen: list[int] = []
    tiles = mock.patch.object(MLP, "forward", _counting(MLP.forward, seen))
    hooks: dict[str, int] = {}
    for name, parameter in gpt.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: hooks.update({name: hooks.get(name, 0) + 1}))
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    with tiles:
        losses = gpt(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        forward = len(seen)
        losses.float().sum().backward()
    found = {name: p.grad.clone() for name, p in gpt.named_parameters()}
    names = list(gpt.state_dict())
    groups.destroy()
    calls = {"forward": forward, "backward": len(seen) - forward, "largest": max(seen)}
    return {"losses": losses.detach(), **found, "calls": calls, "hooks": hooks, "names": names}


def _counting(original: Any, seen: list[int]) -> Any:
    def forward(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(hidden.shape[0])
        return original(self, hidden, *args, **kwargs)

    return forward


def _run(rank: int, root: Path) -> dict[tuple[str, int | None], Found]:
    return {(name, tile): _see(root, case, tile) for name, case in CASES.items() for tile in TILES}


def test_tiles_give_the_numbers_of_the_whole(tmp_path: Path) -> None:
    for rank, ranks in enumerate(run_distributed(_run, 2, tmp_path)):
        for (name, tile), found in ranks.items():
            if tile is None:
                continue
            where, whole = f"rank {rank}, {name}, tile {tile}", ranks[name, None]
            values = {key: value for key, value in whole.items() if isinstance(value, torch.Tensor)}
            assert len(values) > 10 and found["names"] == whole["names"], "parameters keep their names"
            assert found["hooks"] == whole["hooks"] and set(found["hooks"].values()) == {1}, where
            for key, value in values.items():
                if name == "bf16":
                    exact = ranks["exact", None][key]
                    assert relative_error(found[key], exact) < 2 * relative_error(value, exact) + 1e-3, (where, key)
                else:
                    assert relative_error(found[key], value) < 2e-6, (where, key)
            mode = CASES[name].get(MODE, "none")
            parallel = name == "tp2" or name == "kept tp2"  # sequence parallel
            rows = LENGTH // 2 if parallel else LENGTH
            size = max(1, tile // (BATCH * (2 if parallel else 1)))
            count = LAYERS * -(-rows // size)
            again = {"none": 1, "layer": 2}.get(mode, 1)  # Megatron's recompute does not know that nobody reads it
            assert found["calls"] == {"forward": count, "backward": again * count, "largest": min(size, rows)}, where


@pytest.mark.parametrize(
    "layer",
    [
        ModuleSpec(module=IdentityOp),
        ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules()),
        get_gpt_layer_local_spec(num_experts=2),
    ],
    ids=["no layer", "no mlp", "experts"],
)
def test_layers_without_a_dense_mlp_are_refused(layer: ModuleSpec) -> None:
    with pytest.raises(ValueError, match=r"recompute.mlp_tile_tokens=4: expected null for layers without"):
        with_mlp_tiles(layer, 4)


def test_the_spec_is_a_copy() -> None:
    original = get_gpt_layer_local_spec()
    tiled = with_mlp_tiles(original, 4)
    assert mlp_of(original).module is MLP and issubclass(mlp_of(tiled).module, TiledMLP)
    assert mlp_of(tiled).submodules is mlp_of(original).submodules

    class Special(MLP):
        pass

    original.submodules.mlp = ModuleSpec(module=Special, submodules=mlp_of(original).submodules)
    assert mlp_of(with_mlp_tiles(original, 4)).module.__mro__[1:3] == (TiledMLP, Special)


def test_gradients_added_up_elsewhere_are_refused() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    config.gradient_accumulation_fusion = True
    with pytest.raises(ValueError, match="gradient_accumulation_fusion=True: expected False with"):
        TiledMLP(config)
