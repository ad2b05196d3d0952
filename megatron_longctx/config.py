"""The typed configuration tree and its only validation.

Recipes (`recipes/*.yaml`, composed by Hydra) fill these dataclasses; `validate` refuses what cannot run, before any
rank starts. Lengths are in tokens, sizes in ranks, memory in GiB, times in seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEDULES = ("ring", "zigzag", "striped", "helper", "double_ring", "tasp", "all_gather", "ulysses", "usp")
OUTER_SCHEDULES = ("ring", "zigzag", "helper", "double_ring", "tasp", "all_gather")
TRANSPORTS = ("auto", "peer", "p2p")
KERNELS = ("auto", "cudnn", "flash_attn", "flash", "cpu", "reference")
RECOMPUTES = ("none", "layer", "attention_output", "attention_output+offload")
REDUCTIONS = ("none", "int8", "int6", "int4", "auto")
REDUCTION_TRANSPORTS = ("auto", "peer", "collective")
PRECISIONS = ("fp32", "bf16")
DEVICES = ("auto", "cpu", "cuda")
CACHE_MODES = ("auto", "pass_kv", "pass_q", "one_hop")
DECODES = ("auto", "replicated", "plan")
CUDA_GRAPHS = ("auto", "true", "false")
CACHE_RULES = ("auto", "simulate", "algorithm_1", "algorithm_5", "empirical", "bytes")
WANDB_MODES = ("offline", "online", "disabled")
TOKENIZERS = ("byte-level", "huggingface", "sentencepiece", "tiktoken", "megatron")
# Names that users of other systems try; the message says what ours is called.
_ALIASES = {"allgather": "all_gather", "all-gather": "all_gather", "p2p": "ring", "head_tail": "zigzag"}


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a GPT. `vocab_size: null` takes the tokenizer's, rounded up to `vocab_multiple`."""

    name: str = "tiny"
    num_layers: int = 4
    hidden_size: int = 128
    num_attention_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None  # null: hidden_size / num_attention_heads
    ffn_hidden_size: int = 384
    vocab_size: int | None = None
    vocab_multiple: int = 128
    normalization: str = "rmsnorm"  # rmsnorm | layernorm
    norm_epsilon: float = 1e-5
    activation: str = "swiglu"  # swiglu | gelu
    position_embedding: str = "rope"  # rope | learned
    rope_base: float = 500_000.0
    bias: bool = False
    tie_embeddings: bool = False
    init_std: float = 0.02
    # Whose layers surround our attention: auto (TransformerEngine's on GPUs where installed, else Megatron's local)
    implementation: str = "auto"  # auto | local | transformer_engine

    @property
    def kv_channels(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


@dataclass(frozen=True)
class ParallelismConfig:
    """How ranks are divided. `data_parallel_size: null` takes what remains of the world."""

    context_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int | None = None
    sequence_parallel: bool = True  # only has an effect when tensor_parallel_size > 1
    # ... or auto: what the simulator finds fastest, from a calibration (`megatron-longctx bench calibrate`) or, where
    # there is none, from what `cluster` says.
    schedule: str = "zigzag"  # ring | zigzag | striped | helper | double_ring | tasp | all_gather | ulysses | usp
    # all_gather only: most remote K/V tokens one rank may hold at once; null: all of them, in one group.
    max_buffer_tokens: int | None = None
    # double_ring: ranks of an inner ring; usp: ranks that share the heads. null: a node of `cluster`, or the largest
    # proper divisor of context_parallel_size up to 8.
    inner_size: int | None = None
    max_attention_gib: float | None = None  # auto only: most memory of one attention call on a rank; null: no bound
    outer_schedule: str = "zigzag"  # usp only: the mode between its groups (any of the above but striped and ulysses)
    # How ranks are linked: a name in recipes/cluster or a file of that form. tasp chooses its rings by it. null: every
    # pair of ranks has a link of its own.
    cluster: str | None = None
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    timeout_s: float = 600.0  # a collective that waits longer fails the job

    @property
    def model_parallel_size(self) -> int:
        return self.context_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def uses_sequence_parallel(self) -> bool:
        return self.sequence_parallel and self.tensor_parallel_size > 1


@dataclass(frozen=True)
class AttentionConfig:
    kernel: str = "auto"  # auto | cudnn | flash_attn | flash | cpu | reference
    deterministic: bool = False
    # How blocks travel: peer (pulled out of peers' memory by the copy engine), p2p (batched messages of NCCL or gloo),
    # auto (peer where all ranks of the group can, both where only some can, else p2p, saying which and why)
    transport: str = "auto"
    # Over peer memory, attention with at most so many tokens a rank is replayed from CUDA graphs; 0: never
    graph_tokens: int = 4096
    # In inference keys and values travel between context-parallel ranks as 8-bit integers, with a scale for every token
    # and head: half the bytes of bf16, and not exact. Training is not touched.
    kv_int8: bool = False


@dataclass(frozen=True)
class RecomputeConfig:
    """What is kept between forward and backward, the rest being computed again.

    none: all activations. layer: each layer's input (Megatron's full recompute). attention_output: each layer's input
    and what attention gave, so that attention runs once. attention_output+offload: what attention gave waits in host
    memory.
    """

    mode: str = "none"  # none | layer | attention_output | attention_output+offload
    # Most tokens (times sequences) of a rank whose logits exist at once, forward and again in backward. null: all.
    head_chunk_tokens: int | None = None
    # Most tokens (times sequences) of a rank that pass through an MLP at once; its activations are then not kept, but
    # computed again in backward. null: all.
    mlp_tile_tokens: int | None = None


@dataclass(frozen=True)
class ReductionConfig:
    """How the outputs of row-parallel layers are summed over tensor-parallel ranks: as they are, or as integers (Flash
    Communication), which is faster on slow links and not exact. In inference only, unless `in_training`."""

    output_projection: str = "none"  # of attention: none | int8 | int6 | int4 | auto (int8 where measured faster)
    down_projection: str = "none"  # of the MLP, whose outliers make it the harder one: the same choice
    group_size: int = 128  # neighbouring values that share a range: 32 | 64 | 128
    symmetric: bool = False  # ranges around zero
    min_kib: float = 64.0  # smaller tensors are summed as they are
    in_training: bool = False  # forward; gradients pass as through the exact sum
    # Over what integers travel: peer (GPUs of one host write each other's memory), collective (all-to-all and
    # all-gather of the process group), auto (peer where it can be had).
    transport: str = "auto"


@dataclass(frozen=True)
class DataConfig:
    """Megatron indexed data: `<prefix>.bin` and `<prefix>.idx`, as `megatron-longctx data` writes them."""

    prefix: str = "data/stdlib"
    seq_length: int = 4096
    tokenizer: str = "byte-level"  # byte-level | huggingface | sentencepiece | tiktoken | megatron
    tokenizer_path: str | None = None  # needed by all but byte-level
    split: str = "100,0,0"
    mask_eod_loss: bool = False


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 3e-4
    min_lr: float = 3e-5
    warmup_steps: int = 10
    decay_steps: int | None = None  # null: train.steps
    decay_style: str = "cosine"  # cosine | linear | constant
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    distributed: bool = True  # Megatron's distributed optimizer: states sharded over dp x cp


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 20
    global_batch_size: int = 1  # sequences per step, over all data-parallel ranks
    micro_batch_size: int = 1  # sequences per forward pass of one data-parallel rank
    precision: str = "bf16"  # fp32 | bf16
    device: str = "auto"  # auto | cpu | cuda
    check_memory: bool = True  # on GPUs: refuse a run that is predicted not to fit, warn where it will be close
    seed: int = 1234
    save: bool = True  # checkpoint at the end and when stopped
    save_interval: int | None = None  # steps; null: only at the end and when stopped
    keep_checkpoints: int | None = None  # null: all
    num_processes: int | None = None  # ranks started on this host; null: one per GPU, or the smallest that fits on CPU


@dataclass(frozen=True)
class InferenceConfig:
    """`megatron-longctx generate` and `serve`. Sampling: see `inference.sampling.Sampling`."""

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0: the likeliest token
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    # How the ranks share attention over the cache: auto | pass_kv | pass_q | one_hop
    mode: str = "auto"
    # What mode=auto goes by: auto | simulate | algorithm_1 | algorithm_5 | empirical | bytes. auto: simulate where
    # a calibration (`bench calibrate … attention.transport=p2p`) or else parallelism.cluster says how ranks are linked,
    # else bytes.
    rule: str = "auto"
    # How batches of single new tokens are computed. replicated: the whole model for all of them on every rank, but
    # attention by each rank over what it holds of the cache, with one exchange of partial results a layer. plan: as any
    # other batch, by `mode`. auto: replicated up to 128 sequences, unless `mode` names a way.
    decode: str = "auto"
    # Replicated steps are replayed from CUDA graphs: auto (where that is possible, else it says why not) | true | false
    cuda_graphs: str = "auto"
    page_tokens: int = 64
    # The cache of all context-parallel ranks together; null: data.seq_length + max_new_tokens.
    cache_tokens: int | None = None
    prefill_chunk: int | None = None  # most new tokens of a sequence computed at once; null: all
    evict: bool = False  # a full cache forgets idle sessions, which are computed again, instead of refusing
    # A file with a Jinja template for chats; null: the tokenizer's own, else plain text, a message a line.
    chat_template: str | None = None
    # A prompt gets bit for bit the same logits whether its beginning is found in the cache or not: only whole chunks of
    # prefill_chunk from its first token on are reused, and prompts are computed one by one. false: all that is found.
    exact_reuse: bool = False

    def __post_init__(self) -> None:
        # `true`, read as a truth value, becomes the text `True`.
        object.__setattr__(self, "cuda_graphs", self.cuda_graphs.lower())


@dataclass(frozen=True)
class ServeConfig:
    """`megatron-longctx serve`. An API key comes from the environment: MEGATRON_LONGCTX_API_KEY."""

    host: str = "127.0.0.1"  # any other than this host's own needs a key
    port: int = 8000  # 0: any free one
    max_active: int = 16  # sequences computed together
    max_waiting: int = 64  # requests at once, those that are computed included; more are answered 429
    max_connections: int = 128
    max_body_bytes: int = 16 * 2**20
    timeout_s: float = 30.0  # for a client to send a request's head, and then its body; to keep silent; not to read
    keep_sessions: int = 16  # finished or cancelled sequences whose caches are kept for prompts that begin with them


@dataclass(frozen=True)
class LoggingConfig:
    wandb: str = "offline"  # offline | online | disabled
    wandb_project: str = "megatron-longctx"
    peak_tflops: float | None = None  # per GPU, dense, for MFU; null: looked up by device name
    profile_step: int | None = None  # rank 0 profiles this step into runs/<name>/profile; null: none


@dataclass(frozen=True)
class RunConfig:
    name: str = "default"
    root: str = "runs"


@dataclass(frozen=True)
class Config:
    """Everything a run depends on; written to `runs/<name>/resolved.yaml` once and loaded by every rank."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    reduction: ReductionConfig = field(default_factory=ReductionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def refuse(key: str, value: object, expected: str, remedy: str) -> ValueError:
    """The one form of a configuration error: what was given, what is possible, what to do."""
    return ValueError(f"{key}={value}: expected {expected}. {remedy}")


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        hint = _ALIASES.get(value)
        remedy = f"Did you mean {key}={hint}?" if hint in allowed else f"Set {key} to one of these."
        raise refuse(key, value, "one of " + ", ".join(allowed), remedy)


def _at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:  # not `<`, which NaN passes
        raise refuse(key, value, f"at least {least}", f"Raise {key}.")


def _divides(key: str, value: int, of_key: str, of_value: int) -> None:
    if of_value % value:
        legal = [k for k in range(1, of_value + 1) if of_value % k == 0]
        nearest = sorted(legal, key=lambda k: abs(k - value))[:3]
        raise refuse(
            key, value, f"a divisor of {of_key}={of_value}", f"Nearest that divide it: {', '.join(map(str, nearest))}."
        )


def _validate_model(model: ModelConfig) -> None:
    _one_of("model.normalization", model.normalization, ("rmsnorm", "layernorm"))
    _one_of("model.activation", model.activation, ("swiglu", "gelu"))
    _one_of("model.position_embedding", model.position_embedding, ("rope", "learned"))
    _one_of("model.implementation", model.implementation, ("auto", "local", "transformer_engine"))
    for name in ("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "ffn_hidden_size"):
        _at_least(f"model.{name}", getattr(model, name), 1)
    _at_least("model.vocab_multiple", model.vocab_multiple, 1)
    _at_least("model.vocab_size", model.vocab_size, 1)
    if model.head_dim is None:
        _divides("model.num_attention_heads", model.num_attention_heads, "model.hidden_size", model.hidden_size)
    _divides("model.num_kv_heads", model.num_kv_heads, "model.num_attention_heads", model.num_attention_heads)
    if model.position_embedding == "rope" and model.kv_channels % 2:
        raise refuse("model.head_dim", model.kv_channels, "an even head dimension with rope", "Set model.head_dim.")


def _validate_parallelism(config: Config) -> None:
    par, model = config.parallelism, config.model
    _one_of("parallelism.schedule", par.schedule, (*SCHEDULES, "auto"))
    if par.max_attention_gib is not None and (par.schedule != "auto" or not 0 < par.max_attention_gib < float("inf")):
        raise refuse(
            "parallelism.max_attention_gib",
            par.max_attention_gib,
            "null, or with parallelism.schedule=auto a number above 0",
            "Only auto chooses by memory; leave it null.",
        )
    for name in ("context_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        _at_least(f"parallelism.{name}", getattr(par, name), 1)
    _at_least("parallelism.max_buffer_tokens", par.max_buffer_tokens, 1)
    _at_least("parallelism.inner_size", par.inner_size, 1)
    _one_of("parallelism.outer_schedule", par.outer_schedule, OUTER_SCHEDULES)
    if par.inner_size is not None:
        if par.schedule not in ("double_ring", "usp"):
            raise refuse(
                "parallelism.inner_size",
                par.inner_size,
                f"null with parallelism.schedule={par.schedule}",
                "Only double_ring and usp divide the ranks; leave it null or choose one of them.",
            )
        size = "parallelism.context_parallel_size"
        _divides("parallelism.inner_size", par.inner_size, size, par.context_parallel_size)
    if par.outer_schedule != "zigzag" and par.schedule != "usp":
        raise refuse(
            "parallelism.outer_schedule",
            par.outer_schedule,
            f"zigzag, its default, with parallelism.schedule={par.schedule}",
            "Only usp has a mode between groups; leave it or set parallelism.schedule=usp.",
        )
    if not 0 < par.timeout_s < float("inf"):
        raise refuse("parallelism.timeout_s", par.timeout_s, "more than 0 seconds, and finite", "600 is the default.")
    if par.max_buffer_tokens is not None and par.schedule != "all_gather":
        raise refuse(
            "parallelism.max_buffer_tokens",
            par.max_buffer_tokens,
            f"null with parallelism.schedule={par.schedule}",
            "Only all_gather groups its sources under a bound; leave it null or set parallelism.schedule=all_gather.",
        )
    tp, key = par.tensor_parallel_size, "parallelism.tensor_parallel_size"
    _divides(key, tp, "model.num_kv_heads", model.num_kv_heads)
    _divides(key, tp, "model.ffn_hidden_size", model.ffn_hidden_size)
    if model.vocab_size is not None:
        _divides(key, tp, "model.vocab_size", model.vocab_size)
    else:
        _divides(key, tp, "model.vocab_multiple", model.vocab_multiple)
    if par.uses_sequence_parallel:
        _divides(key, tp, "data.seq_length", config.data.seq_length)
        _divides(key, tp, "model.hidden_size", model.hidden_size)
    _divides("parallelism.pipeline_parallel_size", par.pipeline_parallel_size, "model.num_layers", model.num_layers)
    if par.overlap_param_gather and not (par.overlap_grad_reduce and config.optim.distributed):
        raise refuse(
            "parallelism.overlap_param_gather",
            True,
            "parallelism.overlap_grad_reduce=true and optim.distributed=true beside it",
            "Set both, or leave overlap_param_gather false.",
        )


def _validate_reduction(reduction: ReductionConfig) -> None:
    _one_of("reduction.output_projection", reduction.output_projection, REDUCTIONS)
    _one_of("reduction.down_projection", reduction.down_projection, REDUCTIONS)
    _one_of("reduction.transport", reduction.transport, REDUCTION_TRANSPORTS)
    if reduction.group_size not in (32, 64, 128):
        raise refuse("reduction.group_size", reduction.group_size, "one of 32, 64, 128", "128 sends the fewest bytes.")
    if not 0 <= reduction.min_kib < float("inf"):
        raise refuse("reduction.min_kib", reduction.min_kib, "at least 0 KiB, and finite", "64 is the default.")


def _validate_training(config: Config) -> None:
    train, optim, data = config.train, config.optim, config.data
    _one_of("train.precision", train.precision, PRECISIONS)
    _one_of("train.device", train.device, DEVICES)
    _one_of("optim.decay_style", optim.decay_style, ("cosine", "linear", "constant"))
    _one_of("logging.wandb", config.logging.wandb, WANDB_MODES)
    for name in (
        "steps",
        "global_batch_size",
        "micro_batch_size",
        "save_interval",
        "keep_checkpoints",
        "num_processes",
    ):
        _at_least(f"train.{name}", getattr(train, name), 1)
    _at_least("logging.profile_step", config.logging.profile_step, 1)
    peak = config.logging.peak_tflops
    if peak is not None and not 0 < peak < float("inf"):
        raise refuse("logging.peak_tflops", peak, "a positive number of TFLOP/s", "Or null to look the device up.")
    for name in ("lr", "min_lr", "warmup_steps", "weight_decay", "clip_grad", "eps"):
        _at_least(f"optim.{name}", getattr(optim, name), 0)
    _at_least("optim.decay_steps", optim.decay_steps, 1)
    for name in ("beta1", "beta2"):
        value = getattr(optim, name)
        if not 0 <= value < 1:
            raise refuse(f"optim.{name}", value, "at least 0 and less than 1", "Adam's usual are 0.9 and 0.95.")
    if not optim.min_lr <= optim.lr < float("inf"):
        raise refuse("optim.min_lr", optim.min_lr, f"at most optim.lr={optim.lr}", "Lower min_lr or raise lr.")
    decay = optim.decay_steps or train.steps
    if optim.warmup_steps and optim.warmup_steps >= decay:
        raise refuse(
            "optim.warmup_steps",
            optim.warmup_steps,
            f"fewer steps than the decay ({decay}: optim.decay_steps, or train.steps where that is null)",
            "Lower optim.warmup_steps or raise train.steps.",
        )
    _one_of("data.tokenizer", data.tokenizer, TOKENIZERS)
    _at_least("data.seq_length", data.seq_length, 1)
    if data.tokenizer != "byte-level" and data.tokenizer_path is None:
        raise refuse(
            "data.tokenizer_path", None, f"a path for data.tokenizer={data.tokenizer}", "Set data.tokenizer_path."
        )
    if not config.run.name or "/" in config.run.name or config.run.name in (".", ".."):
        raise refuse("run.name", config.run.name, "a plain folder name", "Choose another run.name.")


def _validate_inference(inference: InferenceConfig) -> None:
    _one_of("inference.mode", inference.mode, CACHE_MODES)
    _one_of("inference.rule", inference.rule, CACHE_RULES)
    _one_of("inference.decode", inference.decode, DECODES)
    _one_of("inference.cuda_graphs", inference.cuda_graphs, CUDA_GRAPHS)
    for name in ("max_new_tokens", "top_k", "page_tokens", "cache_tokens", "prefill_chunk"):
        _at_least(f"inference.{name}", getattr(inference, name), 1)
    if inference.exact_reuse and inference.prefill_chunk is None:
        raise refuse("inference.prefill_chunk", None, "a number with inference.exact_reuse=true", "Set it to 2048.")
    if not 0 <= inference.temperature < float("inf"):
        raise refuse("inference.temperature", inference.temperature, "0 or a positive number", "0 is greedy.")
    if not 0 < inference.top_p <= 1:
        raise refuse("inference.top_p", inference.top_p, "above 0 and at most 1", "1 draws among all tokens.")


def _validate_serve(serve: ServeConfig) -> None:
    for name in ("max_active", "max_waiting", "max_connections", "max_body_bytes"):
        _at_least(f"serve.{name}", getattr(serve, name), 1)
    _at_least("serve.keep_sessions", serve.keep_sessions, 0)
    if not 0 < serve.timeout_s < float("inf"):
        raise refuse("serve.timeout_s", serve.timeout_s, "more than 0 seconds, and finite", "30 is the default.")
    if not 0 <= serve.port < 2**16:
        raise refuse("serve.port", serve.port, "0 to 65535", "0 takes any free port.")


def validate(config: Config) -> None:
    """Check everything that can be known without devices, data or ranks.

    Raises:
        ValueError: names the key and value, what was expected and what to do.
    """
    _validate_model(config.model)
    _validate_parallelism(config)
    _one_of("attention.kernel", config.attention.kernel, KERNELS)
    _one_of("attention.transport", config.attention.transport, TRANSPORTS)
    if config.attention.graph_tokens < 0:
        raise refuse("attention.graph_tokens", config.attention.graph_tokens, "0 or more", "Take 0 for no graphs.")
    _one_of("recompute.mode", config.recompute.mode, RECOMPUTES)
    for name in ("head_chunk_tokens", "mlp_tile_tokens"):
        _at_least(f"recompute.{name}", getattr(config.recompute, name), 1)
    _validate_reduction(config.reduction)
    _validate_training(config)
    _validate_inference(config.inference)
    _validate_serve(config.serve)


def data_parallel_size(config: Config, world_size: int) -> int:
    """Data-parallel ranks left in a world of `world_size` ranks; batch sizes are checked against it.

    Raises:
        ValueError: the sizes do not multiply to `world_size`, or the batch does not divide among the ranks.
    """
    par, train = config.parallelism, config.train
    product = (
        f"tensor {par.tensor_parallel_size} x context {par.context_parallel_size} "
        f"x pipeline {par.pipeline_parallel_size}"
    )
    if world_size % par.model_parallel_size:
        raise refuse(
            "world size",
            world_size,
            f"a multiple of {product} = {par.model_parallel_size}",
            "Start that many ranks or change the parallelism sizes.",
        )
    size = world_size // par.model_parallel_size
    if par.data_parallel_size not in (None, size):
        raise refuse(
            "parallelism.data_parallel_size",
            par.data_parallel_size,
            f"{size}, since {world_size} ranks / ({product}) = {size}",
            f"Set it to {size} or null, or start {par.model_parallel_size * (par.data_parallel_size or 1)} ranks.",
        )
    per_micro_step = train.micro_batch_size * size
    if train.global_batch_size % per_micro_step:
        below = train.global_batch_size // per_micro_step * per_micro_step
        raise refuse(
            "train.global_batch_size",
            train.global_batch_size,
            f"a multiple of train.micro_batch_size x data-parallel ranks = {train.micro_batch_size} x {size}",
            f"Nearest: {max(below, per_micro_step)} or {below + per_micro_step}.",
        )
    return size
