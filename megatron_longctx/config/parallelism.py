"""The keys `parallelism.*`, `attention.*`, `recompute.*` and `reduction.*`: how ranks divide a model's computation."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.layout import LAYOUTS
from ..core.plans.modes import MODES, outer_modes
from .bounds import Switches, choice, number, path, text

MAX_RANKS = 1024
SECONDS_PER_YEAR = 31_536_000.0
TRANSPORTS = ("auto", "peer", "p2p")
SWITCHES: dict[str, bool | None] = {"auto": None, "true": True, "false": False}
"""The words of a key that is decided automatically unless it is set, and the arguments that they stand for."""
RECOMPUTES = ("none", "layer", "attention_output", "attention_output+offload")
REDUCTIONS = ("none", "int8", "int6", "int4", "auto")


@dataclass(frozen=True)
class ParallelismConfig(Switches):
    """How ranks are divided. `data_parallel_size: null` is the remaining factor of the world size."""

    context_parallel_size: int = number(1, 1, MAX_RANKS)  # ranks that shard a sequence
    tensor_parallel_size: int = number(1, 1, MAX_RANKS)  # ranks that shard heads and matrices
    pipeline_parallel_size: int = number(1, 1, MAX_RANKS)  # ranks that divide the layers
    # Ranks that share the experts, each with some whole experts: neighbours in context and data parallelism.
    expert_model_parallel_size: int = number(1, 1, MAX_RANKS)
    expert_tensor_parallel_size: int | None = number(None, 1, MAX_RANKS)  # null: tensor_parallel_size
    data_parallel_size: int | None = number(None, 1, 10**5)  # replicas; null: the remaining factor of the world size
    sequence_parallel: bool = True  # only has an effect when tensor_parallel_size > 1
    # ... or auto: the fastest in simulation, from a calibration (`megatron-longctx calibrate`) or, without one,
    # from `cluster`.
    schedule: str = choice("zigzag", MODES, "auto")
    # Which rank holds which token. auto: the layout that balances the schedule; for packed documents `balanced`,
    # if the schedule supports it.
    layout: str = choice("auto", LAYOUTS, "auto")
    # all_gather only: maximum number of remote K/V tokens that a rank holds at once; null: all of them, in one group.
    max_buffer_tokens: int | None = number(None, 2, 10**9)
    # double_ring, node_gather: ranks of a node; usp: ranks that share the heads. null: as many as a node of `cluster`
    # has, or the largest proper divisor of context_parallel_size up to 8.
    inner_size: int | None = number(None, 1, MAX_RANKS)
    # node_gather only: steps in which the keys of all other nodes cross, several nodes at a time or each in pieces;
    # null: one node at a time.
    rounds: int | None = number(None, 1, 256)
    # auto only: maximum memory of one attention call on a rank; null: no limit
    max_attention_gib: float | None = number(None, 0, 1e6, above=True)
    outer_schedule: str = choice("zigzag", outer_modes())  # usp only: the mode between its groups
    # How ranks are linked: a name in recipes/cluster, or a file of the same form. tasp chooses its rings by it.
    # null: every pair of ranks has its own link.
    cluster: str | None = path(None)
    overlap_grad_reduce: bool = True  # Reduce gradients during backward, bucket by bucket (Megatron's DDP).
    # Gather updated parameters during the next forward, bucket by bucket: auto (if overlap_grad_reduce and
    # optim.distributed, which it requires, are on) | true | false
    overlap_param_gather: str = choice("auto", SWITCHES)
    timeout_s: float = number(600.0, 1, SECONDS_PER_YEAR)  # a collective that takes longer fails the job

    @property
    def model_parallel_size(self) -> int:
        return self.context_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tensor_size_of_experts(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_parallel_size

    @property
    def uses_sequence_parallel(self) -> bool:
        return self.sequence_parallel and self.tensor_parallel_size > 1


@dataclass(frozen=True)
class AttentionConfig(Switches):
    # auto, or the name of a provider: fa4 | cudnn | flash | cpu | reference
    kernel: str = text("auto", "auto or the name of a kernel", r"[a-z][a-z0-9_]*")
    deterministic: bool = False  # bit-identical results from run to run; slower
    # How blocks travel: peer (the copy engine pulls them from peer memory), p2p (batched messages over NCCL or
    # gloo), auto (peer if all ranks of the group can use it, both if only some can, otherwise p2p; the log says
    # which and why).
    transport: str = choice("auto", TRANSPORTS)
    # In inference on several context-parallel ranks, store and send keys and values as 8-bit integers with a
    # scale for every token and head: half the bytes of bf16, but not exact. Training does not change.
    kv_int8: bool = False
    # Whether a call keeps blocks received from other ranks for its backward, which then does not exchange them
    # again: auto (with ulysses, up to 32,768 tokens per rank; this needs the memory of one more output) | true |
    # false. With recompute=attention_output nothing can be kept: forward runs without a graph.
    keep_received: str = choice("auto", SWITCHES)
    # Whether partial gradients that ranks of a node have for a rank of another node are summed within the node
    # and sent as one message: auto (if parallelism.cluster has several nodes whose ranks have faster links to
    # each other than their share of the network) | true | false.
    sum_in_node: str = choice("auto", SWITCHES)
    # For ablations, in training: false waits for each step's messages before anything is computed beside them.
    overlap: bool = True


@dataclass(frozen=True)
class RecomputeConfig:
    """What is kept between forward and backward; the rest is recomputed.

    none: all activations. layer: each layer's input (Megatron's full recompute). attention_output: each layer's input
    and attention's output, so that attention runs once. attention_output+offload: both wait in pinned host memory,
    and two layers' worth stays on the device (docs/memory.md).
    """

    mode: str = choice("none", RECOMPUTES)  # what a layer keeps for backward: see above
    # The share of attention's results that attention_output keeps: those of the last tokens of each document on a rank.
    # Those of the first tokens are computed again. They see few keys: on one rank, 0.5 takes a quarter of the time.
    kept_results: float = number(1.0, 0, 1, above=True)
    # Maximum number of tokens (times sequences) per rank whose logits exist at once, in forward and again in
    # backward. null: all.
    head_chunk_tokens: int | None = number(None, 1, 10**9)
    # Maximum number of tokens (times sequences) per rank that pass through an MLP at once. Its activations are
    # not kept but recomputed in backward. null: all.
    mlp_tile_tokens: int | None = number(None, 1, 10**9)


@dataclass(frozen=True)
class ReductionConfig:
    """How the outputs of row-parallel layers are summed over tensor-parallel ranks: exactly, or as integers (Flash
    Communication), which is faster on slow links but not exact. Only in inference, unless `in_training`."""

    # for attention; auto: the fastest at each size, of exact sums, int8, and int4 in groups of 32
    output_projection: str = choice("none", REDUCTIONS)
    down_projection: str = choice("none", REDUCTIONS)  # for the MLP, which is harder to quantize because of outliers
    group_size: int = choice(128, (32, 64, 128))  # neighbouring values that share a range; 128 sends the fewest bytes
    symmetric: bool = False  # use ranges that are symmetric around zero
    min_kib: float = number(64.0, 0, 1e12)  # smaller tensors are summed exactly
    in_training: bool = False  # also quantize in training's forward; gradients pass as through the exact sum
    # How integers travel: peer (GPUs of one host write to each other's memory), collective (all-to-all and
    # all-gather of the process group), auto (peer if possible).
    transport: str = choice("auto", ("auto", "peer", "collective"))
