"""Sizes that the memory model adds up: parameters of a pipeline stage, activations of a layer, memory of attention."""

from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import NamedTuple

from ...config import Config, cluster_of, configured_plan, planned_mask, workload_of
from ...config.model import DELTA_RULE_CHUNK as CHUNK
from ...core.errors import refuse
from ...core.plans import Kind, Plan, Recorder, Target, backward_plan
from ...core.plans.kernel_calls import fa4_takes
from ..footprint import Footprint, footprint


class LayerKind(NamedTuple):
    """What makes a layer larger or smaller: experts in place of its MLP, a gated delta net in place of attention, and
    products in FP8."""

    experts: bool = False
    recurrent: bool = False
    fp8: bool = False


DENSE = LayerKind()


@dataclass(frozen=True)
class Job:
    """A configured training job whose memory is predicted."""

    config: Config
    vocab_size: int  # rows of the embedding
    data_parallel_size: int = 1  # the distributed optimizer shards over these and the context-parallel ranks
    fused: bool = True  # RMSNorm and SwiGLU are one kernel each, as on GPUs; CPUs keep intermediate results

    def __post_init__(self) -> None:
        for name in ("vocab_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "at least 1", f"Correct {name}.")

    @property
    def element_bytes(self) -> int:
        """The size of a weight or an activation."""
        return 2 if self.config.train.precision == "bf16" else 4

    @property
    def kept_results(self) -> float:
        """The share of attention's results that a layer keeps, where it keeps them."""
        recompute = self.config.recompute
        return recompute.kept_results if recompute.mode.startswith("attention_output") else 1.0

    @property
    def num_layers(self) -> int:
        """The number of layers of one pipeline stage."""
        return self.config.model.num_layers // self.config.parallelism.pipeline_parallel_size

    @property
    def fp8_layers(self) -> tuple[bool, ...]:
        """Whether each layer's products are in FP8."""
        train, count = self.config.train, self.config.model.num_layers
        inside = range(train.bf16_layers_at_start, count - train.bf16_layers_at_end)
        return tuple(train.fp8 != "none" and number in inside for number in range(count))

    def kinds(self, stage: int) -> Counter[LayerKind]:
        """Return how many layers of each kind a pipeline stage has."""
        own, model = slice(stage * self.num_layers, (stage + 1) * self.num_layers), self.config.model
        each = model.expert_layers[own], model.recurrent_layers[own], self.fp8_layers[own]
        return Counter(map(LayerKind, *each))

    @cached_property
    def plan(self) -> Plan:
        """The forward plan of one attention call, for the layer with the largest mask."""
        if self.config.parallelism.schedule == "auto":
            raise refuse("parallelism.schedule", "auto", "a mode", "Name one, or rank all of them with plan --compare.")
        return configured_plan(self.config, planned_mask(self.config))

    @cached_property
    def target(self) -> Target:
        """The target of recordings. On the GPUs of one node, ranks read each other's memory unless
        `attention.transport=p2p`."""
        cluster = cluster_of(self.config.parallelism)
        one_node = self.plan.n > 1 and (cluster is None or cluster.nodes == 1)
        over_peers = self.fused and one_node and self.config.attention.transport != "p2p"
        return Target(workload_of(self.config), fa4_takes(self.config.attention.deterministic), over_peers)

    @property
    def passes(self) -> tuple[Footprint, Footprint, frozenset[Kind]]:
        """The forward and backward footprint of attention, and what a rank reads of its own tensors in backward."""
        return _passes(self.plan, self.target, self.fused)

    @cached_property
    def tokens(self) -> int:
        """The tokens of a micro-batch on the rank that has most of them."""
        longest = max(map(self.plan.queries.num_tokens, range(self.plan.n)))
        return longest * self.config.train.micro_batch_size

    @property
    def hidden_tokens(self) -> int:
        """The tokens of a hidden state between tensor-parallel layers, which sequence parallelism shards."""
        par = self.config.parallelism
        return -(-self.tokens // (par.tensor_parallel_size if par.uses_sequence_parallel else 1))

    def in_flight(self, stage: int) -> int:
        """Return the number of micro-batches whose activations a pipeline stage holds at the same time (1F1B)."""
        train = self.config.train
        num_micro_batches = max(1, train.global_batch_size // (train.micro_batch_size * self.data_parallel_size))
        return min(num_micro_batches, self.config.parallelism.pipeline_parallel_size - stage)


@lru_cache(maxsize=256)  # advice and searches compare settings that often have the same plan
def _passes(plan: Plan, target: Target, fused: bool) -> tuple[Footprint, Footprint, frozenset[Kind]]:
    """Record all ranks, or six typical ones of more than 16; every field of a footprint is the largest of them."""
    n = plan.n
    ranks = range(n) if n <= 16 else sorted({0, 1, n // 2 - 1, n // 2, n - 2, n - 1})

    def recorded(plan: Plan) -> tuple[Footprint, frozenset[Kind]]:
        recorder = Recorder(plan, target)
        recordings = [recorder.record(rank) for rank in ranks]
        of_ranks = [footprint(recording, target.workload, fused) for recording in recordings]
        largest = {f.name: max(getattr(each, f.name) for each in of_ranks) for f in fields(Footprint)}
        return Footprint(**largest), recordings[0].reads_own

    backward, reads_own = recorded(backward_plan(plan))
    return recorded(plan)[0], backward, reads_own


def stage_parameters(job: Job, stage: int) -> int:
    """Return the number of parameters of one rank of a pipeline stage."""
    model, last = job.config.model, job.config.parallelism.pipeline_parallel_size - 1
    total = stage_layers(job, stage)
    if stage == 0:
        total += embedding_weights(job)
        if model.position_embedding == "learned":
            total += job.config.data.seq_length * model.hidden_size
    if stage == last:
        total += model.hidden_size * (2 if model.normalization == "layernorm" else 1)
        if not (model.tie_embeddings and last == 0):
            total += embedding_weights(job)
    return total


def stage_layers(job: Job, stage: int, fp8: bool = False) -> int:
    """Return how many of `stage_parameters` are in layers, or in those whose products are in FP8."""
    kinds = job.kinds(stage).items()
    return sum(count * layer_parameters(job, kind) for kind, count in kinds if kind.fp8 or not fp8)


def stage_experts(job: Job, stage: int) -> int:
    """Return how many of `stage_parameters` expert parallelism shards; fewer ranks are data-parallel for these."""
    if job.config.parallelism.expert_model_parallel_size == 1:
        return 0
    return expert_parameters(job) * sum(count for kind, count in job.kinds(stage).items() if kind.experts)


def mlp_weights(job: Job) -> tuple[int, int]:
    """Return the elements of both matrices of one layer's MLP on one rank, for the wider of dense and expert layers."""
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
    """Return the elements of the embedding, or of the LM head, on one tensor-parallel rank."""
    return job.vocab_size * job.config.model.hidden_size // job.config.parallelism.tensor_parallel_size


def layer_parameters(job: Job, kind: LayerKind = DENSE) -> int:
    """Return the number of parameters of one transformer layer on one rank."""
    experts, recurrent, _ = kind
    model, tp = job.config.model, job.config.parallelism.tensor_parallel_size
    heads = (model.num_attention_heads + 2 * model.num_kv_heads) * model.kv_channels
    width = 0 if experts else model.ffn_hidden_size
    fc1 = model.fc1_columns * width
    norm = 2 if model.normalization == "layernorm" else 1
    sharded = model.hidden_size * (fc1 + width)
    whole = 2 * model.hidden_size * norm
    if recurrent:
        mixed, values = model.recurrent_columns
        heads = model.linear_num_value_heads or 0
        decays = heads * ((model.linear_key_head_dim or 0) if "K" in model.mixers else 1)
        sharded += model.recurrent_weights + mixed * model.linear_conv_kernel_dim + heads + decays
        sharded += model.recurrent_rows * model.bias
        if "M" in model.mixers:
            sharded += mixed + heads + values
        else:
            whole += model.linear_value_head_dim or 0
    else:
        sharded += model.attention_weights + heads * (model.bias or model.qkv_bias)
    if model.bias:
        sharded += fc1
        whole += (1 if experts else 2) * model.hidden_size
    if model.sinks == "learnable" and not recurrent:
        sharded += model.num_attention_heads
    normed = 2 * model.kv_channels if model.kv_lora_rank is None else model.kv_lora_rank + (model.q_lora_rank or 0)
    whole += norm * (normed * (model.qk_norm and not recurrent) + 2 * model.hidden_size * model.post_norms)
    if model.implementation == "transformer_engine" and not recurrent:  # it does not shard latents' down projections
        sharded, whole = sharded - model.down_weights, whole + model.down_weights
    return sharded // tp + whole + (expert_parameters(job) + router_parameters(job) if experts else 0)


def expert_parameters(job: Job) -> int:
    """Return the number of parameters of the experts of one layer on one rank; 0 for a dense model."""
    model, par = job.config.model, job.config.parallelism
    columns = model.fc1_columns
    sharded = (columns + 1) * model.hidden_size * model.expert_width
    biases = columns * model.expert_width + model.hidden_size if model.bias else 0
    experts = (model.num_moe_experts or 0) // par.expert_model_parallel_size
    return experts * (sharded // par.tensor_size_of_experts + biases)


def router_parameters(job: Job) -> int:
    """Return the number of parameters of one layer's router, and of this rank's part of its shared expert."""
    model, tp = job.config.model, job.config.parallelism.tensor_parallel_size
    shared = (model.fc1_columns + 1) * model.hidden_size * (model.moe_shared_expert_intermediate_size or 0)
    gate = model.hidden_size * model.moe_shared_expert_gate
    return (model.num_moe_experts or 0) * (model.hidden_size + model.bias) + shared // tp + gate


@dataclass(frozen=True)
class LayerBytes:
    """The activations of one layer for one micro-batch, in bytes."""

    input: int  # the layer's input
    result: int  # attention's out and lse
    attention: int  # what else backward reads of attention: norm, q, keys and values, or kept blocks of other ranks
    qkv: int  # the part of `attention` that the attention call itself reads
    mlp: int  # everything after attention: norm, its input, the MLP
    fc1: int  # the part of `mlp` that is the output of the MLP's first matrix
    norm: int  # what one norm keeps besides its input
    tile: int  # with tiles, the activations of one, which replace the whole MLP's
    rule: int  # what backward of a recurrence needs besides; 0 with attention

    @property
    def total(self) -> int:
        return self.input + self.result + self.attention + self.mlp


def layer_bytes(job: Job, kind: LayerKind) -> LayerBytes:
    """Return the activations of a layer that Megatron saves with this package's attention and torch's norms."""
    experts, recurrent, fp8 = kind
    config, e, tokens = job.config, job.element_bytes, job.tokens
    model, tp, workload = config.model, config.parallelism.tensor_parallel_size, workload_of(config)
    per_sequence = tokens // config.train.micro_batch_size
    hidden = e * job.hidden_tokens * model.hidden_size
    q, kv = (per_sequence * workload.elements(kind) * e for kind in (Kind.Q, Kind.KV))
    # Keys and values are views of the projection without RoPE. So are queries if each has its own key/value head.
    copied = model.position_embedding != "rope" and model.num_kv_heads != model.num_attention_heads
    saved = (1 + copied) * q + kv
    qkv, kept, reads = q + kv, job.passes[0].kept, job.passes[2]
    if kept and reads.isdisjoint((Kind.Q_GRAD, Kind.KV)):  # kept blocks, with their lse, replace the rank's own q, k, v
        saved = qkv = 0
        if model.sinks == "none":
            kept -= per_sequence * (workload.token_bytes(Kind.OUT) - workload.token_bytes(Kind.Q))
        else:  # the gradient of sinks reads the rank's own queries
            saved = qkv = q
    fc1 = e * tokens * model.fc1_columns * model.ffn_hidden_size // tp
    act = e * tokens * model.ffn_hidden_size // tp
    norm = norm_bytes(job, hidden, job.hidden_tokens)
    product_bytes = 1 if fp8 else e  # of an element of a product's input that backward keeps
    normed_input = norm - hidden + hidden * product_bytes // e
    if config.train.fp8 == "delayed":  # the output projection keeps its input in FP8, beside attention's own output
        saved += per_sequence * workload.elements(Kind.OUT)
    if model.latent:  # the cosines and sines that queries and keys were multiplied by are saved as well
        saved += 4 * e * per_sequence * model.rope_channels + e * job.hidden_tokens * model.rope_channels
        for rank, rows in ((model.kv_lora_rank, job.hidden_tokens), (model.q_lora_rank, tokens)):
            if rank is not None:  # Megatron keeps the query latents of all tensor-parallel ranks
                saved += e * rows * rank
                saved += norm_bytes(job, e * job.hidden_tokens * rank, job.hidden_tokens) if model.qk_norm else 0
    elif model.qk_norm:
        saved += sum(size + norm_bytes(job, size, size // (e * model.kv_channels)) for size in (q, kv // 2))
    result = per_sequence * workload.token_bytes(Kind.OUT)
    saved += (q + 4 * q // e) * model.attention_output_gate  # the gated output, and the sigmoid in fp32
    if recurrent:
        result, saved, qkv, kept = 0, recurrent_bytes(job), 0, 0
    post_norms = 2 * norm * model.post_norms  # they keep their input, not their output; both have the same size
    gate = 2 * act if model.fc1_columns == 2 and not (job.fused and model.activation == "swiglu") else 0
    inside, fc1 = expert_bytes(job, product_bytes) if experts else (fc1 + act * product_bytes // e + gate, fc1)
    tile_tokens = config.recompute.mlp_tile_tokens
    return LayerBytes(
        input=hidden,
        result=result,
        attention=normed_input + saved + kept,
        qkv=qkv + kept,
        mlp=hidden + normed_input + post_norms + (inside if tile_tokens is None else 0),
        fc1=fc1,
        norm=norm,
        # The gradient of fc1 comes on top: the last activation has been freed by then.
        tile=0 if tile_tokens is None else (inside + fc1) * min(tile_tokens, tokens) // max(1, tokens),
        rule=recurrence_bytes(job) if recurrent else 0,
    )


def norm_bytes(job: Job, size: int, rows: int) -> int:
    """Return what a norm of `size` bytes keeps besides its input."""
    rms = job.config.model.normalization == "rmsnorm"
    return size + 4 * rows * (1 if rms else 2) + (0 if job.fused or not rms else size)


def expert_bytes(job: Job, product_bytes: int) -> tuple[int, int]:
    """Return the activations of a layer's experts on one rank, and the part that is the output of the first matrix."""
    model, par, e = job.config.model, job.config.parallelism, job.element_bytes
    columns, width = model.fc1_columns, model.expert_width // par.tensor_size_of_experts
    rows = job.hidden_tokens * model.moe_router_topk * par.tensor_size_of_experts  # through the experts of a rank
    fc1 = e * rows * columns * width
    # The input of both matrices. A gate adds its two halves and their product before it is weighted.
    inside = product_bytes * rows * (model.hidden_size + width) + fc1
    if not (job.fused and model.activation == "swiglu"):
        inside += e * rows * width * (3 if columns == 2 else 1)
    routing = job.hidden_tokens * (model.num_moe_experts or 0) * 4
    shared = (model.moe_shared_expert_intermediate_size or 0) // par.tensor_parallel_size
    if model.moe_shared_expert_gate:  # both factors of the product
        inside += e * job.hidden_tokens * (model.hidden_size + 1)
    return inside + routing + e * job.tokens * shared * (columns + (3 if columns == 2 else 1)), fc1


def recurrent_bytes(job: Job) -> int:
    """Return what a recurrent layer keeps between the layer's norm and its output."""
    model, e, tp = job.config.model, job.element_bytes, job.config.parallelism.tensor_parallel_size
    mixed, values = model.recurrent_columns
    heads, key_heads = model.linear_num_value_heads or 0, model.linear_num_key_heads or 0
    key, value = model.linear_key_head_dim or 0, model.linear_value_head_dim or 0
    keys, state, mamba, kimi = heads * key, 4 if job.fused else 8, "M" in model.mixers, "K" in model.mixers
    whole = 2 * e * value * kimi  # of a token, what all tensor-parallel ranks keep: the low ranks
    constant = mixed * (model.linear_conv_kernel_dim - 1) * e
    continued = job.config.parallelism.context_parallel_size > 1  # a rank reads the state that enters
    if mamba:
        # Both sides of the convolution, B and C of every head, x, x times the step, gates, what the projection reads.
        row = e * (2 * mixed + 2 * keys + 4 * values) + 4 * (3 * heads + key_heads)
        row += 4 * values * (4 if e == 4 else 5)  # outputs, gates, their product, the normed product
        row += continued * state * (keys + heads)
        constant += keys * value * state + 8 * heads
    elif job.fused and e == 2:  # fla-core's kernels: inputs of both, a chunk's system, what norm and product read
        row = e * (2 * mixed + 3 * values + CHUNK * heads) + 4 * (5 * heads + 2 * key_heads)
        row += (e * (CHUNK * heads + keys) - 12 * heads) * kimi  # a matrix of a chunk more; decays are computed again
        constant += 4 * keys * value
    else:
        row = e * (3 * mixed + 2 * keys + values) + 4 * (4 * heads + 2 * key_heads)
        row += (12 * (keys - heads) - e * values) * kimi  # decays of channels; a sigmoid keeps its output alone
        # In fp32: what the norm reads and, unless it is one kernel, its result; the gates and both factors.
        row += 2 * e * values + 4 * values * (3 if job.fused else 4) + 4 * heads + (0 if e == 4 else 4 * values)
        row += continued * keys * (state + e)
        constant += keys * (continued * key + value) * state + 8 * heads
    return (job.tokens * row + constant * job.config.train.micro_batch_size) // tp + job.tokens * whole


def recurrence_bytes(job: Job) -> int:
    """Return what backward of a recurrence needs besides its arguments.

    On CPUs, chunks of 64 tokens are computed again in fp64: for the delta rule about 8 matrices of a chunk, 13 of its
    keys and 4 of its values, for Mamba-2 fewer, for decays of channels more keys. On GPUs gradients, corrections, and a
    state for each chunk; for K and M that is an estimate.
    """
    model, e = job.config.model, job.element_bytes
    keys, values = model.linear_key_head_dim or 0, model.linear_value_head_dim or 0
    chunks, of_keys, of_values = {"M": (6, 8, 2), "K": (4, 38, 5)}.get(max(model.mixers), (8, 13, 4))
    row = (
        e * (4 * keys + 4 * values + 2 * keys * values // CHUNK)
        if job.fused
        else 8 * (chunks * CHUNK + of_keys * keys + of_values * values)
    )
    return job.tokens * (model.linear_num_value_heads or 0) // job.config.parallelism.tensor_parallel_size * row


@dataclass(frozen=True)
class AttentionBytes:
    """The memory of attention besides saved activations, in bytes."""

    buffers: int  # received blocks; allocated between calls, and shared by all layers
    published: int  # memory that peers read, outside torch's caching allocator
    backward: int  # the most that one backward call needs besides these, including its inputs


def attention_bytes(job: Job) -> AttentionBytes:
    """Return the memory of attention, read from the recordings of the configured mode."""
    forward, backward, _ = job.passes
    over_peers, sent = job.target.over_peers, max(forward.sent, backward.sent)
    return AttentionBytes(
        buffers=max(forward.buffers, backward.buffers) + (0 if over_peers else sent),
        published=sent if over_peers else 0,
        backward=backward.inputs + forward.kept + backward.results,
    )
