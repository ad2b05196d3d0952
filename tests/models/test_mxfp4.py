"""gpt-oss's weights in MXFP4 are dequantized to the same numbers as by `transformers`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_longctx.models.huggingface import HuggingFaceFolder

CONFIG = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
BYTES = {
    "w_blocks": torch.randint(256, (2, 6, 3, 16), dtype=torch.uint8),
    "w_scales": torch.randint(100, 140, (2, 6, 3), dtype=torch.uint8),
    "b": torch.randn(4),
}


def folder_of(path: Path, **tensors: torch.Tensor) -> HuggingFaceFolder:
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, path / "model.safetensors")
    return HuggingFaceFolder(path)


def test_blocks_are_dequantized(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = folder_of(tmp_path, **BYTES)
    assert folder.config == {"model_type": "gpt_oss"}
    assert {name: stored.shape for name, stored in folder.tensors.items()} == {"w": (2, 96, 6), "b": (4,)}
    expected = convert_moe_packed_tensors(BYTES["w_blocks"].clone(), BYTES["w_scales"].clone())
    assert torch.equal(folder.read("w"), expected) and folder.read("w").dtype == folder.tensors["w"].dtype
    assert torch.equal(folder.read("b"), BYTES["b"])


def test_blocks_without_exponents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected the exponents of w_blocks beside it"):
        folder_of(tmp_path, w_blocks=BYTES["w_blocks"])
    with pytest.raises(ValueError, match=r"model\.safetensors: w_blocks is of 2 dimensions, expected 4"):
        folder_of(tmp_path, w_blocks=BYTES["w_blocks"][0, 0], w_scales=BYTES["w_scales"])
    with pytest.raises(ValueError, match="other is of U8, expected one of"):
        folder_of(tmp_path, other=BYTES["w_blocks"])
