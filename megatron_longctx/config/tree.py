"""The typed configuration tree: every setting, with its default and meaning.

Recipes (`recipes/*.yaml`, composed by Hydra) fill these dataclasses. Lengths are in tokens, sizes in ranks, memory in
GiB, times in seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEDULES = ("ring", "zigzag", "striped", "helper", "double_ring", "tasp", "all_gather", "ulysses", "usp")
OUTER_SCHEDULES = ("ring", "zigzag", "helper", "double_ring", "tasp", "all_gather")
TRANSPORTS = ("auto", "peer", "p2p")
KEEP_RECEIVED = ("auto", "true", "false")
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
    # ulysses only: parts in which a rank's heads are exchanged, each beside the attention of the one before.
    head_chunks: int = 1
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
    # Over peer memory, attention with at most so many tokens on every rank is tried as it is and replayed from CUDA
    # graphs, and the faster way stays; 0: never replayed
    graph_tokens: int = 4096
    # In inference on several context-parallel ranks keys and values are kept and sent as 8-bit integers, with a scale
    # for every token and head: half the bytes of bf16, and not exact. Training is not touched.
    kv_int8: bool = False
    # Whether a call keeps what it has received from other ranks until its backward, which then does not exchange it
    # again: auto (with ulysses, up to 32,768 tokens a rank: it takes the memory of one output more) | true | false.
    # With recompute=attention_output nothing is kept: forward runs without a graph.
    keep_received: str = "auto"

    def __post_init__(self) -> None:
        # `true`, read as a truth value, becomes the text `True`.
        object.__setattr__(self, "keep_received", self.keep_received.lower())


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
    # Refuse a tokenizer that the dataset was not written with and, on resume, another dataset, tokenizer, seq_length,
    # split or seed than the run's. false: go on with them, from the sample after the last.
    check_data: bool = True
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
    # a calibration (`bench calibrate` with attention.transport as `transport` below) or else parallelism.cluster says
    # how ranks are linked, else bytes.
    rule: str = "auto"
    # How few new tokens are computed: single ones of several sequences, and prompts of up to 512 tokens together.
    # replicated: the whole model for all of them on every rank, but attention by each rank over what it holds of the
    # cache, with one exchange of partial results a layer. plan: as any other batch, by `mode`. auto: replicated unless
    # `mode` names a way, but prompts only where CUDA graphs can be and never with exact_reuse.
    decode: str = "auto"
    # Replicated steps are replayed from CUDA graphs: auto (where that is possible, else it says why not) | true | false
    cuda_graphs: str = "auto"
    # How blocks travel between context-parallel ranks, as attention.transport.
    transport: str = "auto"
    page_tokens: int = 64
    # The cache of all context-parallel ranks together; null: data.seq_length + max_new_tokens.
    cache_tokens: int | None = None
    # Most new tokens of a sequence computed at once; null: as many as make 65,536 a rank, of all sequences together.
    prefill_chunk: int | None = None
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
    """`megatron-longctx serve`. API keys come from the environment, a key a line: MEGATRON_LONGCTX_API_KEY."""

    host: str = "127.0.0.1"  # any other than this host's own needs a key
    port: int = 8000  # 0: any free one
    api_keys: str | None = None  # a file with more keys, a key a line
    # By which names clients may call the server (their `Host`), separated by commas; `*`: any. null: on a loopback
    # address only names and addresses of this host itself, else any.
    allowed_hosts: str | None = None
    max_active: int = 16  # sequences computed together
    max_waiting: int = 64  # requests at once, those that are computed included; more are answered 429
    max_connections: int = 128
    max_body_bytes: int = 16 * 2**20
    timeout_s: float = 30.0  # for a client to send a request's head, and then its body; to keep silent; not to read
    # Where ranks take longer for one round, a chunk of prompts and a token, `/health` and requests get 503; half of
    # parallelism.timeout_s if that is less.
    stalled_s: float = 10.0
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

    @property
    def keep_received(self) -> str:
        """`attention.keep_received`, or false where attention's forward runs without a graph."""
        return "false" if self.recompute.mode.startswith("attention_output") else self.attention.keep_received

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
