"""Peak memory of a rank in a training step, term by term.

A step's memory is what always lies there (weights, gradients, optimizer, buffers) and, beside it, what one of these
phases needs: the loss, with all layers' activations kept; the backward of the last layer, which in the recomputing
modes comes with all of that layer's activations; the optimizer's step. The largest phase is the peak. Bytes are those
of live tensors and kernels' workspaces: the caching allocator reserves more. What peers read is outside of it.
"""

from __future__ import annotations

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
    stage_parameters,
)

READ_BY_PEERS = "what peers read"
OFFLOAD = "attention_output+offload"
STATES_PIECE = 2**26
"""Parameters whose optimizer states come to the device together, and at least one, with `optim.states_on_host`. Of
three such pieces states are there at a time: one is stepped, one comes, one leaves."""


@dataclass(frozen=True)
class Term:
    """Something that takes `num_bytes`; `per_token` where it grows with the tokens of a rank."""

    name: str
    num_bytes: int
    per_token: bool = False


@dataclass(frozen=True)
class Phase:
    """A part of the step, and what lies there in it besides what always does."""

    name: str
    terms: tuple[Term, ...]

    @property
    def num_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)


@dataclass(frozen=True)
class Prediction:
    """Of the pipeline stage that needs most. `host_bytes`: of pinned memory (CUDA) that a rank of the stage that needs
    most of it holds on its host."""

    stage: int
    tokens: int
    always: tuple[Term, ...]
    phases: tuple[Phase, ...]
    host_bytes: int

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.num_bytes)

    @property
    def always_bytes(self) -> int:
        return sum(term.num_bytes for term in self.always)

    @property
    def num_bytes(self) -> int:
        """Most bytes of live tensors on the device."""
        return self.always_bytes + self.peak.num_bytes

    @property
    def allocated_bytes(self) -> int:
        """Those of them that torch's caching allocator knows of, and `mem/peak_active_gib` of a run counts."""
        return self.num_bytes - sum(term.num_bytes for term in self.always if term.name == READ_BY_PEERS)

    @property
    def terms(self) -> tuple[Term, ...]:
        """Everything that lies there at the peak."""
        return (*self.always, *self.peak.terms)


def predict(job: Job) -> Prediction:
    """The peak of the rank that needs most.

    Raises:
        ValueError: `parallelism.schedule=auto`, or a plan that cannot be built.
    """
    attention = attention_bytes(job)
    stages = range(job.config.parallelism.pipeline_parallel_size)
    found = [_stage(job, stage, attention) for stage in stages]
    most = max(found, key=lambda each: each.num_bytes)
    return replace(most, host_bytes=max(each.host_bytes for each in found))


def saved_bytes(job: Job) -> int:
    """Of host memory that a rank copies its share of a checkpoint to, where that is written beside training: weights,
    and in fp32 a main copy of them and two moments, over all that have the same."""
    par, shares = job.config.parallelism, 1
    if not job.config.optim.distributed:
        shares = job.data_parallel_size * par.context_parallel_size
    most = max(_own_parameters(job, stage) for stage in range(par.pipeline_parallel_size))
    return -(-most * (job.element_bytes + 12) // shares)


def _stage(job: Job, stage: int, attention: AttentionBytes) -> Prediction:
    of_experts = job.expert_layers(stage)
    kinds = {
        experts: (layer_bytes(job, experts), count)
        for experts, count in ((False, job.num_layers - of_experts), (True, of_experts))
        if count
    }
    layer = max((found for found, _ in kinds.values()), key=lambda found: found.total)
    mlps = sum(found.mlp * count for found, count in kinds.values())
    kept = _kept(job, stage, layer, mlps)
    phases = [Phase("backward of a layer", (*kept, *_layer_backward(job, layer, attention)))]
    if stage == job.config.parallelism.pipeline_parallel_size - 1:
        loss = (*kept, *_loss(job, layer))
        if job.config.recompute.mode == OFFLOAD and stage == 0:  # Megatron's forward holds them to its end
            loss = (*loss, Term("embeddings", layer.input, per_token=True))
        phases.append(Phase("loss", loss))
    phases.append(Phase("optimizer step", _optimizer_step(job, stage)))
    return Prediction(stage, job.tokens, _always(job, stage, attention), tuple(phases), _host_bytes(job, stage, layer))


def _own_parameters(job: Job, stage: int) -> int:
    """Parameters that this rank's optimizer updates."""
    par = job.config.parallelism
    if not job.config.optim.distributed:
        return stage_parameters(job, stage)
    shards, experts = job.data_parallel_size * par.context_parallel_size, stage_experts(job, stage)
    own = -(-(stage_parameters(job, stage) - experts) // shards)
    held = par.tensor_size_of_experts * par.expert_model_parallel_size
    return own + -(-experts * held // (shards * par.tensor_parallel_size))


def _optimizer_step(job: Job, stage: int) -> tuple[Term, ...]:
    own, terms = _own_parameters(job, stage), []
    if job.config.optim.states_on_host:
        # Of three pieces in a row, each of which may end with a matrix, one may have the embedding.
        own = min(own, 3 * STATES_PIECE + embedding_weights(job) + 2 * mlp_weights(job)[0])
        terms.append(Term("optimizer states not on the host (fp32)", own * _state_bytes(job)))
    elif _makes_moments(job):
        terms.append(Term("Adam's moments (fp32)", 8 * own))
    if job.config.model.implementation != "transformer_engine":  # whose Adam works in place; torch's does not
        terms.append(Term("temporaries of Adam", 4 * own))
    return tuple(terms)


def _state_bytes(job: Job) -> int:
    """Of a parameter: Adam's two moments, and beside bf16 weights a main copy of them; all in fp32."""
    return 8 + (4 if job.element_bytes == 2 else 0)


def _makes_moments(job: Job) -> bool:
    """Whether the run's peak is that of its first step, at whose end Adam makes its moments."""
    return job.config.train.steps == 1


def _always(job: Job, stage: int, attention: AttentionBytes) -> tuple[Term, ...]:
    parameters, model = stage_parameters(job, stage), job.config.model
    terms = [
        Term("weights", parameters * job.element_bytes),
        Term("gradients (fp32)", parameters * 4),
        Term("attention's buffers", attention.buffers, per_token=True),
    ]
    if not job.config.optim.states_on_host:
        state = _state_bytes(job) - (8 if _makes_moments(job) else 0)
        terms.append(Term("optimizer state (fp32)", _own_parameters(job, stage) * state))
    if attention.published:
        terms.append(Term(READ_BY_PEERS, attention.published, per_token=True))
    if model.position_embedding == "rope":
        rope = 4 * job.tokens // job.config.train.micro_batch_size * model.rope_channels
        terms.append(Term("RoPE table (fp32)", rope, per_token=True))
    if job.config.parallelism.uses_sequence_parallel:  # Megatron's buffer for what tensor-parallel ranks gather
        gathered = job.element_bytes * job.tokens * model.hidden_size
        terms.append(Term("sequence-parallel gather", gathered, per_token=True))
    return tuple(terms)


def _kept(job: Job, stage: int, layer: LayerBytes, mlps: int) -> tuple[Term, ...]:
    """What lies there between forward and backward, of all layers and micro-batches in flight. mlps: of all layers."""
    count, mode = job.num_layers * job.in_flight(stage), job.config.recompute.mode
    if mode == OFFLOAD:
        # The run of a layer in use and the one fetched ahead. Pipelines hold what a stage was sent for its gradient.
        here, sent = min(count, 2), job.in_flight(stage) if stage else 0
        return (
            Term("layer inputs not on the host", (here + sent) * layer.input, per_token=True),
            Term("attention results not on the host", here * layer.result, per_token=True),
        )
    terms = [Term("layer inputs", count * layer.input, per_token=True)]
    if mode == "none":
        terms += [
            Term("attention results", count * layer.result, per_token=True),
            Term("other activations of attention", count * layer.attention, per_token=True),
            Term("activations of the MLP", job.in_flight(stage) * mlps, per_token=True),
        ]
    elif mode == "attention_output":
        terms.append(Term("attention results", count * layer.result, per_token=True))
    return tuple(terms)


def _layer_backward(job: Job, layer: LayerBytes, attention: AttentionBytes) -> tuple[Term, ...]:
    """What backward through one layer needs beside what `_kept` counts."""
    mode = job.config.recompute.mode
    recomputed = layer.total - layer.input - (0 if mode == "layer" else layer.result)
    terms = (Term("activations of one layer, recomputed", recomputed, per_token=True),) if mode != "none" else ()
    # In attention: the call's own tensors in the place of what forward kept of it, and nothing of the MLP.
    in_attention = Term("gradients inside attention", attention.backward - layer.mlp - layer.result - layer.qkv, True)
    inside = max(_mlp_backward(job, layer), (in_attention,), key=lambda parts: sum(term.num_bytes for term in parts))
    return (*terms, Term("gradients of hidden states", 2 * layer.input, per_token=True), *inside)


def _mlp_backward(job: Job, layer: LayerBytes) -> tuple[Term, ...]:
    first, second = mlp_weights(job)
    if job.config.recompute.mlp_tile_tokens is not None:
        return (
            Term("gradient of the MLP's input", layer.input, per_token=True),
            Term("a tile of the MLP", layer.tile),
            Term("gradients of the MLP's weights", (first + second) * (4 + job.element_bytes)),
        )
    # The gradient of the MLP's first output beside that output, whose activation is freed by then.
    return (
        Term("gradients inside the MLP", layer.fc1, per_token=True),
        Term("gradient of a weight", first * job.element_bytes),
    )


def _loss(job: Job, layer: LayerBytes) -> tuple[Term, ...]:
    """The final norm, the LM head and its cross-entropy."""
    model, e, tokens = job.config.model, job.element_bytes, job.tokens
    vocabulary = job.vocab_size // job.config.parallelism.tensor_parallel_size
    weight = vocabulary * model.hidden_size
    # Of all tokens, and with sequence parallelism beside it of this rank's.
    grad_hidden = e * tokens * model.hidden_size
    if job.config.parallelism.uses_sequence_parallel:
        grad_hidden += layer.input
    norm = Term("final norm", layer.input + layer.norm, per_token=True)
    per_logit = 4 + (e if e < 4 else 0)  # softmax in fp32; beside it the logits, or their gradient, in bf16
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


def _host_bytes(job: Job, stage: int, layer: LayerBytes) -> int:
    """Of optimizer states, and of layers' inputs and attention's results: buffers of `recompute.HostStore`, whose sizes
    are powers of two."""
    states = _own_parameters(job, stage) * _state_bytes(job) if job.config.optim.states_on_host else 0
    if job.config.recompute.mode != OFFLOAD:
        return states
    lse = 4 * job.tokens * job.config.model.num_attention_heads // job.config.parallelism.tensor_parallel_size
    pinned = sum(1 << max(0, size - 1).bit_length() for size in (layer.input, layer.result - lse, lse))
    return states + job.num_layers * job.in_flight(stage) * pinned
