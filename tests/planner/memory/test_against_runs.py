"""The memory model compared with the memory of real tensors: on CPU in these tests, on H200s in recorded runs."""

import gc
import json
import statistics
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from analysis.benchmarks.hybrid_model import config_of
from analysis.recorded_memory import (
    EARLIER,
    ONE_GPU,
    RECORDED,
    RESULTS,
    AttentionPeak,
    Peak,
    attention_peaks,
    recorded_peaks,
)
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.model import build_model, transformer_config
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.planner.memory import Job, predict
from megatron_longctx.planner.memory.model import OFFLOAD
from megatron_longctx.planner.memory.shapes import (
    LayerKind,
    embedding_weights,
    layer_bytes,
    layer_parameters,
    stage_parameters,
)
from megatron_longctx.testing.distributed import run_distributed
from tests.shared.training import GPT2, LATENTS, tiny_config

CP, TP, EP, ETP = (
    f"parallelism.{axis}_parallel_size" for axis in ("context", "tensor", "expert_model", "expert_tensor")
)
MODE, CHUNK, TILE = "recompute.mode", "recompute.head_chunk_tokens", "recompute.mlp_tile_tokens"
SCHEDULE, KEEP = "parallelism.schedule", "attention.keep_received"
LENGTH = 1024
SIZES = {
    "data.seq_length": LENGTH, "model.num_layers": 3, "model.hidden_size": 64, "model.ffn_hidden_size": 256,
}  # fmt: skip
EXPERTS = {"model.num_moe_experts": 4, "model.moe_shared_expert_intermediate_size": 128}
MIXED = {"model.moe_layer_freq": "[1,0,1]"}
DELTA_NET = {
    "model.pattern": "G-*-*-", "model.linear_num_key_heads": 2, "model.linear_num_value_heads": 4,
    "model.linear_key_head_dim": 12, "model.linear_value_head_dim": 20,
}  # fmt: skip
MAMBA = {**DELTA_NET, "model.pattern": "M-*-*-"}
KIMI = {**DELTA_NET, "model.pattern": "K-*-*-"}

# Cases of 2 ranks, which are data-parallel unless the case says otherwise.
SAVED: dict[str, dict[str, Any]] = {
    "llama": {}, "gpt2": GPT2, "cp2": {CP: 2}, "gpt2 cp2": {CP: 2, **GPT2}, "tp2": {TP: 2},
    "gpt2 tp2": {TP: 2, **GPT2, "parallelism.sequence_parallel": False},
    "ulysses": {CP: 2, SCHEDULE: "ulysses", KEEP: "auto"},
    "gpt2 ulysses": {CP: 2, SCHEDULE: "ulysses", KEEP: "true", **GPT2},
    "ulysses, fetched": {CP: 2, SCHEDULE: "ulysses", KEEP: "false"},
    "all_gather, kept": {CP: 2, SCHEDULE: "all_gather", KEEP: "true"},
    "gemma": {
        CP: 2, "model.activation": "geglu", "model.qk_norm": True, "model.post_norms": True,
    },
    "windows": {
        CP: 2, SCHEDULE: "ulysses", KEEP: "true",
        "model.window": 40, "model.sinks": "learnable", "model.qkv_bias": True,
    },
    "experts": {CP: 2, **EXPERTS}, "experts tp2": {TP: 2, **EXPERTS, **MIXED}, "experts ep2": {CP: 2, EP: 2, **EXPERTS},
    "experts tp2 ep2": {TP: 2, EP: 2, ETP: 1, **EXPERTS},
    "latents": {CP: 2, **LATENTS},
    "gates": {"model.attention_output_gate": True},
    "gated experts": {**EXPERTS, "model.moe_shared_expert_gate": True},
    "delta net": DELTA_NET, "delta net tp2": {TP: 2, **DELTA_NET},
    "mamba": MAMBA, "mamba tp2": {TP: 2, **MAMBA}, "kimi": KIMI, "kimi tp2": {TP: 2, **KIMI},
    "latents of queries": {CP: 2, **LATENTS, "model.q_lora_rank": 48, "model.qk_norm": False},
}  # fmt: skip
PEAKS: dict[str, dict[str, Any]] = {
    "none": {MODE: "none", CHUNK: 64},
    "layer": {MODE: "layer", CHUNK: 64},
    "kept": {MODE: "attention_output", CHUNK: 64},
    # Host memory does not count here: its buffers exist since the first step.
    "offload": {MODE: OFFLOAD, CHUNK: 64},
    "cp2 offload, tiles": {CP: 2, MODE: OFFLOAD, CHUNK: 64, TILE: 128, "model.num_layers": 5},
    "all logits": {"vocabulary": 4096},
    "all logits of tp2": {"vocabulary": 4096, TP: 2, MODE: "layer"},
    "chunks of logits": {"vocabulary": 4096, MODE: "layer", CHUNK: 512},
    "chunks of logits of tp2": {"vocabulary": 8192, TP: 2, MODE: "layer", CHUNK: 512},
    "cp2": {CP: 2, CHUNK: 64},
    "cp2 all_gather": {CP: 2, MODE: "layer", CHUNK: 64, SCHEDULE: "all_gather"},
    "cp2 ulysses": {CP: 2, CHUNK: 64, SCHEDULE: "ulysses", KEEP: "auto"},
    "cp2 all_gather, kept": {CP: 2, CHUNK: 64, SCHEDULE: "all_gather", KEEP: "true"},
    "cp2 windows": {CP: 2, CHUNK: 64, SCHEDULE: "all_gather", KEEP: "true", "model.window": 40},
    "tiles kept": {CHUNK: 64, TILE: 128, MODE: "attention_output"},
    "large tiles of cp2": {CP: 2, CHUNK: 64, TILE: 400, MODE: "attention_output"},
    "tp2 kept": {TP: 2, MODE: "attention_output", CHUNK: 64},
    "half kept": {CP: 2, CHUNK: 64, MODE: "attention_output", "recompute.kept_results": 0.5},
    "experts": {CP: 2, "model.num_moe_experts": 4, **MIXED},
    "delta net": {CHUNK: 64, **DELTA_NET, "model.pattern": "*-*-G-", "model.attention_output_gate": True},
    "delta net kept": {CHUNK: 64, **DELTA_NET, MODE: "attention_output", "model.linear_key_head_dim": 24},
    "kimi kept": {CHUNK: 64, **KIMI, MODE: "attention_output", "model.linear_key_head_dim": 24},
    "mamba kept": {CHUNK: 64, **MAMBA, MODE: "attention_output", "model.linear_key_head_dim": 24},
}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages created inside the mode: now, and at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.now = self.peak = 0

    def track(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = storage.nbytes()
        self._live[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._live.pop(key)[1]

    _should_skip_dynamo = classmethod(lambda cls: False)  # nothing is compiled, and asking takes as long as operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in (result,) if isinstance(result, torch.Tensor) else tree_iter(result):
            if isinstance(x, torch.Tensor):
                self.track(x)
        return result


class OneModel:
    """A model on this rank, without DDP and optimizer, whose gradients already exist."""

    def __init__(self, root: Path, settings: dict[str, Any]) -> None:
        settings = {**SIZES, **settings}
        self.vocabulary = settings.pop("vocabulary", 512)
        self.config = tiny_config(root, "memory", settings)
        collection = groups.from_config(self.config.parallelism)
        self.sequence = build_sequence(self.config, collection.cp)
        self.gpt = build_model(self.config, transformer_config(self.config), collection, self.sequence, self.vocabulary)
        self.job = Job(self.config, self.vocabulary, fused=False)
        ranks = self.config.parallelism
        self.messages = ranks.context_parallel_size * ranks.tensor_parallel_size > 1

    def saved_by_a_layer(self) -> dict[str, int]:
        """Return the bytes that autograd saves for a layer, without weights and RoPE tables, and the prediction."""
        known = {p.untyped_storage().data_ptr() for p in self.gpt.parameters()}
        saved: dict[int, torch.Tensor] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            saved[x.untyped_storage().data_ptr()] = x
            return x

        hidden = torch.randn(self.job.hidden_tokens, 1, self.config.model.hidden_size, requires_grad=True)
        if self.config.model.position_embedding == "rope":
            rotation = self.sequence.rotation(self.sequence.whole)
            tables = () if rotation is None else (rotation.cos, rotation.sin)  # MLA has its own tables in every layer
            known |= {x.untyped_storage().data_ptr() for x in tables}
        known.add(self.sequence.whole.positions(hidden.device).untyped_storage().data_ptr())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            output = self.gpt.decoder.layers[0](hidden, attention_mask=None, packed_seq_params=self.sequence.whole)
        num_bytes = sum(x.untyped_storage().nbytes() for key, x in saved.items() if key not in known)
        del output
        kind = LayerKind(any(self.config.model.expert_layers), self.config.model.recurrent)
        return {
            "saved": num_bytes,
            "predicted": layer_bytes(self.job, kind).total,
            "parameters": sum(p.numel() for p in self.gpt.parameters()),
            "predicted parameters": stage_parameters(self.job, 0),
        }

    def peak(self) -> dict[str, Any]:
        """Return the peak of one forward and backward, without weights and gradients, and the prediction."""
        for parameter in self.gpt.parameters():
            parameter.grad = torch.zeros_like(parameter)
        tokens = torch.randint(self.vocabulary, (1, LENGTH), generator=torch.Generator().manual_seed(0))
        batch = self.sequence.shard_batch({"tokens": tokens, "positions": torch.arange(LENGTH)[None]})

        def step() -> None:
            self.gpt(batch["tokens"], batch["positions"], None, labels=batch["tokens"]).sum().backward()

        with LiveBytes() as live:
            for parameter in self.gpt.parameters():
                assert parameter.grad is not None
                live.track(parameter)
                live.track(parameter.grad)
            step()  # allocates buffers and tables
            measured = []
            for _ in range(3 if self.messages else 1):
                # Tensors that the previous step's messages or reference cycles still hold must not count as resident.
                if self.messages:
                    dist.barrier()
                    time.sleep(0.05)
                gc.collect()
                resident = live.peak = live.now
                step()
                measured.append(live.peak - resident)
        phase = predict(self.job).peak
        return {"measured": statistics.median(measured), "predicted": phase.num_bytes, "phase": phase.name}


def _run(rank: int, root: Path) -> dict[str, dict[str, Any]]:
    results = {}
    for name, settings in SAVED.items():
        results[f"saved {name}"] = OneModel(root, settings).saved_by_a_layer()
        groups.destroy()
    for name, settings in PEAKS.items():
        model = OneModel(root, settings)
        results[f"peak {name}"] = model.peak() if rank == 0 or model.messages else {}  # without messages, all are equal
        groups.destroy()
    return results


@pytest.fixture(scope="module")
def results(root: Path) -> dict[str, dict[str, Any]]:
    return run_distributed(_run, 2, root)[0]


@pytest.mark.parametrize("name", SAVED)
def test_activations_of_a_layer_are_predicted_to_the_byte(results: dict[str, dict[str, Any]], name: str) -> None:
    case = results[f"saved {name}"]
    assert case["parameters"] == case["predicted parameters"], case
    # The index lists of routing are not counted.
    assert case["saved"] == pytest.approx(case["predicted"], rel=0.01 if "experts" in name else 0), case


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_are_predicted_within_five_percent(results: dict[str, dict[str, Any]], name: str) -> None:
    case = results[f"peak {name}"]
    assert case["phase"] == ("loss" if "logits" in name else "backward of a layer")
    assert case["predicted"] == pytest.approx(case["measured"], rel=0.05), case


@pytest.mark.parametrize("peak", recorded_peaks(), ids=lambda peak: peak.name)
def test_recorded_runs_are_predicted(peak: Peak) -> None:
    assert peak.predicted == pytest.approx(peak.measured, rel=0.03)


@pytest.mark.parametrize("name, ranks, share", [("one GPU", 1, 0.966), ("contiguous, helper", 2, 1.004)])
def test_recorded_steps_of_a_hybrid_model_are_predicted(name: str, ranks: int, share: float) -> None:
    """Their gradients are in bf16 and begin with the step, so that a layer's backward has those of the layers after."""
    result = json.loads((RESULTS / "hybrid_h200_x2.json").read_text())
    measured = next(cell["peak_bytes"] for cell in result["cells"] if cell["name"] == name)
    config = config_of(False, ranks, True)
    parallelism = replace(config.parallelism, schedule="helper", layout="contiguous")
    job = Job(replace(config, parallelism=parallelism), result["sizes"]["vocabulary"])
    prediction = predict(job)
    resident = {term.name: term.num_bytes for term in prediction.resident}
    gradients = 2 * (embedding_weights(job) + layer_parameters(job))
    others = resident["weights"] + resident["RoPE table (fp32)"] + resident["attention's buffers"] + gradients
    assert prediction.peak.terms[-1].name == "gradients inside the recurrence"
    assert (others + prediction.peak.num_bytes) / measured == pytest.approx(share, rel=0.01)


def test_measured_peaks_are_those_of_the_results() -> None:
    written = [
        run["medians"]["mem/peak_active_gib"]
        for result in (*RECORDED, *EARLIER)
        for run in json.loads((RESULTS / f"{result}.json").read_text())["runs"]
        if result == ONE_GPU or run["config"]["recompute"]["mode"] != OFFLOAD
    ]
    assert [peak.measured for peak in (*recorded_peaks(), *recorded_peaks(EARLIER))] == written


@pytest.mark.parametrize("cell", attention_peaks(), ids=lambda cell: cell.name)
def test_attention_alone_is_predicted(cell: AttentionPeak) -> None:
    """This includes kernel workspaces, which CPUs do not have."""
    assert 0.91 * cell.measured <= cell.predicted <= 1.06 * cell.measured
