"""The text model of a published one for images."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from megatron_longctx.cli.conversion import export_model, import_model
from tests.cli.test_conversion import PROMPT, rewrites
from tests.shared.published import same, tensors_of, write_model

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_the_text_model_is_taken_out_of_one_for_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """RoPE divided among the three positions of images is the same for text. Experts may be stacked in files."""
    from transformers import AutoModelForCausalLM

    rope = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5, "rope_theta": 1e4}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    model = write_model(
        tmp_path / "source", "qwen3_5_moe", torch.float32, vision=vision, rope_parameters=rope, head_dim=16,
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=6, linear_value_head_dim=10, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=12,
    )  # fmt: skip

    def published(tensors: dict[str, torch.Tensor]) -> None:
        tensors["mtp.fc.weight"] = torch.ones(2, 2)
        for layer in range(2):
            block = f"model.language_model.layers.{layer}.mlp.experts."
            gate, up, down = (
                torch.stack([tensors.pop(f"{block}{expert}.{name}_proj.weight") for expert in range(3)])
                for name in ("gate", "up", "down")
            )
            tensors |= {f"{block}gate_up_proj": torch.cat([gate, up], dim=1), f"{block}down_proj": down}

    stacked = shutil.copytree(tmp_path / "source", tmp_path / "stacked")
    rewrites(published)(stacked)
    for source in ("source", "stacked"):
        with caplog.at_level(logging.INFO):
            import_model(str(tmp_path / source), [f"out={tmp_path / 'runs' / source}"])
        export_model([f"checkpoint={tmp_path / 'runs' / source}", f"out={tmp_path / 'back' / source}"])
    images = len(model.model.visual.state_dict())
    assert f"left out: {images} tensors model.visual.*" in caplog.text and "left out: 1 tensors mtp.*" in caplog.text
    found = [tensors_of(tmp_path / "back" / source) for source in ("source", "stacked")]
    assert same(*found)
    fields = json.loads((tmp_path / "back/stacked/config.json").read_text())
    assert fields["architectures"] == ["Qwen3_5MoeForCausalLM"] and "image_token_id" not in fields
    text, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "back/stacked"), torch.tensor([PROMPT])
    assert torch.equal(text(tokens).logits, model(tokens).logits)
    rewrites(lambda t: t.update({"model.norm.weight": torch.ones(32)}))(stacked)
    with pytest.raises(ValueError, match=r"expected tensors model\.language_model\.\* or model\.\*, not one under"):
        import_model(str(stacked), [f"out={tmp_path / 'other'}"])
