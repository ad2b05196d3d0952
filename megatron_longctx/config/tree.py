"""The typed configuration: the root `Config`, and the keys of data, training, inference, serving, logging and runs.

Recipes (`recipes/*.yaml`, composed by Hydra) fill these dataclasses. Lengths are in tokens, sizes in ranks, memory in
GiB, times in seconds. Every key except truth values declares its allowed values beside its default (`bounds`).
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from ..core.plans.cache_modes import CACHE_MODES
from .bounds import Switches, choice, number, path, text
from .model import MAX_TOKENS, ModelConfig
from .parallelism import (
    MAX_RANKS,
    SECONDS_PER_YEAR,
    SWITCHES,
    TRANSPORTS,
    AttentionConfig,
    ParallelismConfig,
    RecomputeConfig,
    ReductionConfig,
)

TOKENIZERS = ("byte-level", "huggingface", "sentencepiece", "tiktoken", "megatron")

FP8_RECIPES = ("none", "delayed", "tensorwise", "blockwise", "mxfp8")
_MAX_COUNT = 10**9  # of steps, samples and tokens: no key is meant for more
_SHARE = r"([0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9})"
_WEIGHT = rf" *{_SHARE} *"
_ORIGIN = r"https?://[^\s,/]+"
_TAG = r"[^,\s][^,]{0,63}"
_BLEND = re.compile(rf"{_SHARE} +\S+( +{_SHARE} +\S+)+")


@dataclass(frozen=True)
class DataConfig:
    """Megatron indexed data: `<prefix>.bin` and `<prefix>.idx`, as `megatron-longctx data` writes them.

    `prefix` names one dataset, or blends several by weight, like Megatron's `--data-path`: `0.7 data/a 0.3 data/b`.
    """

    prefix: str = path("data/stdlib")  # the dataset, or a blend of several with weights
    seq_length: int = number(4096, 1, MAX_TOKENS)  # tokens per sequence
    # How documents become sequences of at most seq_length tokens: none (a stream of documents, cut anywhere) |
    # documents (the same stream, but attention, positions and labels end with each document) | best_fit (whole
    # documents packed; only documents longer than a sequence are cut)
    packing: str = choice("none", ("none", "documents", "best_fit"))
    # Packs of best_fit are dealt out to data-parallel ranks by their work, and may be moved by this many steps, so that
    # packs of similar work share a step: a long document waits for others at most that long. null: packs are in
    # random order.
    max_wait_steps: int | None = number(0, 0, 1000)
    # What a document of the dataset is: a text or a conversation (documents) | a tree of tokens, as a prompt with its
    # responses, which share it (rollouts)
    format: str = choice("documents", ("documents", "rollouts"))
    workers: int = number(2, 0, 256)  # processes per rank that read ahead; 0: a thread
    tokenizer: str = choice("byte-level", TOKENIZERS)  # library of the tokenizer
    tokenizer_path: str | None = path(None)  # required by all except byte-level
    # Shares of the documents for training, validation and test. Training takes the first, `train.eval_interval` and
    # `eval` the second.
    split: str = text(
        "100,0,0",
        "one to three weights such as 90,10,0, the first above 0",
        rf"(?= *[0-9.]*[1-9]){_WEIGHT}(,{_WEIGHT}){{0,2}}",
    )
    mask_eod_loss: bool = False  # exclude labels that end a document from the loss

    @property
    def has_validation_split(self) -> bool:
        """Whether `split` has a validation part."""
        return any(map(float, self.split.split(",")[1:2]))

    @property
    def datasets(self) -> tuple[tuple[float, str], ...]:
        """The weight and prefix of every dataset in `prefix`."""
        words = self.prefix.split()
        if not _BLEND.fullmatch(self.prefix):
            return ((1.0, self.prefix),)
        return tuple(zip(map(float, words[::2]), words[1::2], strict=True))


@dataclass(frozen=True)
class OptimConfig:
    lr: float = number(3e-4, 0, 100)  # highest learning rate
    min_lr: float = number(3e-5, 0, 100)  # final learning rate of the decay
    warmup_steps: int = number(10, 0, _MAX_COUNT)  # steps in which the learning rate rises from 0
    decay_steps: int | None = number(None, 1, _MAX_COUNT)  # null: train.steps
    # WSD: the rate stays constant until wsd_decay_steps before the end of decay_steps, then falls by wsd_decay_style.
    decay_style: str = choice("cosine", ("cosine", "linear", "constant", "inverse-square-root", "WSD"))
    wsd_decay_steps: int | None = number(None, 1, _MAX_COUNT)  # required by WSD, null with any other style
    # how the rate of WSD falls
    wsd_decay_style: str = choice("exponential", ("exponential", "linear", "cosine", "minus_sqrt"))
    weight_decay: float = number(0.1, 0, 100)  # weight decay of AdamW
    beta1: float = number(0.9, 0, 1, below=True)  # beta1 of Adam
    beta2: float = number(0.95, 0, 1, below=True)  # beta2 of Adam
    eps: float = number(1e-8, 1e-20, 1)  # epsilon of Adam; smaller values are 0 in fp32, or close to it
    clip_grad: float = number(1.0, 0, 1e9)  # maximum gradient norm; 0: gradients are not clipped
    distributed: bool = True  # Megatron's distributed optimizer: states are sharded over dp x cp
    # Adam's states and main parameters wait in pinned host memory; a few at a time come to the device for the
    # step. Requires distributed.
    states_on_host: bool = False


@dataclass(frozen=True)
class TrainConfig:
    steps: int = number(20, 1, _MAX_COUNT)  # optimizer steps of the run
    # What is minimized: the cross-entropy of learned tokens (sft) | PPO's clipped loss with the rollouts' advantages
    # (policy_gradient)
    objective: str = choice("sft", ("sft", "policy_gradient"))
    clip_low: float = number(0.2, 0, 1)  # how far below 1 the ratio of probabilities may fall
    clip_high: float = number(0.2, 0, 1e6)  # how far above 1 it may rise
    kl_coeff: float = number(0.0, 0, 1e6)  # weight of the KL divergence from the rollouts' ref_logprobs
    # An imported or trained run whose latest weights this run starts from, with a new optimizer. Own checkpoints
    # of this run take precedence. The model must be the same except for RoPE, sequence length and vocabulary
    # padding. On the command line, it also sets the model and the tokenizer unless other settings do.
    init_from: str | None = path(None)
    global_batch_size: int = number(1, 1, 10**6)  # sequences per step, over all data-parallel ranks
    micro_batch_size: int = number(1, 1, 10**6)  # sequences per forward pass of one data-parallel rank
    # precision of parameters and activations; gradients and optimizer are fp32
    precision: str = choice("bf16", ("fp32", "bf16"))
    # Matrix products of TransformerEngine's layers in FP8, with scales from earlier steps (delayed), of each tensor
    # (tensorwise), of blocks (blockwise) or of 32 values (mxfp8). none: in train.precision, as everything else.
    fp8: str = choice("none", FP8_RECIPES)
    # Keep and gather the weights of these products in FP8 alone, without bf16 copies of them.
    fp8_param: bool = False
    bf16_layers_at_start: int = number(0, 0, 10_000)  # first layers without FP8; not with delayed
    bf16_layers_at_end: int = number(0, 0, 10_000)  # last layers without FP8; not with delayed
    device: str = choice("auto", ("auto", "cpu", "cuda"))  # auto: CUDA if there is a device
    check_memory: bool = True  # refuse a run that is predicted not to fit, and warn if it is close
    # Refuse a tokenizer that the dataset was not written with, lengths beyond those for which the unchanged RoPE of
    # init_from was trained and, on resume, a different dataset, tokenizer, seq_length, split or seed. false: continue
    # with them, from the sample after the last.
    check_data: bool = True
    seed: int = number(1234, 1, 2**31 - 1)  # seed of the weights and of the order of samples
    save: bool = True  # checkpoint at the end and when stopped
    save_interval: int | None = number(None, 1, _MAX_COUNT)  # steps; null: only at the end and when stopped
    save_minutes: float | None = number(None, 1e-3, 1e6)  # also when this long has passed since the last checkpoint
    # Copy checkpoints to host memory and write them while training continues; false: training waits.
    async_save: bool = True
    keep_checkpoints: int | None = number(None, 1, _MAX_COUNT)  # number of newest checkpoints to keep; null: all
    # also keep those at multiples of this number of steps; null: no others
    keep_every: int | None = number(None, 1, _MAX_COUNT)
    keep_best: bool = False  # also keep the one with the lowest validation loss, which checkpoints/best.json names
    log_interval: int = number(1, 1, _MAX_COUNT)  # steps per record, which has the means over these steps
    # Steps between losses of the validation part of data.split (`loss/validation`); null: never.
    eval_interval: int | None = number(None, 1, _MAX_COUNT)
    eval_samples: int = number(32, 1, 10**6)  # sequences of the validation part, always the same ones, over all ranks
    # Ranks to start on this host; null: one per GPU, or the smallest number that fits on CPU.
    num_processes: int | None = number(None, 1, MAX_RANKS)

    @property
    def fp8_block(self) -> int:
        """The number that sizes of FP8 products are multiples of; 1 without FP8."""
        return {"none": 1, "mxfp8": 32}.get(self.fp8, 16)


@dataclass(frozen=True)
class InferenceConfig(Switches):
    """`megatron-longctx generate` and `serve`. `inference.sampling.Sampling` explains sampling."""

    max_new_tokens: int = number(128, 1, _MAX_COUNT)  # maximum number of generated tokens
    # Maximum number of tokens of prompt and answer together, in `eval` of each text; null: the data.seq_length that
    # the run was trained with, or the length that its RoPE is scaled to.
    max_model_len: int | None = number(None, 1, MAX_TOKENS)
    temperature: float = number(0.0, 0, 1e6)  # 0: the most likely token
    top_k: int | None = number(None, 1, _MAX_COUNT)  # number of most likely tokens to draw from; null: all
    top_p: float = number(1.0, 0, 1, above=True)  # 1: draw from all tokens
    seed: int = number(0, -(2**63), 2**63 - 1)  # seed of the draws
    # How ranks share attention over the cache: auto | pass_kv | pass_q | one_hop. auto sends the smaller messages.
    mode: str = choice("auto", CACHE_MODES, "auto")
    # How small numbers of new tokens are computed: single tokens of several sequences, and short prompts. replicated:
    # every rank computes the whole model for all of them but attends only to its part of the cache, with one exchange
    # of partial results per layer. plan: as any other batch, by `mode`. auto: replicated unless `mode` names a mode;
    # for prompts only if CUDA graphs can be used, and never with exact_reuse.
    decode: str = choice("auto", ("auto", "replicated", "plan"))
    # Draft up to this many tokens per step from the text so far (prompt lookup) and compute them together; the tokens
    # that are generated stay the same. It pays for answers that repeat parts of their prompt. 0: off
    speculate: int = number(0, 0, 15)
    # Replay replicated steps from CUDA graphs: auto (if possible, else the log says why not) | true | false
    cuda_graphs: str = choice("auto", ("auto", "true", "false"))
    # Context-parallel ranks share the weights as tensor-parallel ranks do, instead of holding all of them (Helix
    # Parallelism). Each rank then holds and reads 1 / (context x tensor) of them for a token; prompts gather one layer
    # at a time.
    shard_weights: bool = False
    # How blocks travel between context-parallel ranks, as attention.transport.
    transport: str = choice("auto", TRANSPORTS)
    # What the weights of layers are: exact (as in the checkpoint, in train.precision) | fp8 (E4M3, with a scale for
    # every output; products then quantize every token as well). fp8 takes half the memory of bf16. It is faster for
    # prompts and for one sequence, not for batches.
    weights: str = choice("exact", ("exact", "fp8"))
    page_tokens: int = number(64, 1, 2**20)  # tokens per page of the KV cache
    # Size of the cache of all context-parallel ranks together. null: `generate` and `eval` as their prompts need;
    # otherwise on GPUs 90% of what is free beside weights and activations, on CPUs four sequences of max_model_len, but
    # at most 1/8 of the host's memory.
    cache_tokens: int | None = number(None, 1, 10**10)
    # Maximum number of new tokens per sequence computed at once; null: 65,536 per rank, over all sequences.
    prefill_chunk: int | None = number(None, 1, _MAX_COUNT)
    # States of recurrent layers that every context-parallel rank holds, beside the cache. A sequence takes up to three
    # while it is computed; the others are for prefixes that later prompts may continue.
    recurrent_states: int = number(48, 4, 10**6)
    # A file with a Jinja template for chats; null: the tokenizer's own, else plain text with one message per line.
    chat_template: str | None = path(None)
    # Give a prompt bit-identical logits whether or not its prefix is in the cache: only whole chunks of prefill_chunk
    # tokens, from the first token on, are reused, and prompts are computed one by one. false: reuse everything.
    exact_reuse: bool = False


@dataclass(frozen=True)
class ServeConfig:
    """`megatron-longctx serve`. API keys come from the environment variable MEGATRON_LONGCTX_API_KEY, one per line."""

    host: str = text("127.0.0.1")  # an address other than loopback requires an API key
    port: int = number(8000, 0, 65_535)  # 0: any free port
    api_keys: str | None = path(None)  # a file with more keys, one per line
    # Names by which clients may call the server (their `Host`), separated by commas; `*`: any. null: on a
    # loopback address only names and addresses of this host, otherwise any.
    allowed_hosts: str | None = text(None, max_bytes=2000)
    # Origins of web pages that may call the server (CORS), such as https://chat.example, separated by commas.
    allowed_origins: str | None = text(
        None, "origins with commas between", rf"{_ORIGIN}(, *{_ORIGIN})*", 2000, "https://chat.example"
    )
    served_model_name: str | None = text(None, max_bytes=200)  # the model's name for clients; null: the run's folder
    max_active: int = number(16, 1, 4096)  # sequences computed together
    max_waiting: int = number(64, 1, 10**6)  # open requests, including active ones; more get 429
    max_connections: int = number(128, 1, 10**6)  # maximum number of open connections; more are refused
    max_body_bytes: int = number(16 * 2**20, 1, 2**32)  # maximum size of a request; longer ones get 413
    # Time limit for a client to send a request's head, to send its body, to stay silent, and to read.
    timeout_s: float = number(30.0, 1, SECONDS_PER_YEAR)
    # If ranks complete no layer for this long, `/ready` and new requests get 503; at most half of
    # parallelism.timeout_s. Running requests wait.
    stalled_s: float = number(10.0, 0, SECONDS_PER_YEAR, above=True)
    # The longest time that a long prompt may delay a short one, or the next token of an answer. The chunks of
    # prompts are sized by measured times to hold it, unless inference.prefill_chunk sets their size.
    max_delay_s: float = number(2.0, 1e-3, SECONDS_PER_YEAR)
    # Host memory of each rank in GiB, pinned on GPUs, for copies of the cache's pages. A prompt gets them back whose
    # pages had to give way. 0: none.
    host_cache_gib: float = number(0.0, 0, 10**5)


@dataclass(frozen=True)
class LoggingConfig:
    """Where a run's figures go."""

    # Where W&B writes: to a folder (offline), to its server (online) or nowhere (disabled). auto: as W&B's own
    # settings say, but offline without a login. W&B's environment, such as WANDB_MODE, wins over all of these keys.
    wandb: str = choice("auto", ("auto", "offline", "online", "disabled"))
    wandb_entity: str | None = text(None, max_bytes=128)  # user or team in W&B; null: W&B's default
    # project in W&B
    wandb_project: str = text("megatron-longctx", "a project of W&B, 1 to 128 letters", r"[^/\\#?%:]{1,128}")
    wandb_notes: str | None = text(None, max_bytes=2000)  # a description of the run
    wandb_checkpoints: bool = False  # record the place of every checkpoint in W&B, as an artifact without its files
    wandb_group: str | None = text(None)  # null: the sweep's name, else the experiment's, else the model and length
    wandb_job_type: str | None = text(None, max_bytes=64)  # null: the mode, by which tables and panels group runs
    # null: model, mode, layout, cp/tp/pp/dp, hardware and precision.
    wandb_tags: str | None = text(None, "tags of 1 to 64 letters, commas between", rf"{_TAG}(,{_TAG})*", 2000)
    tensorboard: bool = False  # write events to runs/<name>/tensorboard; requires the package tensorboard
    peak_tflops: float | None = number(None, 1e-3, 1e9)  # Peak per GPU, dense, for MFU; null: looked up by device name.
    # the step that rank 0 profiles into runs/<name>/profile; null: none
    profile_step: int | None = number(None, 1, 10**9)


@dataclass(frozen=True)
class RunConfig:
    # the run's folder inside run.root
    name: str = text("default", "a plain folder name of at most 200 bytes", r"(?!\.{1,2}$)[^/]+")
    root: str = path("runs")  # folder of all runs


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
    def keep_received(self) -> bool | None:
        """`attention.keep_received`, but False if attention's forward runs without a graph. None: what pays."""
        without_graph = self.recompute.mode.startswith("attention_output")
        return False if without_graph else SWITCHES[self.attention.keep_received]

    @property
    def layout(self) -> str:
        """`parallelism.layout`, but contiguous in place of auto for models with recurrent layers."""
        is_auto = self.parallelism.layout == "auto"
        return "contiguous" if is_auto and self.model.recurrent else self.parallelism.layout

    @property
    def sum_in_node(self) -> bool | None:
        """`attention.sum_in_node`. None: what pays."""
        return SWITCHES[self.attention.sum_in_node]

    @property
    def no_param_gather(self) -> str | None:
        """The setting that rules out gathering parameters during the next forward, or None."""
        if not self.optim.distributed:
            return "optim.distributed=false"
        return None if self.parallelism.overlap_grad_reduce else "parallelism.overlap_grad_reduce=false"

    @property
    def overlap_param_gather(self) -> bool:
        """`parallelism.overlap_param_gather` with auto resolved."""
        setting = self.parallelism.overlap_param_gather
        return self.no_param_gather is None if setting == "auto" else setting == "true"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
