"""Predictions by hand, and their uses: refusals, advice, the longest sequence, reports, and checks before a run."""

import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_longctx.cli import cli
from megatron_longctx.config import MAX_TOKENS
from megatron_longctx.mcore.tokenizer import build_tokenizer
from megatron_longctx.planner.memory import SAFE_SHARE, Job, check, max_length, predict, report, summary
from megatron_longctx.planner.memory.reports import planned_job
from megatron_longctx.planner.memory.shapes import LayerKind
from megatron_longctx.training import preflight
from megatron_longctx.training.compose import compose_config, override_config
from tests.shared.training import write_documents

GIB = 2**30
_llama = functools.cache(lambda: compose_config([*LLAMA, "attention.transport=p2p"]))
LLAMA = ("model=llama3_8b", "parallelism=cp8", "data.seq_length=1048576", "parallelism.cluster=h200_x8")


def _job(*words: str, **others: int) -> Job:
    config = override_config(_llama(), words)
    assert config.model.vocab_size is not None
    return Job(config, config.model.vocab_size, **others)


def _terms(job: Job) -> dict[str, int]:
    return {term.name: term.num_bytes for term in predict(job).terms}


def test_static_terms_by_hand() -> None:
    terms = _terms(_job())
    parameters = 8_030_261_248  # of Llama 3 8B
    assert terms["weights"] == 2 * parameters and terms["gradients (fp32)"] == 4 * parameters
    assert terms["optimizer state (fp32)"] == 12 * parameters // 8
    assert _terms(_job(data_parallel_size=2))["optimizer state (fp32)"] == 12 * parameters // 16
    assert _terms(_job("optim.distributed=false"))["optimizer state (fp32)"] == 12 * parameters
    fp32 = _terms(_job("train.precision=fp32"))
    assert fp32["weights"] == 4 * parameters and fp32["optimizer state (fp32)"] == 8 * parameters // 8
    # Rows are sharded, norms are not.
    assert _terms(_job("parallelism=tp2_cp4"))["weights"] == parameters + 65 * 4096
    tokens = 131072
    assert terms["layer inputs"] == 32 * tokens * 4096 * 2
    assert terms["attention results"] == 32 * tokens * (4096 * 2 + 32 * 4)
    assert terms["logits"] == tokens * 128256 * 10, "fp32 logits and softmax, bf16 logits"


def test_layers_that_stay_in_bf16_have_nothing_in_fp8() -> None:
    words = ("train.fp8=tensorwise", "recompute.mode=none", "model.num_layers=4")
    plain = _terms(_job("train.fp8=none", *words[1:]))
    whole, half = (
        _terms(_job(*words, f"train.bf16_layers_at_start={n}", f"train.bf16_layers_at_end={n}")) for n in (0, 1)
    )
    assert half["weights in FP8"] == whole["weights in FP8"] // 2 == 2 * 2 * 218_112_000
    for name in ("other activations of attention", "activations of the MLP"):
        assert whole[name] < plain[name] and 2 * half[name] == whole[name] + plain[name]
    stages = _job(*words, "train.bf16_layers_at_start=1", "parallelism=cp8", "parallelism.pipeline_parallel_size=2")
    assert [stages.kinds(stage) for stage in (0, 1)] == [
        {LayerKind(): 1, LayerKind(fp8=True): 1},
        {LayerKind(fp8=True): 2},
    ]


def test_modes_keep_less_and_less() -> None:
    chunk = "recompute.head_chunk_tokens=4096"
    modes = ("none", "attention_output", "layer", "attention_output+offload")
    sizes = [predict(_job(chunk, f"recompute.mode={mode}")).num_bytes for mode in modes]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    offloaded = predict(_job("recompute=attention_output+offload"))
    assert offloaded.host_bytes == 32 * 131072 * (2 * 4096 * 2 + 32 * 4), "sizes are powers of two already"
    assert predict(_job()).host_bytes == 0
    half = predict(_job("recompute=attention_output+offload", "recompute.kept_results=0.5"))
    assert half.host_bytes == 32 * 131072 * (3 * 4096 + 16 * 4), "half of attention's results"
    uneven = predict(_job("recompute=attention_output+offload", "data.seq_length=1100000"))
    assert uneven.host_bytes == 32 * 2 * 131072 * (2 * 4096 * 2 + 32 * 4)
    inputs = {term.name: term.num_bytes for term in offloaded.peak.terms}["layer inputs not on the host"]
    assert inputs == 2 * 131072 * 4096 * 2, "two of 32 layers"


def test_pipeline_stages_hold_micro_batches_in_flight() -> None:
    stages = (
        "parallelism.pipeline_parallel_size=4",
        "parallelism.context_parallel_size=2",
        "train.global_batch_size=8",
    )
    short = "data.seq_length=16384"
    first = predict(_job(*stages, short))
    assert first.stage == 0 and first.peak.name == "backward of a layer"
    inputs = {term.name: term.num_bytes for term in first.peak.terms}["layer inputs"]
    assert inputs == 4 * 8 * 8192 * 4096 * 2, "four micro-batches of eight layers"
    offloaded = predict(_job(*stages, short, "recompute=attention_output+offload"))
    inputs = {term.name: term.num_bytes for term in offloaded.peak.terms}["layer inputs not on the host"]
    assert offloaded.stage == 3 and inputs == (2 + 1) * 8192 * 4096 * 2, "and the input that the previous stage sent"
    assert offloaded.host_bytes == 4 * 8 * 8192 * (2 * 4096 * 2 + 32 * 4), "of the first stage"
    last = predict(_job(*stages, short, "recompute=layer"))
    assert last.stage == 3 and last.peak.name == "loss"


def test_check_refuses_warns_and_names_settings_to_change() -> None:
    job, device = _job(), 139 * GIB
    chunk, tile = "recompute.head_chunk_tokens=4096", "recompute.mlp_tile_tokens=16384"
    with pytest.raises(ValueError, match=r"data.seq_length=1048576: expected a step within the device's 139.0") as no:
        check(job, device)
    assert f"Set recompute.mode=layer {chunk} (118.1 GiB)" in str(no.value)
    half = rf"Set recompute.mode=attention_output recompute.kept_results=0.5 {chunk} \(133.9 GiB"
    with pytest.raises(ValueError, match=half):
        check(job, 150 * GIB)
    with pytest.raises(ValueError, match=rf"Set recompute.mode=attention_output\+offload {chunk} \(89.2 GiB"):
        check(job, device, 65 * GIB)
    with pytest.raises(ValueError, match=rf"Set recompute.mode=attention_output\+offload {chunk} {tile} \(80.7 GiB"):
        check(job, 95 * GIB, 65 * GIB)
    advised = _job("recompute=layer", chunk)
    assert check(advised, device) is None
    close = check(advised, int(predict(advised).num_bytes / (SAFE_SHARE + 0.05)))
    assert close is not None and f"may run out. Set {tile} (109.7 GiB)" in close
    with pytest.raises(
        ValueError, match=r"Set recompute.mode=layer .* and data.seq_length=\d+ or less, or raise"
    ) as no:
        check(job, 80 * GIB)
    longest = str(no.value).split("data.seq_length=")[2].split(" ")[0]
    shorter = _job("recompute=layer", chunk, tile, f"data.seq_length={longest}")
    assert predict(shorter).num_bytes <= 80 * GIB
    with pytest.raises(ValueError, match="or take a smaller model"):
        check(job, 40 * GIB)
    with pytest.raises(ValueError, match=r"recompute.mode=attention_output\+offload: expected at most 1.0 GiB of host"):
        check(_job("recompute=attention_output+offload", "recompute.head_chunk_tokens=4096"), device, GIB)
    # 14 bytes of each of 8.03 billion parameters, over 8 ranks.
    with pytest.raises(ValueError, match=r"train.async_save=True: expected at most 13.0 GiB .* checkpoint takes"):
        check(advised, device, 13 * GIB)
    assert check(_job("recompute=layer", chunk, "train.async_save=false"), device, 13 * GIB) is None
    assert "while a checkpoint is written: 13.09 GiB a rank" in report(advised)


def test_advice_is_not_refused() -> None:
    with pytest.raises(ValueError, match=r"Set recompute.mode=layer recompute.head_chunk_tokens=4096 and data.seq_len"):
        check(_job("train.fp8=delayed"), 100 * GIB)  # delayed scales have no tiles


@pytest.mark.parametrize(
    ("words", "unit"),
    [
        ((), 16),
        (("recompute=layer",), 16),
        (("parallelism=tp2_cp4", "recompute=attention_output"), 16),
        (("parallelism=tp2_cp4", "recompute=attention_output", "train.fp8=tensorwise"), 32),
    ],
)
def test_the_longest_sequence_fits_and_a_longer_one_does_not(words: tuple[str, ...], unit: int) -> None:
    job, capacity = _job(*words), 125 * GIB
    longest = max_length(job, capacity)
    assert longest % unit == 0
    sizes = [
        predict(replace(job, config=_job(*words, f"data.seq_length={length}").config)).num_bytes
        for length in (longest, longest + unit)
    ]
    assert sizes[0] <= capacity < sizes[1]
    assert max_length(job, 30 * GIB) == 0


def test_the_lengths_that_the_docs_print() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "memory.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    assert [mode for mode, *_ in rows] == ["none", "attention_output", "attention_output+offload", "layer"]
    small = ("recompute.head_chunk_tokens=4096", "recompute.mlp_tile_tokens=16384")
    capacity, unit = int(SAFE_SHARE * 139 * GIB), 16

    def is_longest(length: str, *words: str) -> bool:
        """Whether a step of this length fits and one of the next does not."""
        lengths = (int(length.replace(",", "")) + more for more in (0, unit))
        fits, next_fits = (
            predict(_job(*small, *words, f"data.seq_length={each}")).num_bytes <= capacity for each in lengths
        )
        return fits and not next_fits

    for layout, column in zip(((8, 1), (4, 2), (2, 4)), zip(*(row[1:] for row in rows), strict=True), strict=True):
        ranks = [f"parallelism.{kind}_parallel_size={n}" for kind, n in zip(("context", "tensor"), layout, strict=True)]
        for (mode, *_), length in zip(rows, column, strict=True):
            assert is_longest(length, *ranks, f"recompute.mode={mode}"), (layout, mode)
    found = re.search(r"([\d,]+) tokens for CP 8 and `attention_output`", page)
    assert found and is_longest(found[1], "attention.transport=peer", "recompute.mode=attention_output")


@pytest.mark.parametrize("gib", ["0", "-1", "nan", "inf", "1e30", "1000001"])
def test_an_impossible_device_memory_is_refused(gib: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--max-length", "--device-gib", gib]) == 2
    message = capsys.readouterr().err
    assert f"--device-gib={float(gib)}: expected a number of GiB above 0 and at most 1,000,000" in message


def test_no_length_exceeds_the_configurable_maximum() -> None:
    job = planned_job(compose_config(["model.num_layers=1", "recompute=layer"]))
    assert 0.99 * MAX_TOKENS < max_length(job, 2**60) <= MAX_TOKENS


def test_reports() -> None:
    job = _job("recompute=attention_output+offload")
    text = report(job)
    assert text.startswith(summary(job)) and "rank with the most tokens: 131,072" in text
    assert ", and 64.50 GiB pinned on the host (" in summary(job)
    assert "attention results not on the host" in text and "on the host, pinned: 64.50 GiB a rank" in text
    found = predict(job)
    assert f"{found.num_bytes / GIB:.2f} GiB" in text.split("sum", 1)[1]


def test_the_plan_verb_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "memory.png"
    assert cli.main(["plan", *LLAMA, "--memory", str(picture), "--device-gib", "1000"]) == 0
    assert "\ndrawn to " in capsys.readouterr().out and picture.read_bytes().startswith(b"\x89PNG")
    two = ("attention.transport=p2p", "parallelism=cp2", "data.seq_length=131072")
    assert cli.main(["plan", *LLAMA, *two, "--max-length"]) == 0
    text = capsys.readouterr().out
    rows = {
        mode: int(n.replace(",", "")) for mode, n in re.findall(r"^ [* ] (\S+) +([\d,]+) tokens", text, re.MULTILINE)
    }
    assert rows["none"] < rows["attention_output"] < rows["layer"] < rows["attention_output+offload"]
    assert text.count("GiB a rank pinned on the host") == 1
    assert rows["none"] == max_length(_job(*two), int(SAFE_SHARE * 139 * GIB))
    assert cli.main(["plan", *LLAMA[:3], "--max-length"]) == 2
    assert "--device-gib N" in capsys.readouterr().err
    assert cli.main(["plan", *LLAMA, "--memory", "gone/x.png"]) == 2
    for gib, verdict, code in (("1000", "a step fits", 0), ("1", "a step does not fit", 1)):
        assert cli.main(["plan", *LLAMA, "--memory", "--device-gib", gib]) == code
        assert f"a device has {gib}.0 GiB: {verdict}" in capsys.readouterr().out
    assert cli.main(["plan", *LLAMA[:3], "--memory"]) == 0
    assert "a device has" not in capsys.readouterr().out


def test_the_vocabulary_of_a_plan() -> None:
    assert planned_job(compose_config([])).vocab_size == 512 == build_tokenizer("byte-level").vocab_size
    assert planned_job(compose_config(["model.vocab_multiple=384"])).vocab_size == 768
    assert planned_job(compose_config(["model.vocab_size=999"])).vocab_size == 999
    words = ["data.tokenizer=huggingface", "data.tokenizer_path=x"]
    with pytest.raises(ValueError, match=r"model.vocab_size=None: expected a number, to predict memory"):
        planned_job(compose_config(words))


def test_the_check_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 60 * GIB

    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: Properties)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    job = _job("recompute=layer", "recompute.head_chunk_tokens=4096", "recompute.mlp_tile_tokens=16384")
    with pytest.raises(ValueError, match=r"expected a step within the device's 60.0 GiB"):
        preflight._check_memory(replace(job, fused=True), 8)
    small = compose_config([])
    for fused in (True, False):
        preflight._check_memory(Job(small, 512, 1, fused=fused), 1)


def _refused_before_a_run(monkeypatch: pytest.MonkeyPatch, *words: str, world_size: int = 1, host_gib: int = 16) -> str:
    """Return the message with which `train` refuses a configuration on a host without GPUs."""
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": host_gib * GIB // 4096}.__getitem__)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    config = compose_config(["train.device=cpu", "data.prefix=/nowhere", *words])
    with pytest.raises(ValueError) as caught:
        preflight.check(config, world_size)
    return str(caught.value)


def test_what_exceeds_the_host_is_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "data.prefix=/nowhere" in _refused_before_a_run(monkeypatch)
    many = _refused_before_a_run(monkeypatch, "train.global_batch_size=65", world_size=65)
    assert many.startswith("world size=65: expected ranks of at least 256 MiB each on this host, which has 252 for")
    large = _refused_before_a_run(monkeypatch, "train.global_batch_size=1000000")
    assert large.startswith("train.global_batch_size=1000000: expected at most 209715 sequences a rank")
    with pytest.raises(ValueError, match=r"predicted to take .* GiB, most in"):
        wide = compose_config(["model.hidden_size=100000", "model.num_attention_heads=100", "model.num_kv_heads=100"])
        preflight._check_memory(Job(wide, 512, 1, fused=False), 1)


def test_ranks_without_tokens_are_refused_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cp4 = ("parallelism=cp4", "parallelism.schedule=zigzag")
    message = _refused_before_a_run(monkeypatch, *cp4, "data.seq_length=5", world_size=4)
    assert message.startswith("data.seq_length=5: expected 8 or more, so that each of the 4 context-parallel ranks")
    write_documents([([7] * 5, None)], tmp_path / "short")
    words = (*cp4, f"data.prefix={tmp_path}/short", "data.packing=best_fit", "data.split='1,0,0'")
    message = _refused_before_a_run(monkeypatch, *words, world_size=4)
    assert message.startswith("data.packing=best_fit: expected packs of 8 tokens") and "short has one of 5." in message


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert preflight.local_world_size(compose_config(["train.num_processes=8"])) == 8
    with pytest.raises(ValueError, match=r"train\.num_processes=9: expected at most 8, the GPUs here"):
        preflight.local_world_size(compose_config(["train.num_processes=9"]))


def test_memory_that_peers_read_is_counted_twice() -> None:
    block = 131072 * 2 * 8 * 128 * 2  # keys and values of a rank
    # Both memories hold the rank's own block, some forwarded ones, and gradients while they are written and read.
    found = predict(_job("attention.transport=peer"))
    assert found.num_bytes - found.allocated_bytes == 2 * 8 * block
    messages = predict(_job())
    assert messages.num_bytes == messages.allocated_bytes
    nodes = _job("attention.transport=auto", "parallelism.cluster=a100_2x8", "parallelism.context_parallel_size=16")
    assert predict(nodes).num_bytes == predict(nodes).allocated_bytes, "ranks of another node do not read it"
