"""How ranks are divided and how attention's tokens travel among them: the keys `parallelism.*`."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import LAYOUTS
from ..schedules.modes import MODES, outer_modes
from .bounds import choice, number, path

MOST_RANKS = 1024
YEAR_S = 31_536_000.0


@dataclass(frozen=True)
class ParallelismConfig:
    """How ranks are divided. `data_parallel_size: null` is the remaining factor of the world size."""

    context_parallel_size: int = number(1, 1, MOST_RANKS)
    tensor_parallel_size: int = number(1, 1, MOST_RANKS)
    pipeline_parallel_size: int = number(1, 1, MOST_RANKS)
    # Ranks that share the experts, each with some whole experts: neighbours in context and data parallelism.
    expert_model_parallel_size: int = number(1, 1, MOST_RANKS)
    expert_tensor_parallel_size: int | None = number(None, 1, MOST_RANKS)  # null: tensor_parallel_size
    data_parallel_size: int | None = number(None, 1, 10**5)
    sequence_parallel: bool = True  # only has an effect when tensor_parallel_size > 1
    # ... or auto: the fastest in simulation, from a calibration (`megatron-longctx calibrate`) or, without one,
    # from `cluster`.
    schedule: str = choice("zigzag", MODES, "auto")
    # Which rank holds which token. auto: the layout that balances the schedule; for packed documents `balanced`,
    # if the schedule supports it.
    layout: str = choice("auto", LAYOUTS, "auto")
    # all_gather only: maximum number of remote K/V tokens that a rank holds at once; null: all of them, in one
    # group.
    max_buffer_tokens: int | None = number(None, 2, 10**9)
    # double_ring: ranks of an inner ring; usp: ranks that share the heads. null: those of a node of `cluster`, or
    # the largest proper divisor of context_parallel_size up to 8.
    inner_size: int | None = number(None, 1, MOST_RANKS)
    # ulysses only: number of parts in which a rank's heads are exchanged, each during attention of the previous
    # one.
    head_chunks: int = number(1, 1, 10**5)
    # auto only: maximum memory of one attention call on a rank; null: no limit
    max_attention_gib: float | None = number(None, 0, 1e6, above=True)
    outer_schedule: str = choice("zigzag", outer_modes())  # usp only: the mode between its groups
    # How ranks are linked: a name in recipes/cluster, or a file of the same form. tasp chooses its rings by it.
    # null: every pair of ranks has its own link.
    cluster: str | None = path(None)
    overlap_grad_reduce: bool = True  # Reduce gradients during backward, bucket by bucket (Megatron's DDP).
    # Gather updated parameters during the next forward, bucket by bucket: auto (if overlap_grad_reduce and
    # optim.distributed, which it requires, are on) | true | false
    overlap_param_gather: str = choice("auto", ("auto", "true", "false"))
    timeout_s: float = number(600.0, 1, YEAR_S)  # a collective that takes longer fails the job

    def __post_init__(self) -> None:
        # `true`, read as a truth value, becomes the text `True`.
        object.__setattr__(self, "overlap_param_gather", str(self.overlap_param_gather).lower())

    @property
    def model_parallel_size(self) -> int:
        return self.context_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tensor_size_of_experts(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_parallel_size

    @property
    def uses_sequence_parallel(self) -> bool:
        return self.sequence_parallel and self.tensor_parallel_size > 1
