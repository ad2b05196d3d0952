"""Training steps on GPUs with one part of Megatron's stack exchanged, to see what it gives.

    python -m analysis.step_variants apex --ranks 1 --out analysis/results/apex_h100
    python -m analysis.step_variants graphs --ranks 2 --out analysis/results/layer_graphs_h100_x2
    python -m analysis.step_variants tp_overlap --ranks 2 --out analysis/results/tp_overlap_h100_x2
    python -m analysis.step_variants fp8_param --ranks 2 --out analysis/results/fp8_param_h100_x2

apex: Apex's sums of weights' gradients (`gradient_accumulation_fusion`) and FusedAdam, beside TransformerEngine's and
torch's. Apex is built from NVIDIA's sources; `apex` of PyPI is another package.
graphs: CUDA graphs of the parts of layers without attention. Two runs compare losses. Then one run turns graphs on and
off every few steps, and compares times. The last run has Megatron's graphs of whole layers (`cuda_graph_impl=local`).
tp_overlap: `tp_comm_overlap` of TransformerEngine's products, over CUDA IPC: NVLink multicast stays off.
fp8_param: weights in FP8 alone (`train.fp8_param`), which are gathered in FP8, and beside bf16 ones.

Every cell is an ordinary training run with the same data. One that fails prints its error, and the next begins.
OUT.json and OUT.md have the cells that ended, as `analysis.record` writes them.
"""

import argparse
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from analysis.record import write
from analysis.training_cases import predict, train_case
from megatron_longctx.config import Config
from megatron_longctx.config.gpus import max_gpu_ranks
from megatron_longctx.core.errors import refuse
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.preflight import check
from megatron_longctx.training.ranks import run_ranks
from megatron_longctx.training.text import prepare_missing

_STEPS = 11
_WARM_UP, _PHASE, _PHASES = 5, 4, 10  # steps of the run that turns graphs on and off
_SHARED: dict[str, Any] = {
    "model": "llama3_8b",
    "model.num_layers": 4,
    "model.implementation": "transformer_engine",
    "data.seq_length": 32768,
    "recompute.head_chunk_tokens": 8192,
    "train.precision": "bf16",
    "train.device": "cuda",
    "train.steps": _STEPS,
    "train.save": "false",
    "train.check_memory": "false",
    "logging.wandb": "disabled",
    "optim.lr": 2e-5,
    "optim.min_lr": 2e-6,
    "optim.warmup_steps": 3,
    "optim.decay_steps": 100,
    "parallelism.timeout_s": 60,
}
_CHECKED = {"attention.deterministic": "true", "train.steps": _WARM_UP + 5}
_TIMED = {"train.steps": _WARM_UP + _PHASE * _PHASES}
# A hook of parameters gathers them before the parts that a graph replaces.
_GRAPHS = {"parallelism.overlap_param_gather": "false"}
_TP = {"parallelism": "single", "parallelism.tensor_parallel_size": 2}
_LOCAL = {"model.implementation": "local"}
# The head in chunks sums its gradient itself. In one piece, it is what Apex can fuse beside TransformerEngine's layers.
_WHOLE_HEAD = {"data.seq_length": 16384, "recompute.head_chunk_tokens": "null"}

Cell = tuple[Mapping[str, Any], tuple[str, ...]]
PARTS: dict[str, dict[str, Cell]] = {
    "apex": {
        "te": ({}, ("torch_gradients",)),
        "te_apex_adam": ({}, ("torch_gradients", "apex_adam")),
        "te_torch_adam": ({}, ("torch_gradients", "torch_adam")),
        "te_torch_fused_adam": ({}, ("torch_gradients", "torch_fused_adam")),
        "local_torch": (_LOCAL, ("torch_gradients", "torch_adam")),
        "local_apex": (_LOCAL, ("apex", "apex_adam")),
        "te_again": ({}, ("torch_gradients",)),
        "te_16k_whole_head": (_WHOLE_HEAD, ("torch_gradients",)),
        "te_16k_whole_head_apex": (_WHOLE_HEAD, ("apex",)),
    },
    "graphs": {
        "check_eager": ({**_GRAPHS, **_CHECKED, "data.seq_length": 8192}, ()),
        "check_graphs": ({**_GRAPHS, **_CHECKED, "data.seq_length": 8192}, ("graphs",)),
        "times_8k": ({**_GRAPHS, **_TIMED, "data.seq_length": 8192}, ("graphs_by_turns",)),
        "times_16k": ({**_GRAPHS, **_TIMED, "data.seq_length": 16384}, ("graphs_by_turns",)),
        "check_megatrons": ({**_GRAPHS, **_CHECKED, "data.seq_length": 8192}, ("megatrons_graphs",)),
    },
    "tp_overlap": {
        "tp_sp": (_TP, ()),
        "tp_sp_overlap": (_TP, ("tp_overlap",)),
        "tp_sp_again": (_TP, ()),
        "tp_sp_overlap_again": (_TP, ("tp_overlap",)),
    },
    "fp8_param": {
        f"{recipe}{suffix}": ({"train.fp8": recipe, "train.fp8_param": fp8_param}, ())
        for recipe in ("tensorwise", "delayed", "blockwise")
        for suffix, fp8_param in (("", "false"), ("_fp8_param", "true"))
    },
}
"""Cells of every part, with their settings and the names of their `VARIANTS`."""


def _settings(**changed: Any) -> Any:
    """Return a context in which Megatron's configuration of a run has these settings."""
    from megatron_longctx.mcore import model

    original = model._run_settings
    return patch.object(model, "_run_settings", lambda config: original(config) | changed)


def _apex() -> Any:
    """Return a context with Apex's sums of gradients."""
    import fused_weight_gradient_mlp_cuda  # noqa: F401  # its absence is the cell's error

    return _settings(gradient_accumulation_fusion=True)


@contextmanager
def _adam(kind: str) -> Iterator[None]:
    """Let Megatron build another Adam: `apex`, `torch` or `torch_fused`."""
    from megatron.core import optimizer

    with ExitStack() as stack:
        stack.enter_context(patch.object(optimizer, "USING_PYTORCH_OPTIMIZER", kind != "apex"))
        if kind == "apex":
            from apex.optimizers import FusedAdam

            stack.enter_context(patch.object(optimizer, "Adam", FusedAdam))
        elif kind == "torch_fused":
            begin = partialmethod(torch.optim.AdamW.__init__, fused=True)
            fused = type("AdamW", (torch.optim.AdamW,), {"__init__": begin})
            stack.enter_context(patch.object(torch.optim, "AdamW", fused))  # a class: Megatron asks for instances
        yield


class PartGraph:
    """A part of a layer, run from CUDA graphs of its forward and backward while `switch.on`.

    It takes and returns what the part does: a tensor `[s, b, h]`, and a tensor with None for a bias. Graphs are
    captured in the first call that finds the switch on, which must be in a step's first micro-batch.
    """

    def __init__(self, part: torch.nn.Module, switch: Any) -> None:
        self._part, self._switch, self._eager = part, switch, part.forward
        self._graph: Callable[[Tensor], Tensor] | None = None
        fused = [each for each in part.modules() if getattr(each, "fuse_wgrad_accumulation", False)]
        self._fused: list[Any] = [each.weight for each in fused]
        part.forward = self

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        if not self._switch.on or args or any(value is not None for value in kwargs.values()):
            return self._eager(x, *args, **kwargs)  # type: ignore[no-any-return]
        if self._graph is None:
            self._graph = self._capture(x)
        for weight in self._fused:  # the graph adds to their `main_grad`, but cannot note that
            weight.grad_added_to_main_grad = True
        return self._graph(x), None

    def _capture(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        plain = torch.nn.Module()
        plain.part = self._part  # so that it has the parameters
        plain.forward = lambda given: self._eager(given)[0]
        given = x.detach().clone().requires_grad_()
        # Other threads, as that of NCCL's watchdog, may call CUDA meanwhile.
        with patch.object(torch.cuda, "graph", partial(torch.cuda.graph, capture_error_mode="thread_local")):
            graph: Any = torch.cuda.make_graphed_callables(plain, (given,), allow_unused_input=True)
        for parameter in self._part.parameters():
            parameter.main_grad.zero_()  # type: ignore[attr-defined]  # the warm-up has added to it
        return graph  # type: ignore[no-any-return]


def graphs_on(step: int, by_turns: bool) -> bool:
    """Return whether a step, counted from 0, runs from graphs: all after the warm-up, or every other phase."""
    return step >= _WARM_UP and (not by_turns or (step - _WARM_UP) // _PHASE % 2 == 0)


@contextmanager
def _graphs(by_turns: bool) -> Iterator[None]:
    """Run projections and MLPs of TransformerEngine's layers from graphs."""
    from megatron_longctx.mcore import model
    from megatron_longctx.training.loop import Trainer

    switch, build, step = SimpleNamespace(on=False), model.build_model, Trainer._one_step

    def build_with_graphs(*args: Any) -> Any:
        gpt = build(*args)
        for layer in gpt.decoder.layers:
            for part in (layer.self_attention.linear_qkv, layer.self_attention.linear_proj, layer.mlp):
                PartGraph(part, switch)
        return gpt

    def switched_step(trainer: Any) -> Any:
        switch.on = graphs_on(trainer.step, by_turns)
        return step(trainer)

    with patch.object(model, "build_model", build_with_graphs), patch.object(Trainer, "_one_step", switched_step):
        yield


@contextmanager
def _megatrons_graphs() -> Iterator[None]:
    """Let Megatron capture whole layers (`cuda_graph_impl=local`), with random states that a graph can hold."""
    from megatron_longctx.mcore import groups

    seed = partial(groups.model_parallel_cuda_manual_seed, use_cudagraphable_rng=True)
    with _settings(cuda_graph_impl="local"), patch.object(groups, "model_parallel_cuda_manual_seed", seed):
        yield


@contextmanager
def _tp_overlap(config: Config) -> Iterator[None]:
    """Set up TransformerEngine's buffers as Megatron's training does, with its default ways of every product."""
    os.environ["UB_SKIPMC"] = "1"
    from transformer_engine.pytorch.module import base

    size = config.parallelism.tensor_parallel_size
    base.initialize_ub(
        shape=[config.data.seq_length * config.train.micro_batch_size, config.model.hidden_size],
        tp_size=size,
        quantization_modes=[base.UserBufferQuantizationMode.NONE],
        bootstrap_backend="nccl",
    )
    try:
        with _settings(tp_comm_overlap=True):
            yield
    finally:
        base.destroy_ub()


VARIANTS: dict[str, Callable[[Config], Any]] = {
    "torch_gradients": lambda _: _settings(gradient_accumulation_fusion=False),
    "apex": lambda _: _apex(),
    "apex_adam": lambda _: _adam("apex"),
    "torch_adam": lambda _: _adam("torch"),
    "torch_fused_adam": lambda _: _adam("torch_fused"),
    "graphs": lambda _: _graphs(by_turns=False),
    "graphs_by_turns": lambda _: _graphs(by_turns=True),
    "megatrons_graphs": lambda _: _megatrons_graphs(),
    "tp_overlap": _tp_overlap,
}


def config_of(name: str, settings: Mapping[str, Any], ranks: int, root: Path) -> Config:
    """Return the configuration of a cell; ranks share each sequence unless it says otherwise."""
    words = {"parallelism": "single" if ranks == 1 else f"cp{ranks}", **_SHARED, **settings}
    words |= {"run.name": name, "run.root": str(root)}
    return compose_config([f"{key}={value}" for key, value in words.items()])


def _rank(rank: int, part: str, ranks: int, root: Path, out: Path, deadline: float) -> None:
    """Run a part's cells on this rank; rank 0 prints and records what each gave."""
    logging.disable(logging.INFO)
    records: list[dict[str, Any]] = []
    for name, (settings, variants) in PARTS[part].items():
        left = torch.tensor([deadline - time.time()], device="cuda" if torch.cuda.is_available() else "cpu")
        dist.broadcast(left, 0)
        if left.item() < 0:
            break
        config, begin, failed = config_of(name, settings, ranks, root), time.perf_counter(), ""
        try:
            with ExitStack() as stack:
                for variant in variants:
                    stack.enter_context(VARIANTS[variant](config))
                record = train_case(config)
        except Exception as error:  # reported, and the next cell goes on
            failed = f"{type(error).__name__}: {str(error).strip()[:1500]}"
        if failed:
            gc.collect()
            torch.cuda.empty_cache()
        if rank == 0:
            if not failed:
                records.append(record)
                write(records, out, f"Steps with parts exchanged: {part}", "; ".join(compare(records)))
            print(f"{name}: {failed or line(record)} ({time.perf_counter() - begin:.1f} s)", flush=True)
    if rank == 0:
        print(*compare(records), sep="\n", flush=True)


def line(record: Mapping[str, Any]) -> str:
    """Return the figures of a run in one line."""
    medians, losses = record["medians"], [step["train/loss"] for step in record["steps"]]
    peak = medians.get("mem/peak_active_gib", 0)
    return (
        f"{1000 * medians['perf/step_s']:.1f} ms a step (median), {medians['mean_tokens_per_s']:,.0f} tokens/s, "
        f"{peak:.2f} GiB, loss {losses[0]:.5f} -> {losses[-1]:.5f}"
    )


def compare(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what the runs with graphs show: differences of losses, and times by turns."""
    found, steps = [], {record["name"]: record["steps"] for record in records}
    for name in sorted(steps.keys() & {"check_graphs", "check_megatrons"} if "check_eager" in steps else ()):
        for key in ("train/loss", "train/grad_norm"):
            pairs = [(a[key], b[key]) for a, b in zip(steps["check_eager"], steps[name], strict=True)]
            most = max(abs(a - b) / abs(a) for a, b in pairs)
            found.append(f"{name} against check_eager: {key} differs by at most {most:.2e} of it in {len(pairs)} steps")
    for name in steps.keys() & {"times_8k", "times_16k"}:
        times: dict[bool, list[float]] = {True: [], False: []}
        for step in steps[name]:
            number = step["train/step"] - 1
            # The first phase captures, and the first step of every phase is left out.
            if number >= _WARM_UP + 2 * _PHASE and (number - _WARM_UP) % _PHASE:
                times[graphs_on(number, by_turns=True)].append(step["perf/step_s"])
        graphs, eager = (1000 * statistics.median(times[on]) for on in (True, False))
        counts = "/".join(str(len(times[on])) for on in (True, False))
        gain = f"{100 * (eager / graphs - 1):+.2f}%"
        found.append(f"{name}: {graphs:.2f} ms with graphs, {eager:.2f} without, {gain} ({counts} steps)")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run a part; return 1 if a cell failed or none ran, 2 if the cells are refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True, help="path of the result, without suffix")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=150.0, help="no cell begins after this time")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            if arguments.part in ("tp_overlap", "fp8_param") and arguments.ranks != 2:
                raise refuse("--ranks", arguments.ranks, f"2 for {arguments.part}", "Start it on two GPUs.")
            for name, (settings, _) in PARTS[arguments.part].items():
                config = config_of(name, settings, arguments.ranks, Path(folder))
                prepare_missing(config.data)
                check(config, arguments.ranks)
                predict(config, arguments.ranks)
        except ValueError as error:
            print(f"step_variants: {error}", file=sys.stderr)
            return 2
        given = arguments.part, arguments.ranks, Path(folder), arguments.out, time.time() + arguments.seconds
        backend = "nccl" if max_gpu_ranks() else "gloo"
        run_ranks(_rank, arguments.ranks, *given, backend=backend, timeout=arguments.seconds + 120)
    path = Path(f"{arguments.out}.json")
    ended = len(json.loads(path.read_text())["runs"]) if path.exists() else 0
    return int(ended < len(PARTS[arguments.part]))


if __name__ == "__main__":
    sys.exit(main())
