"""Counts that the memory model is made of: parameters of a stage, elements that a layer keeps for backward."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from ..config import Config, mode_options, planned_mask, ranks_summed, token_unit, workload_of
from ..errors import refuse
from ..schedules import (
    Kind,
    Lowering,
    Plan,
    Program,
    Target,
    backward_plan,
    build_plan,
    keep_received,
    keeps_received,
    sum_in_nodes,
)
from ..schedules.footprint import Footprint, footprint
from ..schedules.kernel_calls import fa4_takes


@dataclass(frozen=True)
class Job:
    """What is trained, on how many ranks.

    vocab_size: rows of the embedding. data_parallel_size: over which the distributed optimizer shards, besides the
    context-parallel ranks. fused: RMSNorm and SwiGLU are one kernel each, as on GPUs; CPUs keep what is between.
    """

    config: Config
    vocab_size: int
    data_parallel_size: int = 1
    fused: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "at least 1", f"Correct {name}.")

    @property
    def element_bytes(self) -> int:
        """Of weights and activations."""
        return 2 if self.config.train.precision == "bf16" else 4

    @property
    def num_layers(self) -> int:
        """Of one pipeline stage."""
        return self.config.model.num_layers // self.config.parallelism.pipeline_parallel_size

    def expert_layers(self, stage: int) -> int:
        """How many layers of a stage are of experts."""
        return sum(self.config.model.expert_layers[stage * self.num_layers : (stage + 1) * self.num_layers])

    @cached_property
    def plan(self) -> Plan:
        """The forward plan of one attention call, of a layer that sees most."""
        par = self.config.parallelism
        if par.schedule == "auto":
            raise refuse("parallelism.schedule", "auto", "a mode", "Name one, or rank all of them with plan --compare.")
        mask, unit = planned_mask(self.config), token_unit(par)
        plan = build_plan(par.schedule, par.context_parallel_size, mask, mode_options(par), unit, par.layout)
        return sum_in_nodes(keep_received(plan) if self.keeps_received else plan, ranks_summed(self.config))

    @cached_property
    def backward(self) -> Plan:
        """The backward plan of one attention call."""
        return backward_plan(self.plan)

    @cached_property
    def target(self) -> Target:
        """What attention is lowered for. Peers read each other's memory on GPUs, unless messages are asked for."""
        n = self.config.parallelism.context_parallel_size
        over_peers = self.fused and n > 1 and self.config.attention.transport != "p2p"
        hosts = (tuple(range(n)),) * n if over_peers else None
        return Target(workload_of(self.config), fa4_takes(self.config.attention.deterministic), hosts)

    @cached_property
    def programs(self) -> tuple[list[Program], list[Program]]:
        """Forward and backward, of all ranks; of more than 16 some of each kind."""
        n = self.plan.n
        ranks = range(n) if n <= 16 else sorted({0, 1, n // 2 - 1, n // 2, n - 2, n - 1})
        forward, backward = Lowering(self.plan, self.target), Lowering(self.backward, self.target)
        return [forward.program(rank) for rank in ranks], [backward.program(rank) for rank in ranks]

    @cached_property
    def footprints(self) -> tuple[Footprint, Footprint]:
        """Forward and backward, of the rank with the most of each."""
        found = []
        for programs in self.programs:
            each = [footprint(program, self.target.workload, self.fused) for program in programs]
            most = {f.name: max(getattr(x, f.name) for x in each) for f in fields(Footprint)}
            found.append(Footprint(**most))
        return found[0], found[1]

    @property
    def keeps_received(self) -> bool:
        """Whether attention keeps what it has received from forward to backward."""
        config, n = self.config, self.config.parallelism.context_parallel_size
        return keeps_received(
            config.keep_received,
            config.parallelism.schedule,
            n,
            config.data.seq_length,
            config.train.micro_batch_size,
        )

    @cached_property
    def tokens(self) -> int:
        """Of the rank with the most, over the sequences of a micro-batch."""
        longest = max(map(self.plan.queries.num_tokens, range(self.plan.n)))
        return longest * self.config.train.micro_batch_size

    @property
    def hidden_tokens(self) -> int:
        """Tokens between the layers' tensor-parallel parts: sharded by sequence parallelism."""
        par = self.config.parallelism
        return -(-self.tokens // (token_unit(par)))

    @property
    def num_micro_batches(self) -> int:
        train = self.config.train
        return max(1, train.global_batch_size // (train.micro_batch_size * self.data_parallel_size))

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a pipeline stage holds at once (1F1B)."""
        return min(self.num_micro_batches, self.config.parallelism.pipeline_parallel_size - stage)


def stage_parameters(job: Job, stage: int) -> int:
    """Parameters of one tensor-parallel rank of a pipeline stage."""
    model, par = job.config.model, job.config.parallelism
    last = par.pipeline_parallel_size - 1
    embedding = embedding_weights(job)
    norm = model.hidden_size * (2 if model.normalization == "layernorm" else 1)
    of_experts = job.expert_layers(stage)
    total = (job.num_layers - of_experts) * layer_parameters(job)
    total += of_experts * (layer_parameters(job, experts=True) if of_experts else 0)
    if stage == 0:
        total += embedding
        if model.position_embedding == "learned":
            total += job.config.data.seq_length * model.hidden_size
    if stage == last:
        total += norm
        if not (model.tie_embeddings and last == 0):
            total += embedding
    return total


def stage_experts(job: Job, stage: int) -> int:
    """Parameters among them that expert-parallel ranks share, for which fewer ranks are data-parallel."""
    count = job.expert_layers(stage) if job.config.parallelism.expert_model_parallel_size > 1 else 0
    return count * expert_parameters(job) if count else 0


def mlp_weights(job: Job) -> tuple[int, int]:
    """Elements of the two matrices of one layer's MLP on one tensor-parallel rank; of the wider kind."""
    model, par = job.config.model, job.config.parallelism
    widths = {
        model.expert_width // par.tensor_size_of_experts
        if experts
        else model.ffn_hidden_size // par.tensor_parallel_size
        for experts in model.expert_layers
    }
    second = model.hidden_size * max(widths)
    return model.fc1_columns * second, second


def embedding_weights(job: Job) -> int:
    """Elements of the embedding, or of the LM head, on one tensor-parallel rank."""
    return job.vocab_size * job.config.model.hidden_size // job.config.parallelism.tensor_parallel_size


def layer_parameters(job: Job, experts: bool = False) -> int:
    """Parameters of one transformer layer, a dense one or one of experts, on one rank."""
    model, tp = job.config.model, job.config.parallelism.tensor_parallel_size
    heads = (model.num_attention_heads + 2 * model.num_kv_heads) * model.kv_channels
    width = 0 if experts else model.ffn_hidden_size
    fc1 = model.fc1_columns * width
    sharded = model.attention_weights + model.hidden_size * (fc1 + width)
    whole = 2 * model.hidden_size * (2 if model.normalization == "layernorm" else 1)
    if model.bias or model.qkv_bias:
        sharded += heads
    if model.bias:
        sharded += fc1
        whole += (1 if experts else 2) * model.hidden_size
    if model.sinks == "learnable":
        sharded += model.num_attention_heads
    norm = 2 if model.normalization == "layernorm" else 1
    normed = 2 * model.kv_channels if model.kv_lora_rank is None else model.kv_lora_rank + (model.q_lora_rank or 0)
    whole += norm * (normed * model.qk_norm + 2 * model.hidden_size * model.post_norms)
    if model.implementation == "transformer_engine":  # whose ranks each have these products whole
        sharded, whole = sharded - model.down_weights, whole + model.down_weights
    return sharded // tp + whole + (expert_parameters(job) + router_parameters(job) if experts else 0)


def expert_parameters(job: Job) -> int:
    """Of the experts of one layer that a rank holds."""
    model, par = job.config.model, job.config.parallelism
    assert model.num_moe_experts is not None
    columns = model.fc1_columns
    sharded = (columns + 1) * model.hidden_size * model.expert_width
    biases = columns * model.expert_width + model.hidden_size if model.bias else 0
    return model.num_moe_experts // par.expert_model_parallel_size * (sharded // par.tensor_size_of_experts + biases)


def router_parameters(job: Job) -> int:
    """Of what else is in the place of a layer's MLP: the router, and this rank's part of shared experts."""
    model, tp = job.config.model, job.config.parallelism.tensor_parallel_size
    assert model.num_moe_experts is not None
    shared = (model.fc1_columns + 1) * model.hidden_size * (model.moe_shared_expert_intermediate_size or 0)
    return model.num_moe_experts * (model.hidden_size + model.bias) + shared // tp


def routed_tokens(job: Job) -> int:
    """Rows that go through the experts of a rank."""
    return job.hidden_tokens * job.config.model.moe_router_topk * job.config.parallelism.tensor_size_of_experts


@dataclass(frozen=True)
class LayerBytes:
    """What one layer's activations take for one micro-batch.

    input: the layer's input. result: attention's out and lse. attention: everything else up to there that backward
    reads (norm, q, keys and values, or what is kept of other ranks'); qkv is what the attention call itself takes of
    it. mlp: everything after attention (norm, its input, the MLP); the MLP's first output of it is fc1. norm: what one
    norm keeps beside its input. tile: with tiles, what lies there of one in the place of the MLP's own activations.
    """

    input: int
    result: int
    attention: int
    qkv: int
    mlp: int
    fc1: int
    norm: int
    tile: int

    @property
    def total(self) -> int:
        return self.input + self.result + self.attention + self.mlp


def layer_bytes(job: Job, experts: bool = False) -> LayerBytes:
    """Activations of one layer, a dense one or one of experts, as Megatron's layers with our attention and torch's
    norms save them."""
    model, e, tokens = job.config.model, job.element_bytes, job.tokens
    tp = job.config.parallelism.tensor_parallel_size
    workload = workload_of(job.config)
    rope = model.position_embedding == "rope"
    per_sequence = job.tokens // job.config.train.micro_batch_size
    hidden = e * job.hidden_tokens * model.hidden_size
    q = per_sequence * workload.elements(Kind.Q) * e
    kv = per_sequence * workload.elements(Kind.KV) * e
    grouped = model.num_kv_heads < model.num_attention_heads
    # Without RoPE keys and values, and with one query head for each of them queries, are views of the projection.
    seen = q + kv + (q if grouped and not rope else 0)
    taken, kept = q + kv, job.footprints[0].kept
    reads = job.programs[1][0].reads_own
    if kept and reads.isdisjoint((Kind.Q_GRAD, Kind.KV)):  # in the place of the rank's own, its lse included
        seen = taken = 0
        if model.sinks == "none":
            kept -= per_sequence * (workload.token_bytes(Kind.OUT) - workload.token_bytes(Kind.Q))
        else:  # whose gradient is of the rank's own queries
            seen = taken = q
    fc1 = e * tokens * model.fc1_columns * model.ffn_hidden_size // tp
    act = e * tokens * model.ffn_hidden_size // tp
    rms = model.normalization == "rmsnorm"

    def normed(size: int, rows: int) -> int:
        """What a norm of `size` bytes keeps, but its input."""
        return size + 4 * rows * (1 if rms else 2) + (0 if job.fused or not rms else size)

    norm = normed(hidden, job.hidden_tokens)
    if model.latent:  # and what cosines and sines queries and keys have been multiplied by
        seen += 4 * e * per_sequence * model.rope_channels + e * job.hidden_tokens * model.rope_channels
        for rank, rows in ((model.kv_lora_rank, job.hidden_tokens), (model.q_lora_rank, tokens)):
            if rank is not None:  # of queries Megatron keeps the rows of all tensor-parallel ranks
                seen += e * rows * rank
                seen += normed(e * job.hidden_tokens * rank, job.hidden_tokens) if model.qk_norm else 0
    elif model.qk_norm:
        seen += sum(size + normed(size, size // (e * model.kv_channels)) for size in (q, kv // 2))
    behind = 2 * norm if model.post_norms else 0  # and the norm's input is in the place of its output
    fused = job.fused and model.activation == "swiglu"
    between = 2 * act if model.fc1_columns == 2 and not fused else 0
    inside, size = fc1 + act + between, job.config.recompute.mlp_tile_tokens
    if experts:
        inside, fc1 = expert_bytes(job)
    return LayerBytes(
        input=hidden,
        result=per_sequence * workload.token_bytes(Kind.OUT),
        attention=norm + seen + kept,
        qkv=taken + kept,
        mlp=hidden + norm + behind + (inside if size is None else 0),
        fc1=fc1,
        norm=norm,
        # Beside them the gradient of the first output: the last activation is freed by then.
        tile=0 if size is None else (inside + fc1) * min(size, tokens) // max(1, tokens),
    )


def expert_bytes(job: Job) -> tuple[int, int]:
    """Activations of a layer's experts on one rank, and of them what their first products give."""
    model, par, e = job.config.model, job.config.parallelism, job.element_bytes
    columns, rows = model.fc1_columns, routed_tokens(job)
    width = model.expert_width // par.tensor_size_of_experts
    fc1 = e * rows * columns * width
    # The input of both products; of a gate also its two halves and their product, before it is weighted.
    inside = e * rows * model.hidden_size + fc1 + e * rows * width
    if not (job.fused and model.activation == "swiglu"):
        inside += e * rows * width * (3 if columns == 2 else 1)
    routing = job.hidden_tokens * (model.num_moe_experts or 0) * 4
    shared = (model.moe_shared_expert_intermediate_size or 0) // par.tensor_parallel_size
    return inside + routing + e * job.tokens * shared * (columns + (3 if columns == 2 else 1)), fc1


@dataclass(frozen=True)
class AttentionBytes:
    """buffers: held between calls by all layers together. published: what peers read, which lies outside of the
    caching allocator. backward: most of one backward call beside them, with its inputs."""

    buffers: int
    published: int
    backward: int


def attention_bytes(job: Job) -> AttentionBytes:
    """From the programs of the configured mode."""
    forward, backward = job.footprints
    workload = job.target.workload
    buffers: dict[tuple[Kind, int, int], int] = {}  # by what the passes of a rank share
    for program in (program for way in job.programs for program in way):
        for each, name in zip(program.buffers, program.buffer_names, strict=True):
            key = each.kind, each.parts, name
            if not each.kept:
                buffers[key] = max(buffers.get(key, 0), each.tokens * workload.token_bytes(each.kind, each.heads))
    over_peers, sent = job.target.hosts is not None, max(forward.sent, backward.sent)
    return AttentionBytes(
        buffers=sum(buffers.values()) + (0 if over_peers else sent),
        published=sent if over_peers else 0,
        backward=backward.inputs + forward.kept + backward.results,
    )
