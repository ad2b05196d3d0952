"""FP8: Megatron's settings, groups of amaxes, equal scales in reruns and after a checkpoint, and what is refused."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from megatron_longctx.config import TrainConfig
from megatron_longctx.mcore import checkpoint, checkpoint_reader, fp8, groups
from megatron_longctx.mcore.fp8 import fp8_settings
from megatron_longctx.mcore.model import build_model, transformer_config
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.mcore.step import EvalStep
from megatron_longctx.testing.distributed import run_distributed
from tests.mcore.tiny_gpt import FINGERPRINT, Layout, Trainer
from tests.shared import transformer_engine
from tests.shared.training import tiny_config
from tests.shared.transformer_engine import FP8GlobalStateManager, Quantized, activation_recompute_forward, autocast

LENGTH, STEPS = 32, 2
NAMES = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_recipes_are_megatrons(recipe: str) -> None:
    config = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, **fp8_settings(TrainConfig(fp8=recipe))
    )
    assert config.fp8 == ("hybrid" if recipe in ("delayed", "tensorwise") else "e4m3")
    assert config.fp8_recipe == recipe and not config.fp8_param and not config.tp_only_amax_red
    assert (config.fp8_amax_history_len, config.fp8_amax_compute_algo) == (1024, "max")
    assert not config.first_last_layers_bf16 and not config.fp8_dot_product_attention


def test_layers_in_bf16_are_megatrons(tmp_path: Path) -> None:
    keys = {"train.fp8": "blockwise", "train.precision": "bf16", "train.device": "auto", "model.implementation": "auto"}
    ends = {"train.bf16_layers_at_start": 0, "train.bf16_layers_at_end": 1, "model.num_layers": 4}
    sizes = {"model.hidden_size": 64, "model.ffn_hidden_size": 64, "data.seq_length": LENGTH}
    config = transformer_config(tiny_config(tmp_path, "a", {**keys, **ends, **sizes}))
    assert config.first_last_layers_bf16
    assert (config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16) == (0, 1)
    assert fp8_settings(TrainConfig()) == {} and transformer_config(tiny_config(tmp_path, "b")).fp8 is None


def _train(root: Path, mode: str) -> dict[str, Any]:
    """Train with two micro-batches in flight. The inputs of both MLP products have delayed scales."""
    sizes = {"data.seq_length": LENGTH, "parallelism.context_parallel_size": 2}
    config = tiny_config(root, "gpt", {**sizes, "recompute.mode": mode})
    collection = groups.from_config(config.parallelism, seed=5)
    megatron, sequence = transformer_config(config), build_sequence(config, collection.cp)
    megatron.fp8 = "hybrid"
    gpt = build_model(config, megatron, collection, sequence, 64)
    for layer in gpt.decoder.layers:
        for name in ("linear_fc1", "linear_fc2"):
            setattr(layer.mlp, name, Quantized(getattr(layer.mlp, name)))
    optimizer, losses, gradients, updates = torch.optim.SGD(gpt.parameters(), 0.5), [], [], []
    for step in range(STEPS):
        begin, both = len(FP8GlobalStateManager.updates), []
        for number in range(2):
            tokens = torch.randint(64, (1, LENGTH + 1), generator=torch.Generator().manual_seed(10 * step + number))
            batch = {"x": tokens[:, :-1], "y": tokens[:, 1:], "at": torch.arange(LENGTH)[None]}
            mine = sequence.shard_batch(batch)
            with autocast(recipe="delayed"):
                both.append(gpt(mine["x"], mine["at"], None, labels=mine["y"]))
        for loss in both:
            loss.sum().backward()
        losses.append([loss.detach() for loss in both])
        gradients.append([p.grad.clone() for p in gpt.parameters()])
        updates.append(FP8GlobalStateManager.updates[begin:])
        optimizer.step()
        optimizer.zero_grad()
    layers = [each for each in gpt.modules() if isinstance(each, Quantized)]
    scales = [each.fp8_meta[f"scaling_{way}"].scale.clone() for each in layers for way in ("fwd", "bwd")]
    amaxes = [each.fp8_meta["scaling_fwd"].amax_history.clone() for each in layers]
    assert not activation_recompute_forward._is_first_fp8_module, "an entry of every first run is left"
    groups.destroy()  # resets the state of FP8
    assert not FP8GlobalStateManager.quantization_state.layers
    return {"losses": losses, "gradients": gradients, "scales": scales, "amaxes": amaxes, "updates": updates}


def _scales(gpt: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Give every MLP delayed scales that depend on the number of its layer, and return them by that."""
    found = {}
    gpt.config.fp8, gpt.config.fp8_recipe = "hybrid", "delayed"
    for layer in gpt.decoder.layers:
        layer.mlp.linear_fc1 = linear = Quantized(layer.mlp.linear_fc1)
        linear.init_fp8_meta_tensors(None)
        found[layer.layer_number] = {
            name: getattr(linear.fp8_meta[f"scaling_{name.rpartition('_')[2]}"], name.rpartition("_")[0])
            for name in NAMES
        }
    return found


def _checkpoints(root: Path) -> dict[str, Any]:
    trainer = Trainer(Layout())
    saved = _scales(trainer.models[0].module)
    for number, scales in saved.items():
        for i, each in enumerate(scales.values()):
            each.copy_(torch.arange(each.numel()).view(each.shape) + 100 * number + 1000 * i)
    state = checkpoint.TrainingState(trainer.models, None, None, FINGERPRINT)
    checkpoint.begin(root, 1, state, {}).finish()
    trainer.close()
    equal = {}
    for layout in (Layout(), Layout(tensor=2), Layout(pipeline=2)):
        trainer = Trainer(layout)
        loaded = _scales(trainer.models[0].module)
        checkpoint.load(root, checkpoint.TrainingState(trainer.models, None, None, FINGERPRINT))
        equal[str(layout)] = all(
            torch.equal(scales[name], saved[number][name]) for number, scales in loaded.items() for name in NAMES
        )
        trainer.close()
    trainer = Trainer(Layout())
    loaded = _scales(trainer.models[0].module)
    own = [(name, each.fill_(7)) for scales in loaded.values() for name, each in scales.items()]
    trainer.config.fp8 = None  # scales are left out, and those of other weights are forgotten
    checkpoint.load(root, checkpoint.TrainingState(trainer.models, None, None, FINGERPRINT))
    equal["without FP8"] = all(each.eq(name.startswith("scale")).all() for name, each in own)
    trainer.config.fp8 = "hybrid"
    short = {name: each[:1] for name, each in loaded[1].items()}
    with pytest.raises(ValueError, match=r"linear_fc1\._extra_state={.*expected {'scale_fwd': \(3,\), .* in this Tr"):
        fp8.give_scales(trainer.models[0].module, {"decoder.layers.0.mlp.linear_fc1._extra_state": short})
    trainer.close()
    return equal


def _evaluated() -> tuple[Any, Any]:
    """Return what a model's configuration says of FP8 during and after an evaluation without samples."""
    config, seen = SimpleNamespace(fp8="hybrid"), []
    model = SimpleNamespace(config=config, training=True, train=lambda mode: seen.append(config.fp8))
    model.eval = lambda: None
    step: Any = EvalStep([model], None, None, 1)  # type: ignore[arg-type]
    step.run(lambda number: None, [], 0, (0, 1))
    return seen[0], config.fp8


def _run(rank: int, root: Path) -> dict[str, Any]:
    patch = pytest.MonkeyPatch()
    transformer_engine.install(patch)
    found: dict[str, Any] = {}
    try:
        for mode in ("none", "attention_output", "attention_output+offload"):
            found[mode] = _train(root, mode)
        groups.initialize(context=2)
        amax = parallel_state.get_amax_reduction_group(with_context_parallel=True)
        found["group"] = dist.get_process_group_ranks(amax)
        groups.destroy()
        found["checkpoints"] = _checkpoints(root / "checkpoints")
        found["evaluated"] = _evaluated()
    finally:
        patch.undo()
    return found


@functools.cache
def results(root: Path) -> list[dict[str, Any]]:
    return run_distributed(_run, 2, root)


def test_reruns_have_the_scales_of_the_first_run(root: Path) -> None:
    for seen in results(root):
        plain = seen["none"]
        assert plain["updates"] == [["fwd"] * 2 + ["bwd"] * 2] * STEPS
        assert all(float(scale[0]) not in (0.0, 1.0) for scale in plain["scales"])
        for mode in ("attention_output", "attention_output+offload"):
            found = seen[mode]
            for what in ("losses", "gradients"):
                for step, (own, expected) in enumerate(zip(found[what], plain[what], strict=True)):
                    assert all(map(torch.equal, own, expected)), f"{mode}: {what} of step {step}"
            assert all(map(torch.equal, found["scales"], plain["scales"])), mode
            assert all(map(torch.equal, found["amaxes"], plain["amaxes"])), mode
            # Reruns update no scales of forward, and only the first layer's update those of backward.
            assert found["updates"] == [["fwd"] * 2 + ["bwd"] * 4] * STEPS


def test_layers_outside_of_autocast_run_again_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer_engine.install(monkeypatch)
    rerun = fp8.Rerun("hybrid")
    with rerun.first():
        assert not FP8GlobalStateManager.is_fp8_enabled()
    with rerun.again():
        assert not FP8GlobalStateManager.is_fp8_enabled()


def test_context_parallel_ranks_share_amaxes(root: Path) -> None:
    assert all(seen["group"] == [0, 1] for seen in results(root))


def test_scales_are_restored_at_other_sizes(root: Path) -> None:
    for seen in results(root):
        assert len(seen["checkpoints"]) == 4 and all(seen["checkpoints"].values()), seen["checkpoints"]


def test_evaluation_is_in_bf16(root: Path) -> None:
    assert all(seen["evaluated"] == (None, "hybrid") for seen in results(root))


def test_readers_take_scales_and_nothing_else() -> None:
    check = checkpoint_reader._check_layer_state
    check("layer", {"scale_fwd": torch.ones(3)})
    with pytest.raises(Exception, match="layer holds a dict, expected a tensor or nothing"):
        check("layer", {"scale_fwd": [1.0]})


def test_an_old_transformer_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer_engine.install(monkeypatch)
    fp8.require_fp8("delayed")
    monkeypatch.delattr(FP8GlobalStateManager, "quantization_state")
    with pytest.raises(
        ValueError, match=r"train\.fp8=delayed: expected none with this TransformerEngine, which is old"
    ):
        fp8.require_fp8("delayed")
