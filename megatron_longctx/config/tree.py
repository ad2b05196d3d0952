"""The typed configuration tree: every setting, with its default and meaning.

Recipes (`recipes/*.yaml`, composed by Hydra) fill these dataclasses. Lengths are in tokens, sizes in ranks, memory in
GiB, times in seconds. Every key but truth values says beside its default what it may be (`bounds`).
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from ..schedules.cache_modes import CACHE_MODES
from .bounds import choice, folder_name, number, path, text
from .experts import ExpertKeys
from .latent import LatentKeys
from .parallelism import MOST_RANKS, YEAR_S, ParallelismConfig
from .rope_scaling import RopeScaling

TRANSPORTS = ("auto", "peer", "p2p")
RECOMPUTES = ("none", "layer", "attention_output", "attention_output+offload")
REDUCTIONS = ("none", "int8", "int6", "int4", "auto")
SINKS = ("none", "off_by_one", "learnable")
CACHE_RULES = ("auto", "simulate", "algorithm_1", "algorithm_5", "empirical", "bytes")
# Of Megatron's scheduler, by its own names.
DECAY_STYLES = ("cosine", "linear", "constant", "inverse-square-root", "WSD")
TOKENIZERS = ("byte-level", "huggingface", "sentencepiece", "tiktoken", "megatron")

MOST_TOKENS = 10**9  # of a sequence
LEAST_WEIGHT = 1e-4  # of a dataset, as a part of all: less might not come up before a blend repeats
_MOST = 10**9  # steps, counts: no key is meant for more
_SHARE = r"([0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9})"
_WEIGHT = rf" *{_SHARE} *"
_TAG = r"[^,\s][^,]{0,63}"
_BLEND = re.compile(rf"{_SHARE} +\S+( +{_SHARE} +\S+)+")


@dataclass(frozen=True)
class ModelConfig(ExpertKeys, LatentKeys):
    """Shape of a GPT. `vocab_size: null` is the tokenizer's, rounded up to a multiple of `vocab_multiple`."""

    name: str = text("tiny")
    num_layers: int = number(4, 1, 10_000)
    hidden_size: int = number(128, 1, 10**6)
    num_attention_heads: int = number(4, 1, 10**5)
    num_kv_heads: int = number(2, 1, 10**5)
    head_dim: int | None = number(None, 1, 10**5)  # null: hidden_size / num_attention_heads
    ffn_hidden_size: int = number(384, 1, 10**7)
    vocab_size: int | None = number(None, 1, 10**7)
    vocab_multiple: int = number(128, 1, 10**6)
    normalization: str = choice("rmsnorm", ("rmsnorm", "layernorm"))
    norm_epsilon: float = number(1e-5, 1e-20, 1)  # smaller values are 0 in fp32, or close to it
    zero_centered_norms: bool = False  # weights of norms are stored minus 1
    qk_norm: bool = False  # norms of queries and keys, per head; with latents, norms of the latents
    post_norms: bool = False  # norms after attention and after the MLP, before the residual is added
    # geglu: gated by the tanh form of gelu; swiglu_oai: as in gpt-oss
    activation: str = choice("swiglu", ("swiglu", "gelu", "geglu", "swiglu_oai"))
    attention_scale: float | None = number(None, 0, 1e6, above=True)  # Factor for the scores; null: 1 / sqrt(head_dim).
    scale_embedding: bool = False  # multiply embeddings by sqrt(hidden_size), rounded to the model's precision
    position_embedding: str = choice("rope", ("rope", "learned"))
    rope_base: float = number(500_000.0, 1, 1e15)
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    # Number of previous tokens that a token sees; null: all. Every window_pattern-th layer sees all of them.
    window: int | None = number(None, 1, MOST_TOKENS)
    window_pattern: int | None = number(None, 2, 10_000)
    # RoPE's base in layers with a window, where RoPE is not scaled; null: as in other layers.
    window_rope_base: float | None = number(None, 1, 1e15)
    # A logit per head that is part of every softmax but has no value: none, 0 (off_by_one), or learnable.
    sinks: str = choice("none", SINKS)
    bias: bool = False  # bias in all linear layers except the output layer
    qkv_bias: bool = False  # bias of queries, keys and values if the other layers have none
    tie_embeddings: bool = False
    init_std: float = number(0.02, 1e-6, 10)
    # Layers around attention: auto (TransformerEngine's on GPUs if installed, else Megatron's local layers)
    implementation: str = choice("auto", ("auto", "local", "transformer_engine"))

    @property
    def fc1_columns(self) -> int:
        """Columns of an MLP's first matrix, in units of its width: gates have some, too."""
        return 1 if self.activation == "gelu" else 2

    @property
    def widest_window(self) -> tuple[int | None, int | None]:
        """Of the layers that see most."""
        return (None, None) if self.window is None or self.window_pattern is not None else (self.window, 0)


@dataclass(frozen=True)
class AttentionConfig:
    # auto, or the name of a provider: fa4 | cudnn | flash | cpu | reference
    kernel: str = text("auto", "auto or the name of a kernel", r"[a-z][a-z0-9_]*")
    deterministic: bool = False
    # How blocks travel: peer (the copy engine pulls them from peer memory), p2p (batched messages over NCCL or
    # gloo), auto (peer if all ranks of the group can use it, both if only some can, otherwise p2p; the log says
    # which and why).
    transport: str = choice("auto", TRANSPORTS)
    # In inference on several context-parallel ranks, store and send keys and values as 8-bit integers with a
    # scale for every token and head: half the bytes of bf16, but not exact. Training does not change.
    kv_int8: bool = False
    # Whether a call keeps blocks received from other ranks for its backward, which then does not exchange them
    # again: auto (with ulysses, up to 32,768 tokens per rank; this needs the memory of one more output) | true |
    # false. With recompute=attention_output nothing can be kept, since forward runs without a graph.
    keep_received: str = choice("auto", ("auto", "true", "false"))
    # Whether partial gradients that ranks of a node have for a rank of another node are summed within the node
    # and sent as one message: auto (if parallelism.cluster has several nodes whose ranks have faster links to
    # each other than their share of the network) | true | false.
    sum_in_node: str = choice("auto", ("auto", "true", "false"))
    # For ablations, in training: false waits for each step's messages before anything is computed beside them.
    overlap: bool = True
    # For comparison, in training: TransformerEngine's context parallelism instead of this project's; schedule,
    # layout, kernel and transport then have no effect. Document lengths must be multiples of 2 x
    # context_parallel_size. null: none.
    baseline: str | None = choice(None, ("te_p2p", "te_all_gather", "te_a2a"))

    def __post_init__(self) -> None:
        # `true`, read as a truth value, becomes the text `True`.
        for name in ("keep_received", "sum_in_node"):
            object.__setattr__(self, name, str(getattr(self, name)).lower())


@dataclass(frozen=True)
class RecomputeConfig:
    """What is kept between forward and backward; the rest is recomputed.

    none: all activations. layer: each layer's input (Megatron's full recompute). attention_output: each layer's input
    and attention's output, so that attention runs once. attention_output+offload: both wait in pinned host memory,
    except for those of two layers (docs/memory.md).
    """

    mode: str = choice("none", RECOMPUTES)
    # Maximum number of tokens (times sequences) per rank whose logits exist at once, in forward and again in
    # backward. null: all.
    head_chunk_tokens: int | None = number(None, 1, _MOST)
    # Maximum number of tokens (times sequences) per rank that pass through an MLP at once. Its activations are
    # not kept but recomputed in backward. null: all.
    mlp_tile_tokens: int | None = number(None, 1, _MOST)


@dataclass(frozen=True)
class ReductionConfig:
    """How the outputs of row-parallel layers are summed over tensor-parallel ranks: exactly, or as integers (Flash
    Communication), which is faster on slow links but not exact. Only in inference, unless `in_training`."""

    output_projection: str = choice("none", REDUCTIONS)  # for attention; auto: int8 where it was measured to be faster
    down_projection: str = choice("none", REDUCTIONS)  # for the MLP, which is harder to quantize because of outliers
    group_size: int = choice(128, (32, 64, 128))  # neighbouring values that share a range; 128 sends the fewest bytes
    symmetric: bool = False  # use ranges that are symmetric around zero
    min_kib: float = number(64.0, 0, 1e12)  # smaller tensors are summed exactly
    in_training: bool = False  # also quantize in training's forward; gradients pass as through the exact sum
    # How integers travel: peer (GPUs of one host write to each other's memory), collective (all-to-all and
    # all-gather of the process group), auto (peer if possible).
    transport: str = choice("auto", ("auto", "peer", "collective"))


@dataclass(frozen=True)
class DataConfig:
    """Megatron indexed data: `<prefix>.bin` and `<prefix>.idx`, as `megatron-longctx data` writes them.

    `prefix` names one dataset, or blends several by weight, like Megatron's `--data-path`: `0.7 data/a 0.3 data/b`.
    """

    prefix: str = path("data/stdlib")
    seq_length: int = number(4096, 1, MOST_TOKENS)
    # How documents become sequences of at most seq_length tokens: none (a stream of documents, cut anywhere) |
    # documents (the same stream, but attention, positions and labels end with each document) | best_fit (whole
    # documents packed; only documents longer than a sequence are cut)
    packing: str = choice("none", ("none", "documents", "best_fit"))
    workers: int = number(2, 0, 256)  # processes per rank that read ahead; 0: a thread
    tokenizer: str = choice("byte-level", TOKENIZERS)
    tokenizer_path: str | None = path(None)  # required by all except byte-level
    # Shares of the documents for training, validation and test. Training takes the first, `train.eval_interval` and
    # `eval` the second.
    split: str = text(
        "100,0,0",
        "one to three weights such as 90,10,0, the first above 0",
        rf"(?= *[0-9.]*[1-9]){_WEIGHT}(,{_WEIGHT}){{0,2}}",
    )
    mask_eod_loss: bool = False

    @property
    def has_held_out(self) -> bool:
        """Whether `split` has a second part."""
        return any(map(float, self.split.split(",")[1:2]))

    @property
    def datasets(self) -> tuple[tuple[float, str], ...]:
        """Weight and prefix of every dataset."""
        words = self.prefix.split()
        if not _BLEND.fullmatch(self.prefix):
            return ((1.0, self.prefix),)
        return tuple(zip(map(float, words[::2]), words[1::2], strict=True))


@dataclass(frozen=True)
class OptimConfig:
    lr: float = number(3e-4, 0, 100)
    min_lr: float = number(3e-5, 0, 100)
    warmup_steps: int = number(10, 0, _MOST)
    decay_steps: int | None = number(None, 1, _MOST)  # null: train.steps
    # WSD: the rate stays constant until wsd_decay_steps before the end of decay_steps, then falls by
    # wsd_decay_style.
    decay_style: str = choice("cosine", DECAY_STYLES)
    wsd_decay_steps: int | None = number(None, 1, _MOST)  # required by WSD, null with any other style
    # how the rate of WSD falls
    wsd_decay_style: str = choice("exponential", ("exponential", "linear", "cosine", "minus_sqrt"))
    weight_decay: float = number(0.1, 0, 100)
    beta1: float = number(0.9, 0, 1, below=True)
    beta2: float = number(0.95, 0, 1, below=True)
    eps: float = number(1e-8, 1e-20, 1)  # epsilon of Adam; smaller values are 0 in fp32, or close to it
    clip_grad: float = number(1.0, 0, 1e9)  # maximum gradient norm; 0: gradients are not clipped
    distributed: bool = True  # Megatron's distributed optimizer: states are sharded over dp x cp
    # Adam's states and main parameters wait in pinned host memory; a few at a time come to the device for the
    # step. Requires distributed.
    states_on_host: bool = False


@dataclass(frozen=True)
class TrainConfig:
    steps: int = number(20, 1, _MOST)
    # An imported or trained run whose latest weights this run starts from, with a new optimizer. Own checkpoints
    # of this run take precedence. The model must be the same except for RoPE, sequence length and vocabulary
    # padding. On the command line, it also sets the model and the tokenizer unless other settings do.
    init_from: str | None = path(None)
    global_batch_size: int = number(1, 1, 10**6)  # sequences per step, over all data-parallel ranks
    micro_batch_size: int = number(1, 1, 10**6)  # sequences per forward pass of one data-parallel rank
    precision: str = choice("bf16", ("fp32", "bf16"))
    device: str = choice("auto", ("auto", "cpu", "cuda"))
    check_memory: bool = True  # refuse a run that is predicted not to fit, and warn if it is close
    # Refuse a tokenizer that the dataset was not written with and, on resume, a different dataset, tokenizer,
    # seq_length, split or seed. false: continue with them, from the sample after the last.
    check_data: bool = True
    seed: int = number(1234, 1, 2**31 - 1)
    save: bool = True  # checkpoint at the end and when stopped
    save_interval: int | None = number(None, 1, _MOST)  # steps; null: only at the end and when stopped
    # Copy checkpoints to host memory and write them while training continues; false: training waits.
    async_save: bool = True
    keep_checkpoints: int | None = number(None, 1, _MOST)  # number of newest checkpoints to keep; null: all
    # also keep those at multiples of this number of steps; null: no others
    keep_every: int | None = number(None, 1, _MOST)
    log_interval: int = number(1, 1, _MOST)  # steps per record, which has the means over these steps
    # Steps between losses of the validation part of data.split (`loss/validation`); null: never.
    eval_interval: int | None = number(None, 1, _MOST)
    eval_samples: int = number(32, 1, 10**6)  # sequences of the validation part, always the same ones, over all ranks
    # Ranks to start on this host; null: one per GPU, or the smallest number that fits on CPU.
    num_processes: int | None = number(None, 1, MOST_RANKS)


@dataclass(frozen=True)
class InferenceConfig:
    """`megatron-longctx generate` and `serve`. `inference.sampling.Sampling` explains sampling."""

    max_new_tokens: int = number(128, 1, _MOST)
    temperature: float = number(0.0, 0, 1e6)  # 0: the most likely token
    top_k: int | None = number(None, 1, _MOST)
    top_p: float = number(1.0, 0, 1, above=True)  # 1: draw from all tokens
    seed: int = number(0, -(2**63), 2**63 - 1)
    # How ranks share attention over the cache: auto | pass_kv | pass_q | one_hop
    mode: str = choice("auto", CACHE_MODES, "auto")
    # How mode=auto chooses: auto | simulate | algorithm_1 | algorithm_5 | empirical | bytes. auto: simulate if
    # the links between ranks are known from a calibration (`megatron-longctx calibrate` with attention.transport
    # as `transport` below) or from parallelism.cluster, otherwise bytes.
    rule: str = choice("auto", CACHE_RULES)
    # rule=empirical: pass K and V if alpha ln T + beta ln(T / (T + P)) + gamma > 0, for T new and P cached
    # tokens. The defaults are the paper's, for its hardware; `python -m benchmarks fit` fits others.
    rule_alpha: float = number(-1.059, -1e6, 1e6)
    rule_beta: float = number(1.145, -1e6, 1e6)  # see rule_alpha
    rule_gamma: float = number(12.112, -1e6, 1e6)  # see rule_alpha
    # How small numbers of new tokens are computed: single tokens of several sequences, and prompts of up to 512
    # tokens together. replicated: every rank computes the whole model for all of them but attends only to its
    # part of the cache, with one exchange of partial results per layer. plan: as any other batch, by `mode`.
    # auto: replicated unless `mode` names a mode; for prompts only if CUDA graphs can be used, and never with
    # exact_reuse.
    decode: str = choice("auto", ("auto", "replicated", "plan"))
    # Replay replicated steps from CUDA graphs: auto (if possible, else the log says why not) | true | false
    cuda_graphs: str = choice("auto", ("auto", "true", "false"))
    # How blocks travel between context-parallel ranks, as attention.transport.
    transport: str = choice("auto", TRANSPORTS)
    page_tokens: int = number(64, 1, 2**20)
    # Size of the cache of all context-parallel ranks together; null: data.seq_length + max_new_tokens.
    cache_tokens: int | None = number(None, 1, 10**10)
    # Maximum number of new tokens per sequence computed at once; null: 65,536 per rank, over all sequences.
    prefill_chunk: int | None = number(None, 1, _MOST)
    evict: bool = False  # if the cache is full, drop idle sessions and recompute them later, instead of refusing
    # A file with a Jinja template for chats; null: the tokenizer's own, else plain text with one message per
    # line.
    chat_template: str | None = path(None)
    # Give a prompt bit-identical logits whether or not its prefix is in the cache: only whole chunks of
    # prefill_chunk tokens, from the first token on, are reused, and prompts are computed one by one. false: reuse
    # everything.
    exact_reuse: bool = False

    def __post_init__(self) -> None:
        # `true`, read as a truth value, becomes the text `True`.
        object.__setattr__(self, "cuda_graphs", str(self.cuda_graphs).lower())


@dataclass(frozen=True)
class ServeConfig:
    """`megatron-longctx serve`. API keys come from the environment variable MEGATRON_LONGCTX_API_KEY, one per line."""

    host: str = text("127.0.0.1")  # an address other than loopback requires an API key
    port: int = number(8000, 0, 65_535)  # 0: any free port
    api_keys: str | None = path(None)  # a file with more keys, one per line
    # Names by which clients may call the server (their `Host`), separated by commas; `*`: any. null: on a
    # loopback address only names and addresses of this host, otherwise any.
    allowed_hosts: str | None = text(None, most=2000)
    max_active: int = number(16, 1, 4096)  # sequences computed together
    max_waiting: int = number(64, 1, 10**6)  # open requests, including active ones; more get 429
    max_connections: int = number(128, 1, 10**6)
    max_body_bytes: int = number(16 * 2**20, 1, 2**32)
    # Time limit for a client to send a request's head, to send its body, to stay silent, and to read.
    timeout_s: float = number(30.0, 1, YEAR_S)
    # If ranks take longer for one round (a chunk of prompts and a token), `/health` and requests get 503; at most
    # half of parallelism.timeout_s.
    stalled_s: float = number(10.0, 0, YEAR_S, above=True)
    # Finished or cancelled sequences whose cache is kept for prompts with the same prefix.
    keep_sessions: int = number(16, 0, 10**6)


@dataclass(frozen=True)
class LoggingConfig:
    """Where a run's figures go."""

    wandb: str = choice("offline", ("offline", "online", "disabled"))
    wandb_project: str = text("megatron-longctx", "a project of W&B, 1 to 128 letters", r"[^/\\#?%:]{1,128}")
    wandb_group: str | None = text(None)  # null: the sweep's name, else the experiment's, else the model and length
    wandb_job_type: str | None = text(None, most=64)  # null: the mode, by which tables and panels group runs
    # null: model, mode, layout, cp/tp/pp/dp, hardware and precision.
    wandb_tags: str | None = text(None, "tags of 1 to 64 letters, commas between", rf"{_TAG}(,{_TAG})*", 2000)
    tensorboard: bool = False  # write events to runs/<name>/tensorboard; requires the package tensorboard
    peak_tflops: float | None = number(None, 1e-3, 1e9)  # Peak per GPU, dense, for MFU; null: looked up by device name.
    # the step that rank 0 profiles into runs/<name>/profile; null: none
    profile_step: int | None = number(None, 1, 10**9)


@dataclass(frozen=True)
class RunConfig:
    name: str = folder_name("default")
    root: str = path("runs")


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

    @property
    def no_param_gather(self) -> str | None:
        """The setting that leaves parameters to be gathered after the optimizer's step, or nothing to gather."""
        if not self.optim.distributed:
            return "optim.distributed=false"
        return None if self.parallelism.overlap_grad_reduce else "parallelism.overlap_grad_reduce=false"

    @property
    def overlap_param_gather(self) -> bool:
        """What `parallelism.overlap_param_gather` comes to."""
        asked = self.parallelism.overlap_param_gather
        return self.no_param_gather is None if asked == "auto" else asked == "true"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
