"""Steps with exchanged parts: their cells compose, a part runs from its graph, and times leave out the capture."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from analysis import step_variants
from analysis.step_variants import PARTS, VARIANTS, PartGraph, config_of, graphs_on


def test_all_cells_compose(tmp_path: Path) -> None:
    for part, cells in PARTS.items():
        assert {name for _, variants in cells.values() for name in variants} <= set(VARIANTS)
        for settings in {tuple(settings.items()) for settings, _ in cells.values()}:
            config = config_of("name", dict(settings), 2, tmp_path)
            par = config.parallelism
            assert par.tensor_parallel_size * par.context_parallel_size == 2
            assert (config.train.fp8 != "none") == (part == "fp8_param")


class _Part(torch.nn.Linear):
    """A part with a sum of gradients that autograd does not see, as TransformerEngine's."""

    fuse_wgrad_accumulation = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def test_a_graph_is_captured_once_and_drops_what_its_warm_up_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[torch.nn.Module] = []

    def capture(part: torch.nn.Module, given: tuple[torch.Tensor], allow_unused_input: bool) -> Any:
        captured.append(part)
        for parameter in weights:
            parameter.main_grad += 1
        run = part.forward
        return lambda x: 2 * run(x)  # so that it is told from the part itself

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    part, switch = _Part(4, 4), SimpleNamespace(on=False)
    weights: list[Any] = list(part.parameters())
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    PartGraph(part, switch)
    x = torch.randn(3, 4)
    plain = part(x)[0]
    assert not captured and not weights[0].grad_added_to_main_grad
    switch.on = True
    for _ in range(2):
        assert torch.equal(part(x)[0], 2 * plain)
    assert len(captured) == 1 and not any(weight.main_grad.any() for weight in weights)
    assert [weight.grad_added_to_main_grad for weight in weights] == [True, False]  # the bias is autograd's
    switch.on = False
    assert torch.equal(part(x)[0], plain)


def test_times_are_of_steps_after_the_capture() -> None:
    steps = [
        {"train/step": i + 1, "perf/step_s": 0.9 if i < 13 or (i - 5) % 4 == 0 else 0.1 if graphs_on(i, True) else 0.11}
        for i in range(45)
    ]
    (found,) = step_variants.compare([{"name": "times_8k", "steps": steps}])
    assert found == "times_8k: 100.00 ms with graphs, 110.00 without, +10.00% (12/12 steps)"
    assert [graphs_on(i, by_turns=False) for i in (4, 5, 9)] == [False, True, True]
