"""Steps with exchanged parts: their cells compose, a part runs from its graph, and times leave out the capture."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from analysis.step_variants import PARTS, VARIANTS, PartGraph, compare, config_of, graphs_on


def test_all_cells_compose(tmp_path: Path) -> None:
    for part, cells in PARTS.items():
        assert {name for _, variants in cells.values() for name in variants} <= set(VARIANTS)
        for settings in {tuple(settings.items()) for settings, _ in cells.values()}:
            par = (config := config_of("name", dict(settings), 2, tmp_path)).parallelism
            assert par.tensor_parallel_size * par.context_parallel_size == 2
            assert (config.train.fp8 != "none") == (part == "fp8_param")


class _Part(torch.nn.Linear):
    fuse_wgrad_accumulation = True  # its weight's gradient is summed as TransformerEngine does

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def test_a_graph_is_captured_once_and_drops_what_its_warm_up_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    part, switch, x, captured = _Part(4, 4), SimpleNamespace(on=False), torch.randn(3, 4), []
    weights: list[Any] = list(part.parameters())
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False

    def capture(plain: torch.nn.Module, given: tuple[torch.Tensor], allow_unused_input: bool) -> Any:
        captured.append(run := plain.forward)
        for parameter in weights:
            parameter.main_grad += 1
        return lambda x: 2 * run(x)  # so that it is told from the part itself

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    PartGraph(part, switch)
    plain = part(x)[0]
    assert not captured and not weights[0].grad_added_to_main_grad
    switch.on = True
    assert torch.equal(part(x)[0], 2 * plain) and torch.equal(part(x)[0], 2 * plain)
    assert len(captured) == 1 and not any(weight.main_grad.any() for weight in weights)
    assert [weight.grad_added_to_main_grad for weight in weights] == [True, False]  # the bias is autograd's


def test_times_are_of_steps_after_the_capture() -> None:
    seconds = [9.0 if i < 13 or (i - 5) % 4 == 0 else 0.1 if graphs_on(i, by_turns=True) else 0.11 for i in range(45)]
    steps = [{"train/step": i, "perf/step_s": each} for i, each in enumerate(seconds, 1)]
    found = compare([{"name": "times_8k", "steps": steps}])
    assert found == ["times_8k: 100.00 ms with graphs, 110.00 without, +10.00% (12/12 steps)"]
    assert [graphs_on(i, by_turns=False) for i in (4, 5, 9)] == [False, True, True]
