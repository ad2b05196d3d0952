"""Benchmarks refuse options and settings that they cannot measure, and write nothing."""

from pathlib import Path

import pytest

from analysis.benchmarks.__main__ import main

ATTENTION = ("attention", "--device", "cpu")
ALL_REDUCE = ("all_reduce", "--device", "cpu", "--smallest-kib", "8192")
INFERENCE = ("inference", "parallelism=cp2", "train.device=cpu", "train.precision=fp32", "attention.kernel=cpu")
PARTS = ("parts", "parallelism=single", "train.device=cpu")
PREFILL = ("prefill", "train.device=cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*ATTENTION, "--modes", "zigzag,spiral"), "--modes=spiral: expected all, or of"),
        ((*ATTENTION, "--iterations", "0"), "--iterations=0: expected 1 or more"),
        ((*ATTENTION, "--head-dim", "0"), "--head-dim=0: expected 1 or more"),
        ((*ATTENTION, "--transport", "peer"), "--transport=peer: expected auto or p2p on CPUs"),
        ((*ATTENTION, "--out", "x.md"), "--out=x.md: expected a .json file"),
        ((*ATTENTION, "--out", "gone/x.json"), "--out=gone/x.json: expected a .json file in a folder that exists"),
        ((*ATTENTION, "--heads", "3:2"), "--heads=3:2: expected query:KV heads"),
        ((*ATTENTION, "--lengths", "0"), "--lengths=0: expected whole numbers of 1 or more"),
        ((*ATTENTION, "--masks", "causal,spiral"), "--masks=spiral: expected parts of causal, full"),
        ((*ATTENTION, "--masks", "pack=25"), "--masks=pack=25: expected parts of causal, full, window=N"),
        ((*ATTENTION, "--masks", "documents=9@1", "--lengths", "128"), "=documents=9@1: expected at most 8 in 128 tok"),
        ((*ATTENTION, "--ranks", "-1"), "ranks=-1: expected 1 or more"),
        ((*ALL_REDUCE, "--largest-mib", "0"), "not above the largest"),
        ((*ALL_REDUCE, "--ranks", "1"), "ranks=1: expected 2"),
        ((*ALL_REDUCE, "--blocks", "16,129", "--largest-mib", "16"), "--blocks=129: expected 1 to 128"),
        ((*ALL_REDUCE, "--blocks", "many", "--largest-mib", "16"), "--blocks=many: expected"),
        ((*INFERENCE, "--miss-rates", "0.1,2"), "--miss-rates=0.1,2: expected shares from above 0 to 1"),
        ((*INFERENCE, "--miss-rates", "0"), "--miss-rates=0: expected shares from above 0"),
        ((*INFERENCE, "--miss-rates", "nan"), "--miss-rates=nan: expected numbers"),
        ((*INFERENCE, "--lengths", "1"), "--lengths=1: expected whole numbers of 2 or more"),
        ((*INFERENCE, "--batches", "2,x"), "--batches=2,x: expected whole numbers of 1 or more"),
        ((*INFERENCE, "--context", "0"), "--context=0: expected whole numbers of 1 or more"),
        ((*INFERENCE, "--modes", "pass_q,ring"), "--modes=pass_q,ring: expected some of one_hop, pass_kv, pass_q"),
        ((*INFERENCE, "--iterations", "-1"), "--iterations=-1: expected 0 or more"),
        ((*INFERENCE, "--tokens", "0"), "--tokens=0: expected 1 or more"),
        ((*INFERENCE, "parallelism.pipeline_parallel_size=2"), "1 for inference"),
        ((*INFERENCE, "inference.cuda_graphs=true"), "inference.cuda_graphs=true: expected auto or false on CPUs"),
        (("planning", "--pack", "7"), "--pack=7: expected one of 24, 6, 15, 64x1K, magi"),
        (("planning", "--ranks", "0"), "--ranks=0: expected 1 or more"),
        (("planning", "--iterations", "0"), "--iterations=0: expected 1 or more"),
        (("simulation", "--ranks", "12"), "--ranks=12: expected a multiple of 8"),
        (("simulation", "--tokens", "0"), "--tokens=0: expected 1 or more"),
        (("data", "--megabytes", "0"), "--megabytes=0: expected 1 or more"),
        (("simulation", "--schedules", "ring,spiral"), "--schedules=spiral: expected some of"),
        ((*PARTS, "--lengths", "a"), "--lengths=a: expected whole numbers of 2 or more"),
        ((*PARTS, "--iterations", "0"), "--iterations=0: expected 1 or more"),
        ((*PARTS, "parallelism=cp2"), "parallelism=2 ranks: expected 1"),
        ((*PREFILL, "--lengths", "a"), "--lengths=a: expected whole numbers of 2 or more"),
        ((*PREFILL, "--reductions", "int5"), "--reductions=int5: expected of none, int8"),
        ((*PREFILL, "--iterations", "0"), "--iterations=0: expected 1 or more"),
        (PREFILL, "parallelism.tensor_parallel_size=1: expected 2 or more"),
        ((*PREFILL, "parallelism=cp2"), "parallelism.context_parallel_size=2: expected 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([words[0], "--out", "x.json", *words[1:]]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
