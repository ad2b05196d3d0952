"""The validation loss during training: it is equal at all parallel sizes, and training does not change."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_longctx.config import names
from megatron_longctx.mcore.data import TrainingData
from megatron_longctx.mcore.tokenizer import build_tokenizer
from megatron_longctx.training import preflight
from megatron_longctx.training.metrics import ConsoleSink
from tests.shared.training import Job, Record, recorded, tiny_config, tiny_corpus

WITH = {"train.eval_interval": 2, "train.eval_samples": 6}
COMMON = {"data.split": "60,40", "data.seq_length": 64, "train.global_batch_size": 4, "train.steps": 4,
          "optim.decay_steps": 4}  # fmt: skip
CP = {"parallelism.context_parallel_size": 2}
PACKED = {"data.packing": "best_fit"}
SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "dp": (2, {}),
    "cp": (2, CP),
    "tp": (2, {"parallelism.tensor_parallel_size": 2, "recompute.head_chunk_tokens": 16,
               "recompute.mode": "attention_output"}),
    "pp": (2, {"parallelism.pipeline_parallel_size": 2}),
    "packed, alone": (1, PACKED),
    "packed, cp": (2, {**CP, **PACKED}),
}  # fmt: skip
TRAINED = ("cp", "tp", "pp", "packed, alone")


def _jobs(root: Path, world: int) -> dict[str, Job]:
    """Return runs with and without validation, a resumed run, and runs that evaluate its weights without training."""
    found = {}
    for name, (ranks, settings) in SIZES.items():
        for validation in ({}, WITH) if ranks == world and name in TRAINED else ():
            key = f"{name} with" if validation else name
            found[key] = Job(tiny_config(root, key, {**COMMON, **settings, **validation}))
    for steps in (2, 4) if world == 2 else ():
        settings = {**COMMON, **CP, **WITH, "train.save": True, "train.steps": steps}
        found[f"resumed to {steps}"] = Job(tiny_config(root, "resumed", settings))
    frozen = {**COMMON, **WITH, "train.steps": 1, "train.eval_interval": 1, "optim.warmup_steps": 0,
              "optim.lr": 0.0, "optim.min_lr": 0.0}  # fmt: skip
    for name, (ranks, settings) in SIZES.items():
        if ranks == world:
            config = tiny_config(root, f"{name} frozen", {**frozen, **settings})
            found[f"{name} frozen"] = Job(config, start_from=root / "resumed" / "checkpoints")
    return found


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Record]:
    """The record of rank 0, keyed by run."""
    tiny_corpus(root / "corpus")
    found: dict[str, Record] = {}
    for world in (2, 1):
        found |= recorded(world, _jobs(root, world))
    return found


def _validation(root: Path, name: str) -> list[float | None]:
    lines = (root / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)[names.VALIDATION_LOSS] for line in lines]


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_bit_identical_with_validation(root: Path, runs: dict[str, Record], name: str) -> None:
    plain, validated = runs[name], runs[f"{name} with"]
    assert len(plain.losses) == 4 and plain.losses == validated.losses and plain.grad_norms == validated.grad_norms
    assert _validation(root, name) == [None] * 4
    assert [loss is None for loss in _validation(root, f"{name} with")] == [True, False, True, False]


def test_the_loss_is_equal_at_all_sizes(root: Path, runs: dict[str, Record]) -> None:
    (alone,) = _validation(root, "alone frozen")
    assert alone is not None and 3.0 < alone < 6.0
    for name in ("dp", "pp"):  # bit-identical
        assert _validation(root, f"{name} frozen") == [alone], name
    for name in ("cp", "tp"):  # another order of sums
        assert _validation(root, f"{name} frozen") == [pytest.approx(alone, rel=1e-6)], name
    (packed,) = _validation(root, "packed, alone frozen")
    assert packed != alone and _validation(root, "packed, cp frozen") == [pytest.approx(packed, rel=1e-6)]


def test_a_resumed_run_has_the_same_validation_losses(root: Path, runs: dict[str, Record]) -> None:
    assert runs["resumed to 4"].first_step == 2
    assert _validation(root, "resumed") == _validation(root, "cp with")
    assert runs["resumed to 2"].losses + runs["resumed to 4"].losses == runs["cp"].losses


def test_validation_text_is_the_second_part_and_not_trained_on(root: Path, runs: dict[str, Record]) -> None:
    for packing in ("none", "best_fit"):
        config = tiny_config(root, "texts", {**COMMON, "data.packing": packing})
        tokenizer = build_tokenizer("byte-level")
        training, held_out = (TrainingData(config, tokenizer, 384, part) for part in (0, 1))
        lengths = torch.tensor(held_out._sources[0].tokens.sequence_lengths)
        documents = [
            {int(d) for sample in range(data._sources[0].order.size) for d in data._sources[0].spans(sample).documents}
            for data in (training, held_out)
        ]
        assert documents == [set(range(24)), set(range(24, 40))]
        texts = [set(map(tuple, data[[0]].tokens.tolist())) for data in (training, held_out)]
        assert not texts[0] & texts[1] and len(lengths) == 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data.split": "1"}, "which has no second part. Set data.split=95,5,0"),
        ({"data.split": "99.9,.1"}, "train.eval_samples=6: expected at most 0: part 2 of data.split=99.9,.1 has 0 "),
        ({"train.eval_samples": 500}, r"train.eval_samples=500: expected at most (\d+): part 2 of .*=60,40 has \1 "),
        ({"train.eval_samples": 500, "data.packing": "best_fit"}, r"expected at most (\d+): part 2"),
    ],
)  # fmt: skip
def test_parts_with_too_little_text_are_refused(
    root: Path, runs: dict[str, Record], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        preflight.check(tiny_config(root, "refused", {**COMMON, **WITH, **settings}), 1)


def test_blends_are_checked_by_dataset(root: Path, runs: dict[str, Record]) -> None:
    tiny_corpus(root / "second", documents=5)
    blend = {"data.prefix": f"0.9 {root}/corpus 0.1 {root}/second"}
    preflight.check(tiny_config(root, "blend", {**COMMON, **WITH, **blend}), 1)
    blend = {"data.prefix": f"0.1 {root}/corpus 0.9 {root}/second", "train.eval_samples": 30}
    with pytest.raises(
        ValueError, match=rf"part 2 of data.split=60,40 has \d+ sequences of 64 tokens in {root}/second"
    ):
        preflight.check(tiny_config(root, "blend", {**COMMON, **WITH, **blend}), 1)


def test_the_console_line_has_the_validation_loss() -> None:
    lines: list[str] = []
    sink = ConsoleSink(4, lines.append)
    sink.write({names.STEP: 1, names.LOSS: 2.0, names.VALIDATION_LOSS: None})
    sink.write({names.STEP: 2, names.LOSS: 2.0, names.VALIDATION_LOSS: 2.125})
    assert "validation" not in lines[0] and "loss 2.00000 | validation 2.12500 | grad norm" in lines[1]
