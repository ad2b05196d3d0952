"""Multi-latent attention: settings and features that exclude it, and the numbers of parameters and FLOPs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.config import Config
from megatron_longctx.mcore.inference import inference_config
from megatron_longctx.mcore.losses import losses_config
from megatron_longctx.models import family_of_model
from megatron_longctx.planner.flops import Work, training_flops
from megatron_longctx.planner.memory.shapes import Job, stage_parameters
from megatron_longctx.training.compose import compose_config
from tests.shared.training import LATENTS, tiny_config

TP2 = {"parallelism.tensor_parallel_size": 2}


def _config(settings: dict[str, Any]) -> Config:
    return tiny_config(Path(), "latents", {**LATENTS, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model.kv_lora_rank": None}, "model.qk_head_dim=12: expected null with model.kv_lora_rank=null"),
        ({"model.v_head_dim": None}, "model.v_head_dim=None: expected a number with model.kv_lora_rank=24"),
        ({"model.qk_pos_emb_head_dim": 7}, "model.qk_pos_emb_head_dim=7: expected an even number"),
        ({"model.num_kv_heads": 2}, "model.num_kv_heads=2: expected 4 with"),
        ({"model.head_dim": 20}, "model.head_dim=20: expected null with"),
        ({"model.position_embedding": "learned"}, "model.position_embedding=learned: expected rope with"),
        ({"model.bias": True}, "model.bias=True: expected false with"),
        ({**TP2, "parallelism.sequence_parallel": False}, "parallelism.sequence_parallel=False: expected true with"),
        ({**TP2, "model.q_lora_rank": 5}, "tensor_parallel_size=2: expected a divisor of model.q_lora_rank=5"),
    ],
)
def test_settings_that_exclude_latents_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _config(settings)


@pytest.mark.parametrize(
    ("use", "settings", "message"),
    [
        (inference_config, {}, "model.kv_lora_rank=24: expected null for inference"),
        (losses_config, TP2, "parallelism.tensor_parallel_size=2: expected 1 with model.kv_lora_rank=24"),
        (lambda config: family_of_model(config.model), {}, "model.kv_lora_rank=24: expected None in a published model"),
    ],
)
def test_features_that_exclude_latents_are_refused(use: Callable[[Config], Any], settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        use(_config(settings))


def test_deepseek_v2_lite_has_the_published_parameters_and_their_flops() -> None:
    config = compose_config(["model=deepseek_v2_lite"])
    model, embeddings = config.model, 2 * 102_400 * 2048
    assert stage_parameters(Job(config, 102_400), 0) == 15_706_484_224
    # A token uses all parameters but the embedding table, the norms, and 58 of 64 experts in 26 layers.
    idle = embeddings // 2 + 27 * (512 + 2 * 2048) + 2048 + 26 * 58 * 3 * 2048 * 1408
    flops = training_flops(model, 102_400, Work(10, 27 * 55, 100))
    assert flops.dense == 10 * 6 * (15_706_484_224 - idle) + 3 * 27 * 2 * 100 * 16 * (192 + 128)
    assert flops.causal == flops.dense - 3 * 27 * 100 * 16 * (192 + 128)
