"""A transformers model under FSDP2 on a sharded sequence: whole steps with this attention and with other packages'.

Llama-3-8B's shape with few layers and random weights, one model for all: each contender is an attention implementation
of it. ring-flash-attn's function is called as its Hugging Face adapter calls it, which itself refuses transformers 5.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig

from megatron_longctx.core import layout
from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.comm import gather_objects
from megatron_longctx.integrations.transformers import register, shard
from megatron_longctx.training.measure import mean_seconds
from megatron_longctx.training.ranks import Ranks, run_on_ranks, world_group

from .cases import packs
from .peers import ring_flash_attn
from .report import Report, add_ranks, check_least, numbers, table

_SHORT, _UNIT = 2048, 64  # tokens of the check, and what its documents are multiples of
_LOSS_LIMIT = {torch.bfloat16: 5e-3, torch.float32: 1e-5}
_CHUNK = 2048  # tokens whose logits exist at a time


@dataclass(frozen=True)
class Options:
    """What to measure."""

    packs: tuple[tuple[int, ...], ...]
    layers: int
    size: int  # hidden size
    vocabulary: int
    iterations: int
    rounds: int

    def config(self) -> LlamaConfig:
        """Llama-3-8B's at 4,096: heads of 128, four query heads to a KV head."""
        heads = max(4, self.size // 128)
        return LlamaConfig(
            hidden_size=self.size, intermediate_size=self.size * 7 // 2, num_hidden_layers=self.layers,
            num_attention_heads=heads, num_key_value_heads=heads // 4, vocab_size=self.vocabulary,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            max_position_embeddings=2**20, rms_norm_eps=1e-5, pad_token_id=0,
        )  # fmt: skip


@dataclass
class Measurement:
    """The result of one contender for one pack."""

    name: str
    tokens: int
    documents: int
    rounds: list[float] = field(default_factory=list)  # mean seconds of steps in a row, slowest rank
    peak_bytes: int | None = None
    loss_error: float | None = None  # relative, of a short pack, beside one rank
    gradient_error: float | None = None  # of the norm of all gradients
    reason: str = ""  # why there are no rounds

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / statistics.median(self.rounds) if self.rounds else None


class Contender(NamedTuple):
    """An attention implementation. prepare: from the whole batch and its documents, the rank's arguments.

    It raises ValueError, on all ranks alike, for documents that it does not support. during: surrounds every step.
    """

    name: str
    implementation: str
    prepare: Callable[[dict[str, Tensor], Sequence[int]], dict[str, Any]]
    during: Callable[[], Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(parser)
    parser.add_argument(
        "--packs", default="24,causal", help=f"causal, or of {', '.join(packs())} (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=65536, help="of causal (default: %(default)s)")
    parser.add_argument("--documents", help="lengths like 40:24 of one more pack")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--size", type=int, default=4096, help="hidden size (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--iterations", type=int, default=3, help="steps in a row (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of every contender, interleaved (default: %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Measure, and write JSON and a Markdown table after every pack."""
    for name in ("tokens", "layers", "size", "vocabulary", "iterations", "rounds"):
        check_least(f"--{name}", getattr(arguments, name))
    known = packs() | {"causal": (arguments.tokens,)}
    chosen = [known[name] for name in arguments.packs.split(",") if name in known]
    if arguments.documents:
        chosen.append(numbers("--documents", arguments.documents, 1, ":", distinct=False))
    options = Options(
        tuple(chosen), arguments.layers, arguments.size, arguments.vocabulary, arguments.iterations, arguments.rounds
    )
    ranks = Ranks.of(arguments.ranks, arguments.device)
    unit = f"{ranks.count} ranks; tokens/s of the whole sequence in forward, backward and AdamW; FSDP2"
    about = f"transformers, Llama of {options.layers} layers and size {options.size}"
    report = Report(arguments.out, ranks.device, "seconds of training steps of a transformers model", about, unit)
    save = partial(record, report, ranks.count, options)
    print(save(run_on_ranks(ranks, measure, ranks, options, save)))


def record(report: Report, ranks: int, options: Options, measured: Sequence[Measurement]) -> str:
    """Write the results so far; return the table."""
    rows = []
    for m in measured:
        gib = "" if m.peak_bytes is None else f"{m.peak_bytes / 2**30:.2f}"
        errors = "" if m.loss_error is None else f"loss {m.loss_error:.1e}, gradients {m.gradient_error:.1e}"
        speed = f"not possible: {m.reason}" if m.tokens_per_s is None else f"{m.tokens_per_s:,.0f}"
        rows.append([f"{m.tokens:,}", str(m.documents), m.name, speed, gib, errors])
    text = table(["tokens", "documents", "attention", "tokens/s", "GiB", "beside one rank"], rows)
    data = {
        "ranks": ranks,
        "options": asdict(options),
        "model": options.config().to_dict(),
        "measurements": [asdict(each) | {"tokens_per_s": each.tokens_per_s} for each in measured],
        "notes": [ring_flash_attn.NOTE],
    }
    return report.write(data, text)


class Step(torch.nn.Module):
    """A model and its loss, whose logits exist for a few tokens at a time: those of 32K tokens need 50 GB."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, shift_labels: Any, num_items_in_batch: Tensor, **inputs: Any) -> Tensor:
        hidden: Any = self.model.model(**inputs, use_cache=False).last_hidden_state
        pieces = zip(hidden.split(_CHUNK, dim=1), shift_labels.split(_CHUNK, dim=1), strict=True)
        losses = [checkpoint(self.piece, *each, use_reentrant=False) for each in pieces]
        return torch.stack(losses).sum() / num_items_in_batch

    def piece(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.model.lm_head(hidden).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def measure(
    rank: int, ranks: Ranks, options: Options, save: Callable[[list[Measurement]], object]
) -> list[Measurement]:
    """Measure all packs. All ranks call this together; rank 0 calls `save` after every pack."""
    group, device = world_group(), ranks.local_device
    register(ContextParallelAttention(group))
    register(ContextParallelAttention(), "one_rank")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(1)
    models: Any = AutoModelForCausalLM
    with device:
        model = models.from_config(options.config(), attn_implementation="longctx", dtype=dtype)
    step, mesh = Step(model), DeviceMesh.from_group(group, device.type)
    for each in (*model.model.layers, step):
        fully_shard(each, mesh=mesh)
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-5, fused=device.type == "cuda")
    measured: list[Measurement] = []
    for documents in options.packs:
        bench = Bench(step, optimizer, group, device, options)
        measured += bench.run(contenders(group, device.type), documents)
        if rank == 0:
            save(measured)
    return measured


def contenders(group: dist.ProcessGroup, device_type: str) -> list[Contender]:
    """Return this package's attention and the others; those that cannot be used say why when they prepare."""
    found = [Contender("this package, zigzag", "longctx", lambda batch, docs: _ours(batch, docs), _nothing)]
    for name, make in (("ring-flash-attn, llama3", _ring), ("torch context_parallel, allgather, SDPA", _torch)):
        try:
            found.append(make(name, group, device_type))
        except Exception as error:  # packages with compiled parts raise anything
            found.append(Contender(name, "", partial(_absent, f"{type(error).__name__}: {error}"), _nothing))
    return found


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _absent(reason: str, *_: Any) -> dict[str, Any]:
    raise ValueError(reason.split("\n", 1)[0])


def _ours(batch: dict[str, Tensor], documents: Sequence[int], name: str = "longctx") -> dict[str, Any]:
    sharded = shard(batch, documents, name=name)
    return {key: value for key, value in sharded.items() if key not in ("labels", "use_cache")}


def _cut(batch: dict[str, Tensor], documents: Sequence[int], tokens: Iterable[int]) -> dict[str, Any]:
    """Return these tokens of what `shard` returns for one rank, without its mask."""
    whole = _ours(batch, documents, "one_rank")
    del whole["attention_mask"]
    mine = torch.tensor(list(tokens), device=batch["input_ids"].device)
    return {key: value[:, mine] if value.ndim == 2 else value for key, value in whole.items()}


def _ring(name: str, group: dist.ProcessGroup, device_type: str) -> Contender:
    """ring-flash-attn's variable-length function, which gathers keys and values a few heads at a time."""
    package = ring_flash_attn.load("auto")[2]
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    current: list[Any] = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        out = package.llama3_flash_attn_varlen_func(
            *(x.transpose(1, 2).squeeze(0) for x in (query, key, value)),
            *current[:4],
            heads_k_stride=math.gcd(key.shape[1], 4),
            local_k_slice=current[4],
            causal=True,
            softmax_scale=scaling,
            group=group,
        )
        return out.unsqueeze(0), None

    def prepare(batch: dict[str, Tensor], documents: Sequence[int]) -> dict[str, Any]:
        length = sum(documents)
        if length % n:
            raise ValueError(f"{length} tokens: expected a multiple of {n}")
        bounds = torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
        current[:] = package.llama3_flash_attn_prepare_cu_seqlens(bounds, causal=True, rank=rank, world_size=n)
        return _cut(batch, documents, layout.contiguous(n, length).tokens(rank))

    AttentionInterface.register("ring_function", attend)
    return Contender(name, "ring_function", prepare, _nothing)


def _torch(name: str, group: dist.ProcessGroup, device_type: str) -> Contender:
    """torch's context_parallel over dense causal SDPA. It has no grouped-query form: keys and values are repeated."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    n, mesh = dist.get_world_size(group), DeviceMesh.from_group(group, device_type)
    backend = SDPBackend.CUDNN_ATTENTION if device_type == "cuda" else SDPBackend.FLASH_ATTENTION
    set_rotate_method("allgather")

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    @contextmanager
    def during() -> Iterator[None]:
        buffer = torch.zeros(2 * n, device=device_type)  # it needs some buffer
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]), sdpa_kernel(backend):
            yield

    def prepare(batch: dict[str, Tensor], documents: Sequence[int]) -> dict[str, Any]:
        if len(documents) > 1 or sum(documents) % (2 * n):
            raise ValueError(f"{len(documents)} documents: expected one, of a multiple of {2 * n} tokens")
        return _cut(batch, documents, layout.zigzag(n, sum(documents)).tokens(dist.get_rank(group)))

    AttentionInterface.register("torch_context_parallel", attend)
    return Contender(name, "torch_context_parallel", prepare, during)


class Bench(NamedTuple):
    """A sharded model and how it is measured."""

    step: Step
    optimizer: torch.optim.Optimizer
    group: dist.ProcessGroup
    device: torch.device
    options: Options

    def run(self, every: Sequence[Contender], documents: Sequence[int]) -> list[Measurement]:
        """Check each contender on a short pack, then measure those that are right, interleaved."""
        short, measured = self.short(documents), []
        one = Contender("one rank", "one_rank", partial(_ours, name="one_rank"), _nothing)
        truth = self.result(one, short)
        ready: list[tuple[Contender, Measurement, dict[str, Any]]] = []
        for contender in every:
            result = Measurement(contender.name, sum(documents), len(documents))
            measured.append(result)
            try:
                loss, norm = self.result(contender, short)
                result.loss_error = abs(loss / truth[0] - 1)
                result.gradient_error = abs(norm / truth[1] - 1)
                if not max(result.loss_error, result.gradient_error / 10) < _LOSS_LIMIT[self.step.model.dtype]:
                    result.reason = "wrong results"
                    continue
                ready.append((contender, result, contender.prepare(self.batch(documents), documents)))
            except Exception as error:  # other packages raise anything, on all ranks alike
                if contender.implementation == "longctx":
                    raise
                result.reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        for turn in range(1 + self.options.rounds):  # the first warms up
            for contender, result, _ in ready:
                arguments = contender.prepare(self.batch(documents), documents)
                seconds = self.seconds(contender, arguments, result)
                if turn:
                    result.rounds.append(seconds)
        return measured

    def short(self, documents: Sequence[int]) -> list[int]:
        """Return a pack of about 2,048 tokens with the same proportions."""
        factor, unit = max(1, sum(documents) / _SHORT), math.lcm(_UNIT, 2 * dist.get_world_size(self.group))
        return [max(1, round(length / factor / unit)) * unit for length in documents]

    def batch(self, documents: Sequence[int]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(sum(documents))
        words = torch.randint(1, self.options.vocabulary, (1, sum(documents)), generator=generator).to(self.device)
        return {"input_ids": words, "labels": words.clone()}

    def result(self, contender: Contender, documents: Sequence[int]) -> tuple[float, float]:
        """Return the loss of all ranks and the norm of its gradients. `one_rank` has the whole loss on every rank."""
        self.step.model.set_attn_implementation(contender.implementation or "eager")
        arguments = contender.prepare(self.batch(documents), documents)
        with contender.during():
            loss = self.step(**arguments)
            loss.backward()
        alone = contender.implementation == "one_rank"
        n = 1 if alone else dist.get_world_size(self.group)
        total = sum(gather_objects(self.group, float(loss.detach()))) / (
            dist.get_world_size(self.group) if alone else 1
        )
        gradients: list[Any] = [each.grad for each in self.step.parameters()]
        squares = [each.float().square().sum().full_tensor() for each in gradients]
        self.step.zero_grad()
        return total, float(torch.stack(squares).sum().sqrt()) * n  # fully_shard averages over ranks

    def seconds(self, contender: Contender, arguments: dict[str, Any], result: Measurement) -> float:
        """Return the mean seconds of steps in a row on the slowest rank, and note the peak of memory."""
        self.step.model.set_attn_implementation(contender.implementation)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

        def work() -> None:
            with contender.during():
                (self.step(**arguments) * dist.get_world_size(self.group)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        dist.barrier(self.group)
        seconds = max(gather_objects(self.group, mean_seconds(work, self.device, self.options.iterations)))
        if self.device.type == "cuda":
            peak = max(gather_objects(self.group, torch.cuda.max_memory_allocated(self.device)))
            result.peak_bytes = max(result.peak_bytes or 0, peak)
        return seconds
