"""Counts that the memory model is made of: parameters of a stage, elements that a layer keeps for backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..config import Config, refuse
from ..schedules import Kind, Plan, PlanOptions, Workload, backward_plan, build_plan, keeping, keeps_received
from ..schedules.publishing import published_bytes
from ..schedules.simulate import kept_bytes, outgoing_bytes, peak_bytes, reads_own

_FC1_COLUMNS = {"swiglu": 2, "gelu": 1}
"""Columns of the MLP's first matrix, in units of the MLP's width."""


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

    @cached_property
    def plan(self) -> Plan:
        """The forward plan of one attention call."""
        par = self.config.parallelism
        if par.schedule == "auto":
            raise refuse("parallelism.schedule", "auto", "a mode", "Name one, or rank all of them with plan --compare.")
        length = self.config.data.seq_length
        plan = build_plan(par.schedule, par.context_parallel_size, length, True, PlanOptions.of(par))
        return keeping(plan) if self.keeps_received else plan

    @cached_property
    def backward(self) -> Plan:
        """The backward plan of one attention call."""
        return backward_plan(self.plan)

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
        longest = max(map(self.plan.layout.num_tokens, range(self.plan.n)))
        return longest * self.config.train.micro_batch_size

    @property
    def hidden_tokens(self) -> int:
        """Tokens between the layers' tensor-parallel parts: sharded by sequence parallelism."""
        par = self.config.parallelism
        return -(-self.tokens // (par.tensor_parallel_size if par.uses_sequence_parallel else 1))

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
    embedding = job.vocab_size * model.hidden_size // par.tensor_parallel_size
    norm = model.hidden_size * (2 if model.normalization == "layernorm" else 1)
    total = job.num_layers * layer_parameters(job)
    if stage == 0:
        total += embedding
        if model.position_embedding == "learned":
            total += job.config.data.seq_length * model.hidden_size
    if stage == last:
        total += norm
        if not (model.tie_embeddings and last == 0):
            total += embedding
    return total


def mlp_weights(job: Job) -> tuple[int, int]:
    """Elements of the two matrices of one layer's MLP on one tensor-parallel rank."""
    model, tp = job.config.model, job.config.parallelism.tensor_parallel_size
    second = model.hidden_size * model.ffn_hidden_size // tp
    return _FC1_COLUMNS[model.activation] * second, second


def layer_parameters(job: Job) -> int:
    """Parameters of one transformer layer on one tensor-parallel rank."""
    model, tp = job.config.model, job.config.parallelism.tensor_parallel_size
    heads = (model.num_attention_heads + 2 * model.num_kv_heads) * model.kv_channels
    out = model.num_attention_heads * model.kv_channels
    fc1 = _FC1_COLUMNS[model.activation] * model.ffn_hidden_size
    sharded = model.hidden_size * (heads + out + fc1 + model.ffn_hidden_size)
    whole = 2 * model.hidden_size * (2 if model.normalization == "layernorm" else 1)
    if model.bias:
        sharded += heads + fc1
        whole += 2 * model.hidden_size
    return sharded // tp + whole


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


def layer_bytes(job: Job) -> LayerBytes:
    """Activations of one layer, as Megatron's layers with our attention and torch's norms save them."""
    model, e, tokens = job.config.model, job.element_bytes, job.tokens
    tp = job.config.parallelism.tensor_parallel_size
    workload = Workload.of(job.config)
    rope = model.position_embedding == "rope"
    per_sequence = job.tokens // job.config.train.micro_batch_size
    hidden = e * job.hidden_tokens * model.hidden_size
    q = per_sequence * workload.elements(Kind.Q) * e
    kv = per_sequence * workload.elements(Kind.KV) * e
    grouped = model.num_kv_heads < model.num_attention_heads
    # Without RoPE keys and values, and with one query head for each of them queries, are views of the projection.
    seen = q + kv + (q if grouped and not rope else 0)
    taken, kept = q + kv, kept_bytes(job.plan, workload)
    if kept and not reads_own(job.backward):  # in the place of the rank's own, its lse included
        kept -= per_sequence * (workload.token_bytes(Kind.OUT) - workload.token_bytes(Kind.Q))
        seen = taken = 0
    fc1 = e * tokens * _FC1_COLUMNS[model.activation] * model.ffn_hidden_size // tp
    act = e * tokens * model.ffn_hidden_size // tp
    rms = model.normalization == "rmsnorm"
    norm = hidden + 4 * job.hidden_tokens * (1 if rms else 2) + (0 if job.fused or not rms else hidden)
    between = 2 * act if model.activation == "swiglu" and not job.fused else 0
    inside, size = fc1 + act + between, job.config.recompute.mlp_tile_tokens
    return LayerBytes(
        input=hidden,
        result=per_sequence * workload.token_bytes(Kind.OUT),
        attention=norm + seen + kept,
        qkv=taken + kept,
        mlp=hidden + norm + (inside if size is None else 0),
        fc1=fc1,
        norm=norm,
        # Beside them the gradient of the first output: the last activation is freed by then.
        tile=0 if size is None else (inside + fc1) * min(size, tokens) // max(1, tokens),
    )


@dataclass(frozen=True)
class AttentionBytes:
    """buffers: held between calls by all layers together. published: what peers read, which lies outside of the
    caching allocator. backward: most of one backward call beside them, with its inputs."""

    buffers: int
    published: int
    backward: int


def attention_bytes(job: Job) -> AttentionBytes:
    """From the plans of the configured mode."""
    workload = Workload.of(job.config)
    backward = job.backward
    tokens: dict[Kind, int] = dict(job.plan.buffers)
    for kind, count in backward.buffers:
        tokens[kind] = max(count, tokens.get(kind, 0))
    # There are two memories for peers to read, which passes use in turn; CPUs have none.
    over_peers = job.fused and job.plan.n > 1 and job.config.attention.transport != "p2p"
    published = 2 * max(published_bytes(plan, workload) for plan in (job.plan, backward)) if over_peers else 0
    in_backward = sum(count * workload.token_bytes(kind) for kind, count in backward.buffers)
    outgoing = outgoing_bytes(backward, workload)
    summed = peak_bytes(backward, workload) - in_backward - (outgoing if over_peers else 0)
    inputs = workload.token_bytes(Kind.Q_GRAD) + workload.token_bytes(Kind.KV)
    inputs = inputs if reads_own(backward) else workload.token_bytes(Kind.GRAD)
    called = inputs * job.tokens // job.config.train.micro_batch_size + kept_bytes(backward, workload)
    called += _most_in_a_call(backward, workload) + (0 if over_peers else outgoing)
    return AttentionBytes(
        buffers=sum(count * workload.token_bytes(kind) for kind, count in tokens.items()),
        published=published,
        backward=max(summed, called) if job.fused else summed,
    )


def _most_in_a_call(plan: Plan, workload: Workload) -> int:
    """Most bytes of any rank during a kernel of a backward plan, beside inputs and buffers: the call's results, what is
    the rank's own of earlier ones, and the kernel's workspace.

    cuDNN and FlashAttention-2 add dq up in fp32 and keep a sum for every query; where heads share keys and values they
    first make a dk and dv for every query head.
    """
    e, most = workload.element_bytes, 0
    per_query, per_key = workload.elements(Kind.Q), workload.elements(Kind.KV)
    expanded = 2 * per_query if workload.num_kv_heads < workload.num_heads else 0
    for rank in range(plan.n):
        held = 0
        for attend in (attend for step in plan.steps for attend in step.attends[rank]):
            queries, keys = (sum(block.tokens for block in blocks) for blocks in (attend.queries, attend.keys))
            own = [sum(b.tokens for b in blocks if b.home == rank) for blocks in (attend.queries, attend.keys)]
            workspace = queries * 4 * (per_query + workload.num_heads * workload.batch) + keys * expanded * e
            results = e * (queries * per_query + keys * per_key)
            most = max(most, held + (results + workspace) // attend.heads.parts)
            held += e * (own[0] * per_query + own[1] * per_key) // attend.heads.parts
    return most
