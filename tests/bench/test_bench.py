"""The `bench` verbs on CPU: what they write can be used, and results are right."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_longctx import cli
from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.bench import attention
from megatron_longctx.bench.attention import Measurement, Setting, choices, table
from megatron_longctx.bench.command import Where, cases, start
from megatron_longctx.bench.ring_package import RING
from megatron_longctx.schedules import SCHEDULES
from megatron_longctx.schedules.calibration import load_calibration
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.topology import load_cluster
from megatron_longctx.training.launcher import JobFailed


def test_calibrate_leaves_what_auto_goes_by(cache: Path, tmp_path: Path) -> None:
    settings = ["parallelism=cp2", "train.device=cpu", "attention.kernel=cpu", "data.seq_length=333"]
    words = ["--ranks", "2", "--device", "cpu", "--max-tokens", "64", "--cluster", str(tmp_path / "here.yaml")]
    assert cli.main(["bench", "calibrate", *settings, *words]) == 0
    (path,) = cache.glob("*.json")
    found = load_calibration(path)
    assert (
        found.kernel == "cpu"
        and found.transport == "p2p"
        and found.cluster.n == 2
        and load_cluster(tmp_path / "here.yaml") == found.cluster
    )
    costs = found.costs
    assert costs.forward_tflops > 0 and costs.merge_gibps > 0 and 0 <= costs.blocking <= 1
    assert {(s.causal, s.backward, s.parts) for s in costs.kernels} >= {(True, False, 1), (False, True, 2)}
    assert all(sample.seconds > 0 for sample in (*costs.kernels, *costs.messages))
    # Whole passes of what is close to the fastest by simulation, which may be one mode, at the settings' length too.
    assert {sample.length for sample in costs.modes} == {2 * 64, 333} and all(
        sample.ratio > 0 for sample in costs.modes
    )
    assert {sample.backward for sample in costs.modes} == {False, True}
    assert {sample.mode.split(" (")[0] for sample in costs.modes} <= set(SCHEDULES)


def test_attention_measures_predicts_and_checks(tmp_path: Path) -> None:
    out = tmp_path / "modes.json"
    words = "--device cpu --lengths 96 --heads 4:2 --head-dim 16 --dtype fp32 --iterations 2 --check --ranks 2 --peers"
    words += " --keep-received true --graph-tokens 0"
    assert cli.main(["bench", "attention", *words.split(), "--modes", "zigzag,ulysses", "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    by_name = {m["name"]: m for m in data["measurements"]}
    assert set(by_name) >= {"one device, equal FLOPs", "zigzag", "ulysses", "NCCL Ulysses"}
    assert max(by_name["NCCL Ulysses"]["errors"].values()) < 1e-5
    asked = {"kernel": "auto", "transport": "auto", "keep_received": "true", "graph_tokens": 0}
    assert data["configuration"] == asked and "keep_received=true, graph_tokens=0" in out.with_suffix(".md").read_text()
    for name, module in (("ring-flash-attn", RING), ("TransformerEngine", "transformer_engine")):
        here = importlib.util.find_spec(module) is not None
        (line,) = [line for line in data["notes" if here else "absent"] if line.startswith(name)]
        assert line in out.with_suffix(".md").read_text()
    for name in ("zigzag", "ulysses"):
        m = by_name[name]
        assert m["forward_s"] > 0 and m["backward_s"] > 0 and m["predicted_forward_s"] > 0
        assert set(m["errors"]) == {"out", "dq", "dk", "dv"} and max(m["errors"].values()) < 1e-5
    assert data["auto"][0]["auto"] in ("zigzag", "ulysses") and data["environment"]["commit"]
    assert "| 96 | 4:2 | zigzag |" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["links", "--out", "here.txt"], "expected a .yaml file"),
        (["links", "--ranks", "1", "--out", "here.yaml"], "--ranks=1: expected 2 or more"),
        (["attention", "--modes", "zigzag,spiral", "--out", "x.json"], "--modes=spiral: expected all, or of"),
        (["attention", "--iterations", "0", "--out", "x.json"], "--iterations=0: expected 1 or more"),
        (["attention", "--head-dim", "0", "--out", "x.json"], "--head-dim=0: expected 1 or more"),
        (["attention", "--transport", "peer", "--out", "x.json"], "--transport=peer: expected auto or p2p on CPUs"),
        (["attention", "--out", "x.md"], "--out=x.md: expected a .json file"),
        (["calibrate", "--max-tokens", "0"], "--max-tokens=0: expected 64 or more"),
        (["calibrate", "--cluster", "gone/x.yaml"], "--cluster=gone/x.yaml: expected a .yaml file"),
        (["all_reduce", "--largest-mib", "0", "--out", "x.json"], "expected 1 or more, and not above the largest"),
        (["attention", "--graph-tokens", "-1", "--out", "x.json"], "--graph-tokens=-1: expected 0 or more"),
        (["attention", "--heads", "3:2", "--out", "x.json"], "--heads=3:2: expected query heads that are a multiple"),
        (["attention", "--heads", "3", "--out", "x.json"], "expected like 32:8,32:32 and 32768,65536"),
        (["attention", "--out", "gone/x.json"], "--out=gone/x.json: expected a .json file in a folder that exists"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *words, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def _refuses(rank: int) -> None:
    raise ValueError("size=0: expected 1 or more. Raise it.")


def _fails(rank: int) -> None:
    raise RuntimeError("out of luck")


def test_what_a_rank_refuses_is_told_from_what_fails_it() -> None:
    with pytest.raises(ValueError, match=r"^size=0: expected 1 or more. Raise it.$"):
        start(Where(2, "cpu"), _refuses)
    with pytest.raises(JobFailed, match=r"^rank \d failed: RuntimeError: out of luck$"):
        start(Where(2, "cpu"), _fails)


def test_cases_are_all_pairs() -> None:
    found = cases("64,128", "4:2,4:4", 16, "bf16")
    assert [(c.length, c.num_kv_heads, c.element_bytes) for c in found] == [
        (64, 2, 2),
        (128, 2, 2),
        (64, 4, 2),
        (128, 4, 2),
    ]
    assert found[0].flops == 3.5 * 4 * (64 * 65 / 2) * 4 * 16


def test_the_choice_is_judged_by_what_was_measured() -> None:
    def measured(name: str, seconds: float, predicted: float) -> Measurement:
        return Measurement(name, 64, "4:2", seconds, seconds, predicted_forward_s=predicted, predicted_backward_s=0.0)

    chunks = measured("d", 1.6, 1.0)
    chunks.for_auto = False  # auto does not look at it, however well it is priced
    found = [measured("a", 1.0, 9.0), measured("b", 1.5, 2.0), Measurement("c", 64, "4:2", reason="no"), chunks]
    assert choices(found) == [{"length": 64, "heads": "4:2", "auto": "b", "best": "a", "slower": 0.5}]
    assert "not possible: no" in table(found)


def _told(rank: int) -> list[tuple[bool, int, str]]:
    group = dist.group.WORLD
    assert group is not None
    made: list[ContextParallelAttention] = []

    class Recorded(ContextParallelAttention):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    attention.ContextParallelAttention = Recorded  # type: ignore[misc]
    contenders = attention.modes(group, Setting("reference", "p2p", "auto", 7), ["ulysses", "zigzag"])
    return [(a.keeps_received(64), a._graph_tokens, c.keep_received) for a, c in zip(made, contenders, strict=True)]


def test_modes_are_told_what_to_keep_and_what_to_replay() -> None:
    ulysses = [(True, 7, "auto")] * 2  # in one chunk and in two
    assert run_distributed(_told, 2) == [[*ulysses, (False, 7, "auto")]] * 2
