"""Losses of a run's model by position, and log-probabilities of tokens: training's forward pass, without a cache."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import Tensor

from ..config import Config, RecomputeConfig
from ..config.progress import Progress
from ..core.errors import refuse
from ..inference.loss_ranges import Losses, edges
from .data import TrainingBatch, TrainingData
from .fp8 import check_fp8
from .head import ChunkedHead, Head, chunked_entropy
from .inference import load_model, refuse_training_sizes
from .model import padded_vocab_size
from .sequence import ShardedSequence, build_sequence
from .step import EvalStep, token_losses

_HEAD_CHUNK_TOKENS = 4096


def losses_config(config: Config) -> Config:
    """Return a run's configuration for its losses: with its context-parallel mode, and nothing kept for backward.
    Refuse parallel sizes that only training supports."""
    par, recompute = config.parallelism, config.recompute
    refuse_training_sizes(par)
    check_fp8(config)
    if config.model.latent and par.tensor_parallel_size > 1:
        key, expected = "parallelism.tensor_parallel_size", f"1 with model.kv_lora_rank={config.model.kv_lora_rank}"
        raise refuse(key, par.tensor_parallel_size, expected, "Take context parallelism.")
    return replace(
        config,
        parallelism=replace(
            par,
            data_parallel_size=1,
            sequence_parallel=False,  # lengths need not be divisible
            overlap_grad_reduce=False,
            overlap_param_gather="false",
        ),
        recompute=RecomputeConfig(
            head_chunk_tokens=recompute.head_chunk_tokens or _HEAD_CHUNK_TOKENS,
            mlp_tile_tokens=recompute.mlp_tile_tokens,
        ),
        train=replace(config.train, micro_batch_size=1, global_batch_size=1, eval_interval=None),
    )


@torch.no_grad()
def label_logprobs(model: Any, sequence: ShardedSequence, batch: TrainingBatch, entropy: bool = False) -> Tensor:
    """Return the log-probabilities of a whole micro-batch's labels. Collective over context- and tensor-parallel ranks.

    With `recompute.head_chunk_tokens` (`head.ChunkedHead`), the logits of that many tokens exist at the same time.

    Args:
        model: a Megatron GPT with context-parallel attention, and with all of its layers.
        batch: packs may be trees, which compute shared prefixes once.
        entropy: also compute the entropy of each prediction, in nats, which takes the head's product once more, in
            chunks of `head_chunk_tokens`, or of 4,096 tokens in a model without them.

    Returns:
        fp32 `[b, S]`, of the whole sequence on every rank; with `entropy` `[2, b, S]`, log-probabilities and entropies.
    """
    found: list[Tensor] = []
    with _entropies(model, found) if entropy else nullcontext():
        losses, _, pack = token_losses(batch, model, sequence)
    values = -losses.float()
    return sequence.attention.gather(torch.stack((values, found[-1])) if entropy else values, pack.mask(), dim=-1)


@contextmanager
def _entropies(model: Any, found: list[Tensor]) -> Iterator[None]:
    """Add the entropies `[b, s]` to `found` whenever the model's output layer runs."""
    (gpt,) = unwrap_model([model])
    plain = Head(gpt.pg_collection.tp, gpt.config.sequence_parallel, _HEAD_CHUNK_TOKENS)
    head = gpt.head if isinstance(gpt, ChunkedHead) else plain

    def compute(layer: Any, given: tuple[Any, ...], named: dict[str, Any], _: Any) -> None:
        hidden = given[0] if given else named["input_"]
        weight = named.get("weight")
        found[:] = [chunked_entropy(hidden, layer.weight if weight is None else weight, head).transpose(0, 1)]

    hook = gpt.output_layer.register_forward_hook(compute, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def with_seq_length(config: Config, length: int) -> Config:
    """Return the configuration with samples of `length` tokens."""
    return replace(config, data=replace(config.data, seq_length=length))


class LossesByPosition:
    """A run's model, which computes losses. Construction and every call are collective.

    config: the result of `losses_config`.
    part: the part of `data.split`: 0 for training, 1 for validation.
    """

    def __init__(
        self,
        config: Config,
        groups: ProcessGroupCollection,
        checkpoints: Path,
        iteration: int | None = None,
        part: int = 0,
    ) -> None:
        sequence = build_sequence(config, groups.cp)
        gpt, self._tokenizer = load_model(config, groups, sequence, checkpoints, iteration)
        self._config, self._part = config, part
        self._step = EvalStep([gpt], sequence, groups, micro_batch_size=1)

    def __call__(self, length: int, samples: int) -> Losses:
        """Return the losses of the first samples, in the order of `train.seed`, with `length` tokens each."""
        vocab_size = padded_vocab_size(self._config.model, self._tokenizer.vocab_size)
        data = TrainingData(with_seq_length(self._config, length), self._tokenizer, vocab_size, self._part)
        with Progress(f"losses of {length:,} tokens", samples, "samples", told=dist.get_rank() == 0) as progress:

            def read(number: int) -> TrainingBatch:
                progress.done = number
                return data[[number]]

            table = self._step.run(read, range(samples), samples, edges(length)).sum(0)
        return Losses(length, table[:, 0].tolist(), table[:, 1].tolist())

    def logprobs(self) -> Iterator[tuple[TrainingBatch, Tensor]]:
        """Yield every sample of one pass with its log-probabilities and entropies `[2, b, S]`, in the order of
        `train.seed`."""
        vocab_size = padded_vocab_size(self._config.model, self._tokenizer.vocab_size)
        data = TrainingData(self._config, self._tokenizer, vocab_size, self._part)
        model = self._step.models[0].eval()
        for number in range(data.size):
            batch = data[[number]]
            yield batch, label_logprobs(model, self._step.sequence, batch, entropy=True)

    def release(self) -> None:
        """Free the model."""
        del self._step
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
