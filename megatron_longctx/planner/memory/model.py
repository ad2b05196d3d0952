"""The peak memory of a rank in a training step, term by term.

A step needs its resident memory (weights, gradients, optimizer, buffers) and the memory of one of three phases: the
loss, with the kept activations of all layers; the backward pass of the last layer, which recomputing modes start by
restoring all activations of that layer; the optimizer step. The largest phase is the peak. Bytes count live
tensors and kernel workspaces. The caching allocator reserves more, and memory that peers read is outside it.
"""

from dataclasses import dataclass, replace

from .shapes import (
    AttentionBytes,
    Job,
    LayerBytes,
    attention_bytes,
    embedding_weights,
    layer_bytes,
    mlp_weights,
    stage_experts,
    stage_layers,
    stage_parameters,
)

READ_BY_PEERS = "what peers read"
OFFLOAD = "attention_output+offload"
STATES_PIECE = 2**26
"""The number of parameters, rounded up to whole tensors, whose optimizer states come to the device together with
`optim.states_on_host`. The device holds three such pieces: one that arrives, one that is updated, one that leaves."""


@dataclass(frozen=True)
class Term:
    """One part of the memory; `per_token` if it grows with the tokens of a rank."""

    name: str
    num_bytes: int
    per_token: bool = False


@dataclass(frozen=True)
class Phase:
    """A phase of the step, with the memory that it needs besides the resident memory."""

    name: str
    terms: tuple[Term, ...]

    @property
    def num_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)


@dataclass(frozen=True)
class Prediction:
    """The memory of a rank of the pipeline stage that needs most."""

    stage: int
    tokens: int  # of a micro-batch, on the rank that has most of them
    resident: tuple[Term, ...]
    phases: tuple[Phase, ...]
    host_bytes: int  # pinned host memory (CUDA) of a rank of the stage that needs most of that

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.num_bytes)

    @property
    def resident_bytes(self) -> int:
        return sum(term.num_bytes for term in self.resident)

    @property
    def num_bytes(self) -> int:
        """The peak of live tensors on the device."""
        return self.resident_bytes + self.peak.num_bytes

    @property
    def allocated_bytes(self) -> int:
        """The part of the peak in torch's caching allocator, which `mem/peak_active_gib` of a run counts."""
        return self.num_bytes - sum(term.num_bytes for term in self.resident if term.name == READ_BY_PEERS)

    @property
    def terms(self) -> tuple[Term, ...]:
        """All terms of the peak."""
        return (*self.resident, *self.peak.terms)


def predict(job: Job) -> Prediction:
    """Predict the peak of the rank that needs most. Refuse `parallelism.schedule=auto`, and an impossible plan."""
    attention = attention_bytes(job)
    stages = [_stage(job, stage, attention) for stage in range(job.config.parallelism.pipeline_parallel_size)]
    largest = max(stages, key=lambda each: each.num_bytes)
    return replace(largest, host_bytes=max(each.host_bytes for each in stages))


def checkpoint_bytes(job: Job) -> int:
    """Return the host memory of a rank for its share of a checkpoint that is written while training continues.

    It holds weights and, in fp32, a main copy of them and two moments. Ranks with the same parameters share them.
    """
    par, shares = job.config.parallelism, 1
    if not job.config.optim.distributed:
        shares = job.data_parallel_size * par.context_parallel_size
    parameters = max(own_parameters(job, stage) for stage in range(par.pipeline_parallel_size))
    return -(-parameters * (job.element_bytes + 12) // shares)


def _stage(job: Job, stage: int, attention: AttentionBytes) -> Prediction:
    kinds = [(layer_bytes(job, kind), count) for kind, count in job.kinds(stage).items()]
    layer = max((each for each, _ in kinds), key=lambda each: each.total)
    kept = _kept(job, stage, kinds)
    backwards = [Phase("backward of a layer", (*kept, *_layer_backward(job, each, attention))) for each, _ in kinds]
    phases = [max(backwards, key=lambda phase: phase.num_bytes)]
    if stage == job.config.parallelism.pipeline_parallel_size - 1:
        loss = (*kept, *_loss(job, layer))
        if job.config.recompute.mode == OFFLOAD and stage == 0:  # Megatron's forward refers to them until it returns
            loss = (*loss, Term("embeddings", layer.input, per_token=True))
        phases.append(Phase("loss", loss))
    phases.append(Phase("optimizer step", _optimizer_step(job, stage)))
    resident = _resident(job, stage, attention)
    return Prediction(stage, job.tokens, resident, tuple(phases), _host_bytes(job, stage, kinds))


def own_parameters(job: Job, stage: int) -> int:
    """Return the number of parameters that this rank's optimizer updates."""
    par = job.config.parallelism
    if not job.config.optim.distributed:
        return stage_parameters(job, stage)
    shards, experts = job.data_parallel_size * par.context_parallel_size, stage_experts(job, stage)
    own = -(-(stage_parameters(job, stage) - experts) // shards)
    expert_ranks = par.tensor_size_of_experts * par.expert_model_parallel_size
    return own + -(-experts * expert_ranks // (shards * par.tensor_parallel_size))


def _optimizer_step(job: Job, stage: int) -> tuple[Term, ...]:
    own, terms = own_parameters(job, stage), []
    if job.config.optim.states_on_host:
        # Each of three consecutive pieces may end with a whole matrix, and one of these may be the embedding.
        own = min(own, 3 * STATES_PIECE + embedding_weights(job) + 2 * mlp_weights(job)[0])
        terms.append(Term("optimizer states not on the host (fp32)", own * _state_bytes(job)))
    elif _makes_moments(job):
        terms.append(Term("Adam's moments (fp32)", 8 * own))
    if job.config.model.implementation != "transformer_engine":  # its Adam works in place; torch's does not
        terms.append(Term("temporaries of Adam", 4 * own))
    if job.config.train.fp8_param:  # Megatron rounds all main parameters to bf16 before it quantizes them
        in_fp8 = own_parameters(job, stage) * stage_layers(job, stage, fp8=True) // stage_parameters(job, stage)
        terms.append(Term("main parameters in bf16", 2 * in_fp8))
    return tuple(terms)


def _state_bytes(job: Job) -> int:
    """Return the bytes of Adam's two moments of a parameter and, for bf16 weights, of its main copy; all in fp32."""
    return 8 + (4 if job.element_bytes == 2 else 0)


def _makes_moments(job: Job) -> bool:
    """Whether the run ends with its first step, at whose end Adam allocates its moments."""
    return job.config.train.steps == 1


def _resident(job: Job, stage: int, attention: AttentionBytes) -> tuple[Term, ...]:
    parameters, model = stage_parameters(job, stage), job.config.model
    in_fp8 = stage_layers(job, stage, fp8=True)
    terms = [
        Term("weights", (parameters - in_fp8 * job.config.train.fp8_param) * job.element_bytes),
        Term("gradients (fp32)", parameters * 4),
        Term("attention's buffers", attention.buffers, per_token=True),
    ]
    if in_fp8:  # in the order of both operands of products
        terms.append(Term("weights in FP8", 2 * in_fp8))
    if not job.config.optim.states_on_host:
        state = _state_bytes(job) - (8 if _makes_moments(job) else 0)
        terms.append(Term("optimizer state (fp32)", own_parameters(job, stage) * state))
    if attention.published:
        terms.append(Term(READ_BY_PEERS, attention.published, per_token=True))
    if model.position_embedding == "rope":
        rope = 4 * job.tokens // job.config.train.micro_batch_size * model.rope_channels
        terms.append(Term("RoPE table (fp32)", rope, per_token=True))
    if job.config.parallelism.uses_sequence_parallel:  # Megatron's buffer for what tensor-parallel ranks gather
        gathered = job.element_bytes * job.tokens * model.hidden_size
        terms.append(Term("sequence-parallel gather", gathered, per_token=True))
    return tuple(terms)


def _kept(job: Job, stage: int, kinds: list[tuple[LayerBytes, int]]) -> tuple[Term, ...]:
    """Return what all layers keep from forward to backward, for all micro-batches in flight.

    `kinds` are the stage's kinds of layers, with the number of each.
    """
    count, mode = job.num_layers * job.in_flight(stage), job.config.recompute.mode
    layer = kinds[0][0]
    results, attention, mlps = (
        job.in_flight(stage) * sum(getattr(each, part) * layers for each, layers in kinds)
        for part in ("result", "attention", "mlp")
    )
    results, share = int(job.kept_results * results), job.kept_results
    if mode == OFFLOAD:
        # The layer run in use and the next one, which is being fetched. Stages also hold the inputs that they received.
        on_device, received = min(count, 2), job.in_flight(stage) if stage else 0
        return (
            Term("layer inputs not on the host", (on_device + received) * layer.input, per_token=True),
            Term(
                "attention results not on the host",
                int(share * on_device * max(each.result for each, _ in kinds)),
                per_token=True,
            ),
        )
    terms = [Term("layer inputs", count * layer.input, per_token=True)]
    if mode in ("none", "attention_output"):
        terms.append(Term("attention results", results, per_token=True))
    if mode == "none":
        terms.append(Term("other activations of attention", attention, per_token=True))
        terms.append(Term("activations of the MLP", mlps, per_token=True))
    return tuple(terms)


def _layer_backward(job: Job, layer: LayerBytes, attention: AttentionBytes) -> tuple[Term, ...]:
    """Return what the backward pass of one layer needs besides `_kept`."""
    mode = job.config.recompute.mode
    recomputed = layer.total - layer.input - (0 if mode == "layer" else int(job.kept_results * layer.result))
    terms = (Term("activations of one layer, recomputed", recomputed, per_token=True),) if mode != "none" else ()
    # Within attention, the call's own tensors replace what forward kept for it, and the MLP's are freed.
    mixer = Term("gradients inside attention", attention.backward - layer.mlp - layer.result - layer.qkv, True)
    if layer.rule:
        mixer = Term("gradients inside the recurrence", layer.rule - layer.mlp, True)
    inside = max(_mlp_backward(job, layer), (mixer,), key=lambda parts: sum(term.num_bytes for term in parts))
    return (*terms, Term("gradients of hidden states", 2 * layer.input, per_token=True), *inside)


def _mlp_backward(job: Job, layer: LayerBytes) -> tuple[Term, ...]:
    first, second = mlp_weights(job)
    if job.config.recompute.mlp_tile_tokens is not None:
        return (
            Term("gradient of the MLP's input", layer.input, per_token=True),
            Term("a tile of the MLP", layer.tile),
            Term("gradients of the MLP's weights", (first + second) * (4 + job.element_bytes)),
        )
    # The gradient of the first output, besides that output. The activation has been freed by then.
    return (
        Term("gradients inside the MLP", layer.fc1, per_token=True),
        Term("gradient of a weight", first * job.element_bytes),
    )


def _loss(job: Job, layer: LayerBytes) -> tuple[Term, ...]:
    """Return the memory of the final norm, the LM head and the cross-entropy."""
    model, e, tokens = job.config.model, job.element_bytes, job.tokens
    vocabulary = job.vocab_size // job.config.parallelism.tensor_parallel_size
    weight = vocabulary * model.hidden_size
    # Of all tokens, and with sequence parallelism also of this rank's.
    grad_hidden = e * tokens * model.hidden_size
    if job.config.parallelism.uses_sequence_parallel:
        grad_hidden += layer.input
    norm = Term("final norm", layer.input + layer.norm, per_token=True)
    per_logit = 4 + (e if e < 4 else 0)  # softmax in fp32 and, in bf16, the logits or their gradient
    chunk = job.config.recompute.head_chunk_tokens
    if chunk is None:
        fused = 4 if job.fused and e < 4 else 0  # Megatron's fused cross-entropy copies the logits to fp32 first
        forward = tokens * vocabulary * (per_logit + fused)
        backward = tokens * vocabulary * e + weight * e + grad_hidden
        return norm, Term("logits", max(forward, backward), per_token=True)
    return (
        norm,
        Term("logits of a chunk", min(chunk, tokens) * vocabulary * per_logit),
        Term("gradient of the LM head", weight * (4 + e)),
        Term("gradient of hidden states", layer.input, per_token=True),
    )


def _host_bytes(job: Job, stage: int, kinds: list[tuple[LayerBytes, int]]) -> int:
    """Return the host memory of optimizer states and of offloaded layer inputs and attention results.

    The latter are in buffers of `recompute.HostStore`, whose sizes are powers of two.
    """
    states = own_parameters(job, stage) * _state_bytes(job) if job.config.optim.states_on_host else 0
    if job.config.recompute.mode != OFFLOAD:
        return states
    share, heads = job.kept_results, job.config.model.num_attention_heads
    lse = 4 * job.tokens * heads // job.config.parallelism.tensor_parallel_size
    results = [(int(share * (each.result - lse)), int(share * lse)) if each.result else () for each, _ in kinds]
    parts = [((each.input, *result), count) for (each, count), result in zip(kinds, results, strict=True)]
    pinned: int = sum(count * sum(1 << max(0, size - 1).bit_length() for size in sizes) for sizes, count in parts)
    return states + job.in_flight(stage) * pinned
