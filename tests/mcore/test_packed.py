"""Packed documents train as each document does alone on one rank with Megatron's own attention and RoPE.

Each case has two steps of two different packs, with the same weights. In pipelines, and if layers are recomputed in
backward, the packs of both micro-batches are in flight.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from megatron_longctx.config import Config
from megatron_longctx.mcore import groups, optimizer
from megatron_longctx.mcore.data import TrainingBatch
from megatron_longctx.mcore.model import build_model, transformer_config
from megatron_longctx.mcore.optimizer import named_parameters
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.mcore.spec import block_spec
from megatron_longctx.mcore.step import TrainStep
from megatron_longctx.planner.flops import Work
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import visible
from megatron_longctx.testing.tolerances import relative_error
from tests.shared.training import tiny_config

VOCABULARY = 64
CP, TP, PP = (f"parallelism.{axis}_parallel_size" for axis in ("context", "tensor", "pipeline"))
SCHEDULE, RECOMPUTE = "parallelism.schedule", "recompute.mode"

# The documents of each micro-batch of each step. Sequence parallelism needs even lengths.
EVEN = (((17, 31, 11, 1), (40, 2, 8)), ((5, 9, 20), (1, 1, 47, 13)))
ODD = (((17, 31, 11), (40, 2, 7)), ((5, 9, 21, 1, 1), (1, 23)))
WINDOW = 6
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"model.num_layers": 2, "model.activation": "gelu"},
    # Like gpt-oss: every second layer has no window, and all have sinks.
    "windows": {"model.num_layers": 4, "model.activation": "gelu", "model.window": WINDOW, "model.window_pattern": 2,
                "model.sinks": "learnable"},
    "off by one": {"model.num_layers": 2, "model.activation": "gelu", "model.window": WINDOW,
                   "model.sinks": "off_by_one"},
}  # fmt: skip
CASES: dict[int, dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]] = {
    3: {
        "cp3": ("plain", ODD, {CP: 3}),
        "cp3 ring windows": ("windows", ODD, {CP: 3, SCHEDULE: "ring", RECOMPUTE: "attention_output"}),
    },
    4: {
        "cp4 windows": ("windows", EVEN, {CP: 4}),
        "cp4 helper": ("windows", ODD, {CP: 4, SCHEDULE: "helper", RECOMPUTE: "layer"}),
        "cp4 all_gather": ("off by one", ODD, {CP: 4, SCHEDULE: "all_gather"}),
        "dp2 cp2": ("windows", EVEN, {CP: 2, RECOMPUTE: "attention_output+offload"}),
        "tp2 cp2": ("windows", EVEN, {TP: 2, CP: 2}),
        "pp2 cp2 layer": ("windows", ODD, {PP: 2, CP: 2, RECOMPUTE: "layer"}),
        "pp2 cp2 offload": ("windows", ODD, {PP: 2, CP: 2, RECOMPUTE: "attention_output+offload"}),
        "tp2 pp2": ("windows", EVEN, {TP: 2, PP: 2, RECOMPUTE: "attention_output"}),
    },
}


def _batch(documents: tuple[int, ...]) -> TrainingBatch:
    """Return a batch whose labels are the next tokens of the same document. Its last token has no loss."""
    generator = torch.Generator().manual_seed(sum(documents))
    length = sum(documents)
    tokens = torch.randint(VOCABULARY, (1, length), generator=generator)
    last = torch.tensor(documents).cumsum(0) - 1
    mask = torch.rand(1, length, generator=generator)
    mask[0, last] = 0
    return TrainingBatch(tokens, tokens.roll(-1, 1).index_fill(1, last, 0), mask, documents)


def _config(root: Path, model: str, settings: dict[str, Any]) -> Config:
    return tiny_config(root, "packed", {**MODELS[model], "data.seq_length": 64, **settings})


def _alone(rank: int, root: Path) -> None:
    """Save the loss and gradients of each step, with every document alone in Megatron's own layers, and the weights."""
    for model in MODELS:
        config = _config(root, model, {})
        collection = groups.initialize(seed=5)
        megatron = transformer_config(config)
        spec = block_spec(megatron, build_sequence(config, collection.cp), transformer_engine=False)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = DotProductAttention
        gpt = GPTModel(megatron, spec, VOCABULARY, 64, position_embedding_type="rope", rotary_base=1000,
                       share_embeddings_and_output_weights=False, pg_collection=collection)  # fmt: skip
        saved: dict[Any, Any] = {"weights": {name: p.detach().clone() for name, p in gpt.named_parameters()}}
        for steps in (EVEN, ODD):
            saved[steps] = [_alone_step(gpt, [_batch(documents) for documents in step]) for step in steps]
        torch.save(saved, root / model)
        groups.destroy()


def _alone_step(gpt: GPTModel, batches: list[TrainingBatch]) -> tuple[float, dict[str, Tensor]]:
    gpt.zero_grad()
    total, count = 0.0, sum(float(batch.loss_mask.double().sum()) for batch in batches)
    for batch in batches:
        parts = [x.split(batch.documents, 1) for x in (batch.tokens, batch.labels, batch.loss_mask)]
        for tokens, labels, mask in zip(*parts, strict=True):
            places = torch.arange(tokens.shape[1])[None]
            loss = (gpt(tokens, places, None, labels=labels).float() * mask).sum() / count
            loss.backward()
            total += float(loss)
    return total, {name: p.grad.clone() for name, p in gpt.named_parameters()}


class Sharded:
    """A model's parameters on this rank, with their places in the whole parameters."""

    def __init__(self, gpt: GPTModel, collection: Any) -> None:
        self._tp = collection.tp
        self.parameters = named_parameters([gpt])

    def load(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.data.copy_(self._part(weights[name], parameter))

    def errors(self, gradients: dict[str, Tensor]) -> dict[str, float]:
        """Return the error of this rank's gradients relative to the norm of the whole gradient."""
        return {name: self.error(name, p.main_grad, gradients[name]) for name, p in self.parameters.items()}

    def error(self, name: str, part: Tensor, whole: Tensor) -> float:
        """Return the error of this rank's part of a parameter or its gradient, relative to the norm of the whole."""
        difference = part.double() - self._part(whole, self.parameters[name]).double()
        return float(difference.norm() / whole.double().norm().clamp_min(1e-30))

    def _part(self, whole: Tensor, parameter: torch.nn.Parameter) -> Tensor:
        if not getattr(parameter, "tensor_model_parallel", False):
            return whole
        return whole.chunk(self._tp.size(), parameter.partition_dim)[self._tp.rank()]


def _packed(rank: int, root: Path, world: int) -> dict[str, list[Any]]:
    """Return the result, the expected loss, and the errors and values of gradients for each step of each case."""
    results = {name: _steps(root, *case) for name, case in CASES[world].items()}
    return results | ({"thd": _in_thd(root)} if world == 3 else {})


def _in_thd(root: Path) -> list[float]:
    """Return the errors of gradients with Megatron's own parameters, padded after documents, relative to a pack.

    Padding may not change the gradients, which are summed over the ranks.
    """
    config, collection = _config(root, "windows", {CP: 3}), groups.initialize(context=3, seed=9)
    sequence = build_sequence(config, collection.cp)
    gpt = build_model(config, transformer_config(config), collection, sequence, VOCABULARY)
    batch, places = _batch((17, 31, 11)), [*range(17), *range(20, 51), *range(54, 65)]
    wide = {name: torch.full((1, 66), 5) for name in ("tokens", "labels")} | {"mask": torch.zeros(1, 66)}
    whole = {"tokens": batch.tokens, "labels": batch.labels, "mask": batch.loss_mask}
    for name, x in whole.items():
        wide[name][:, places] = x
    stops, padded = (torch.tensor(each, dtype=torch.int32) for each in ([0, 17, 48, 59], [0, 20, 54, 66]))
    params = PackedSeqParams("thd", stops, stops, padded, padded, max_seqlen_q=34, max_seqlen_kv=34)
    gradients = []
    for given, text in ((sequence.pack(batch.lengths), whole), (params, wide)):
        mine = sequence.shard_batch(text, given)
        gpt.zero_grad()
        losses = gpt(mine["tokens"], mine["tokens"], None, labels=mine["labels"], packed_seq_params=given)
        (losses * mine["mask"]).sum().backward()
        gradients.append([p.grad.clone() for p in gpt.parameters()])
        for x in gradients[-1]:
            dist.all_reduce(x, group=collection.cp)
    groups.destroy()
    return [relative_error(padded, plain) for plain, padded in zip(*gradients, strict=True)]


def _steps(root: Path, model: str, steps: tuple[Any, ...], settings: dict[str, Any]) -> list[Any]:
    config = _config(root, model, settings)
    collection = groups.from_config(config.parallelism, seed=9)
    megatron, sequence = transformer_config(config), build_sequence(config, collection.cp)
    gpt = build_model(config, megatron, collection, sequence, VOCABULARY)
    models = optimizer.wrap_ddp([gpt], megatron, collection, distributed=False)
    megatron.finalize_model_grads_func = finalize_model_grads
    whole, parts = torch.load(root / model, weights_only=False), Sharded(gpt, collection)
    parts.load(whole["weights"])
    dp, results = collection.dp, []
    step = TrainStep(models, sequence, collection, 1, 2 // dp.size())
    for documents, (loss, gradients) in zip(steps, whole[steps], strict=True):
        models[0].zero_grad_buffer()
        local = documents[dp.rank() :: dp.size()]
        result = step.run(iter([_batch(each) for each in local]))
        results.append((result, loss, parts.errors(gradients), [p.main_grad.clone() for p in gpt.parameters()]))
    groups.destroy()
    return results


@functools.cache
def results(world: int, root: Path) -> list[dict[str, list[Any]]]:
    return run_distributed(_packed, world, root, world)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    run_distributed(_alone, 1, folder)
    return folder


def _work(model: str, step: tuple[tuple[int, ...], ...]) -> Work:
    """Count the work pair by pair."""
    layers = {"plain": [None, None], "windows": [WINDOW, None, WINDOW, None], "off by one": [WINDOW, WINDOW]}[model]
    pairs = sum(int(visible(each, window=(window, 0)).sum()) for each in step for window in layers)
    lengths = [sum(each) for each in step]
    return Work(sum(lengths), pairs, sum(length**2 for length in lengths))


@pytest.mark.parametrize("world", CASES)
def test_packs_train_as_their_documents_alone(world: int, root: Path) -> None:
    for rank, cases in enumerate(results(world, root)):
        for name, (model, steps, _) in CASES[world].items():
            for number, (result, loss, errors, _) in enumerate(cases[name]):
                where = f"{name}, step {number}, rank {rank}"
                assert result.mean == pytest.approx(loss, rel=1e-5), where
                assert max(errors.values()) < 1e-5, f"{where}: {errors}"
                assert result.work == _work(model, steps[number]), f"{where}: padding or invisible pairs were counted"


def test_offload_of_packs_in_pipelines_is_bit_identical_to_layer(root: Path) -> None:
    for cases in results(4, root):
        for layer, offload in zip(cases["pp2 cp2 layer"], cases["pp2 cp2 offload"], strict=True):
            assert len(layer[-1]) > 10 and all(map(torch.equal, layer[-1], offload[-1]))


def test_megatrons_own_parameters_are_equivalent_to_a_pack(root: Path) -> None:
    for cases in results(3, root):
        assert len(cases["thd"]) > 20 and max(cases["thd"]) < 1e-5, cases["thd"]
