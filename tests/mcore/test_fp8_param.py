"""Weights in FP8 alone: main parameters, checkpoints and gathers have the values that they have without."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.config import TrainConfig
from megatron_longctx.mcore import checkpoint, fp8
from megatron_longctx.mcore import optimizer as optim
from megatron_longctx.mcore.fp8 import fp8_settings
from megatron_longctx.mcore.step import _evaluating
from megatron_longctx.testing.distributed import run_distributed
from tests.mcore import tiny_gpt
from tests.mcore.tiny_gpt import FINGERPRINT, Layout, Trainer
from tests.shared import fp8_tensor
from tests.shared.fp8_tensor import Fp8Tensor, rounded

LAYOUTS = {"dp2": Layout(bf16=True, overlap=True), "tp2": Layout(bf16=True, tensor=2)}


class Quantized(Trainer):
    """A trainer whose layers have their weights in FP8 alone, without TransformerEngine's products of these."""

    def __init__(self, layout: Layout) -> None:
        build = tiny_gpt.build_model

        def with_fp8_weights(*args: Any, **kwargs: Any) -> Any:
            gpt = build(*args, **kwargs)
            for layer in gpt.decoder.layers.modules():
                if getattr(getattr(layer, "weight", None), "ndim", 1) == 2:
                    attributes = vars(layer.weight)
                    layer.weight = Fp8Tensor.of(layer.weight)
                    for name, value in attributes.items():
                        setattr(layer.weight, name, value)
            gpt.config.fp8_param = True
            return gpt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny_gpt, "build_model", with_fp8_weights)
            super().__init__(layout)

    @property
    def weights(self) -> dict[str, Any]:
        found = fp8.fp8_weights(self.models[0].module.module)
        assert len(found) == 8
        return found


def _mains(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the whole main parameters of this rank's weights, which data-parallel ranks share."""
    found = {}
    for name, parameter in trainer.models[0].module.module.named_parameters():
        whole = torch.zeros(parameter.shape)
        for part in optim.parts_of(trainer.optimizer):
            for model_group, main_group in zip(
                part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True
            ):
                for own, main in zip(model_group, main_group, strict=True):
                    if own is parameter:
                        span = part._get_model_param_range_map(own)["param"]
                        whole.view(-1)[span.start : span.end] = main.detach()
        dist.all_reduce(whole, group=trainer.groups.dp_cp)
        found[name] = whole
    return found


def _equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(x, two[name]) for name, x in one.items())


def _follow(trainer: Quantized) -> bool:
    """Whether weights are what main parameters round to, and backward's transposes are theirs."""
    mains = _mains(trainer)
    return all(
        torch.equal(weight.dequantize(), rounded(mains[name])) and torch.equal(weight.transpose_of, weight.bytes.t())
        for name, weight in trainer.weights.items()
    )


def _alone(trainer: Trainer) -> checkpoint.TrainingState:
    return checkpoint.TrainingState(trainer.models, None, None, FINGERPRINT, trainer.optimizer)


def _case(root: Path, layout: Layout) -> dict[str, bool]:
    found: dict[str, bool] = {}
    plain = Trainer(layout)
    begun = _mains(plain)
    plain.train(range(2))
    checkpoint.begin(root / "plain", 2, plain.state(), {}).finish()
    trained = _mains(plain)
    checkpoint.begin(root / "alone", 2, _alone(plain), {}).finish()
    alone = {name: x.detach().float() for name, x in plain.models[0].module.module.named_parameters()}
    plain.close()

    trainer = Quantized(layout)
    found["main parameters begin with the exact values"] = _equal(_mains(trainer), begun)
    kept = [weight.get_high_precision_init_val() for weight in trainer.weights.values()]
    found["initial values are not kept"] = kept == [None] * len(kept)
    reading = checkpoint.sharded_state_dict(_alone(trainer), is_loading=True, with_rng=False)["model"].values()
    found["read as bf16"] = all(type(each.data) is not Fp8Tensor for each in reading)
    checkpoint.load(root / "plain", trainer.state())
    found["resumed from a checkpoint without"] = _equal(_mains(trainer), trained) and _follow(trainer)
    checkpoint.load(root / "alone", _alone(trainer))
    found["begun with weights alone"] = _equal(_mains(trainer), alone) and _follow(trainer)
    trainer.close()

    trainer = Quantized(layout)
    losses = trainer.train(range(2))
    checkpoint.begin(root / "fp8", 2, trainer.state(), {}).finish()
    found["after a save"] = _follow(trainer)
    saved = _mains(trainer)
    checkpoint.begin(root / "fp8_alone", 2, _alone(trainer), {}).finish()
    losses += trainer.train(range(2, 4))
    found["losses fall"] = losses[-1] < losses[0]
    with _evaluating(trainer.models):
        found["in an evaluation"] = _follow(trainer)
    trainer.close()

    again = Quantized(layout)
    checkpoint.load(root / "fp8", again.state())
    found["resumed"] = _equal(_mains(again), saved) and _follow(again)
    found["resumed training"] = again.train(range(2, 4)) == losses[2:]
    again.close()

    plain = Trainer(layout)
    checkpoint.load(root / "fp8", plain.state())
    weights = dict(plain.models[0].module.module.named_parameters())
    found["resumed without"] = _equal(_mains(plain), saved)
    found["its weights"] = all(torch.equal(x, saved[name].bfloat16()) for name, x in weights.items())
    checkpoint.load(root / "fp8_alone", _alone(plain))
    found["weights alone"] = all(torch.equal(x, saved[name].bfloat16()) for name, x in weights.items())
    plain.close()
    return found


def _run(rank: int, root: Path) -> dict[str, dict[str, bool]]:
    with pytest.MonkeyPatch.context() as patch:
        fp8_tensor.install(patch)
        return {name: _case(root / name, layout) for name, layout in LAYOUTS.items()}


def _lost(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fp8_tensor.install(patch)
        patch.setattr(Fp8Tensor, "of", _without_values)
        with pytest.raises(ValueError, match=r"train\.fp8_param=True: expected false with .* has lost the values of"):
            Quantized(Layout(bf16=True))


def _without_values(values: torch.Tensor) -> Any:
    made: Any = Fp8Tensor(torch.empty(values.shape, dtype=torch.uint8), torch.ones(()))
    made.quantize(values.detach())
    return torch.nn.Parameter(made)


@functools.cache
def results(root: Path) -> list[dict[str, dict[str, bool]]]:
    return run_distributed(_run, 2, root)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_have_the_values_of_main_parameters(root: Path, layout: str) -> None:
    for found in results(root):
        assert len(found[layout]) == 13 and all(found[layout].values()), found[layout]


def test_megatron_gets_the_setting() -> None:
    assert fp8_settings(TrainConfig(fp8="blockwise", fp8_param=True))["fp8_param"]
    assert not fp8_settings(TrainConfig(fp8="blockwise"))["fp8_param"]


def test_lost_values_are_refused() -> None:
    run_distributed(_lost, 1)
