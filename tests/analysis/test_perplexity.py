"""Tables of perplexities with quantized sums, and the text that they use."""

import math
from pathlib import Path

import pytest
import torch

from analysis import perplexity
from megatron_longctx.mcore.tokenizer import build_tokenizer


def test_perplexities_are_paired_with_the_unquantized(tmp_path: Path) -> None:
    settings = perplexity.settings()
    assert settings[0].output_projection == "none" and len(settings) == 1 + 2 * 3 * 3 + 2
    plain = [1.0, 2.0, 3.0]
    losses = [plain] + [[x + 0.01 * number + 0.001 * x for x in plain] for number in range(1, len(settings))]
    found = perplexity.results(losses)
    assert found[0].perplexity == pytest.approx(math.exp(2.0)) and found[0].more == found[0].noise == 0
    assert found[3].more == pytest.approx(0.032) and found[3].noise == pytest.approx(0.001 / math.sqrt(3))
    rows = perplexity.table(found).splitlines()
    assert len(rows) == 2 + len(settings) and rows[2].startswith("| none |  |  | 7.3891 |")
    assert "| int4 output projection, none down projection | 128 | asymmetric |" in rows[-2]
    kv = perplexity.kv_table([plain, [x + 0.5 for x in plain]])
    assert kv.endswith("| exact | 7.3891 |  |\n| 8-bit | 12.1825 | +0.50000 ± 0.00000 |")
    perplexity.draw(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_held_out_windows_are_distinct() -> None:
    windows = perplexity.held_out(build_tokenizer("byte-level", None), 128, 16)
    assert windows.shape == (16, 129) and windows.dtype == torch.int64
    assert len({tuple(window.tolist()) for window in windows}) == 16
