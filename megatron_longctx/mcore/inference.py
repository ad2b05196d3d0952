"""Megatron's GPT over a sharded cache: its own layers, with other core attention and positions.

Megatron's own inference refuses context parallelism, so the model runs a plain forward pass over the new tokens.
"""

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
from megatron.core.transformer import MegatronModule
from torch import Tensor

from ..config import Config, ModelConfig, ParallelismConfig, RecomputeConfig, trained_length
from ..config.cluster import GIB
from ..config.gpus import refuse_peer
from ..core.errors import refuse
from ..core.plans.mask import Window
from ..inference.cache_manager import MAX_CONTIGUOUS, CacheManager
from ..inference.cached_attention import CachedAttention
from ..inference.choose_cache_mode import Chooser
from ..inference.engine import LongContextEngine
from ..inference.memory import cache_shape, free_pages, pages_per_rank, state_shape, windows_of, with_shared_weights
from ..inference.sampling import PromptScorer
from ..inference.states import RecurrentStates
from . import checkpoint
from .core_attention import layer_window
from .direct import AttentionFn, DirectLayer, SharedWeights, Stream, why_not_direct
from .fp8 import check_fp8, quantize_layers, stored_bytes
from .groups import share_weights
from .model import RETRAINABLE, build_model, fingerprint, padded_vocab_size, transformer_config
from .recurrent import RecurrentMixer
from .rope import Rotation, Rotations
from .row_parallel import ReducedRowParallelLinear
from .sequence import ShardedSequence, build_sequence
from .step import local_device
from .tokenizer import build_tokenizer

logger = logging.getLogger(__name__)

_HEAD_ROWS = 512
"""The most tokens of a prompt whose logits exist together: 250 MB in fp32 with 128K entries of a vocabulary."""
_EMBEDDED_ROWS = 16_384
"""The most tokens of a prompt, of all ranks that share the weights, that are embedded together."""


class CachedCoreAttention(MegatronModule):  # type: ignore[misc]
    """Attention over the cache, in place of a built layer's core attention.

    Attributes:
        layer: the layer's number among those with attention, from 0.
        rotations: RoPE of the current pass's new tokens, or None.
    """

    def __init__(self, original: Any, layer: int, attention: CachedAttention, shares: SharedWeights | None) -> None:
        super().__init__(config=original.config)
        self.layer = layer
        assert original.window[0] == attention.shape.window(layer), "the cache has the windows of the model's layers"
        self.softmax_scale = original.softmax_scale
        sinks = original.softmax_offset
        self.softmax_offset = sinks if shares is None else shares.all_heads(sinks)
        self.rotations: Rotations | None = None
        self._rotates, self.window = original.rotates, original.window
        self._attention = attention

    def rotate_and_attend(self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
        """See `direct.AttentionFn`: rotate, store and attend."""
        attention, of = self._attention, (self.softmax_scale, self.softmax_offset)
        if rotation is not None:
            place = attention.place(self.layer)
            rotated = None if place is None else rotation.rotate_into(q, k, v, *place)
            if rotated is not None:
                return attention(self.layer, rotated.flatten(2, 3), None, None, *of)
            q, k = rotation.rotate_both(q, k)
        return attention(self.layer, q.flatten(2, 3), k.squeeze(3), v.squeeze(3), *of)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return `[s, 1, h/tp * d]` of query `[s, 1, h/tp, d]` and key, value `[s, 1, g/tp, d]`; the plan masks."""
        if self.rotations is not None and self._rotates and query.shape[0]:
            rotation = self.rotations.of(self.window)
            query, key = rotation(query), rotation(key)
        sink = self.softmax_offset
        return self._attention(self.layer, query, key, value, self.softmax_scale, sink).flatten(2)


class CachedGPT:
    """A GPT of one pipeline stage whose attention goes through the cache. See `inference.cached_attention.CachedModel`.

    Args:
        gpt: built by `model.build_model` without sequence parallelism; it can no longer train.
        vocab_size: entries that have a meaning; the engine never generates the padding of the embedding.
        max_positions: see `CachedModel`.
        shares: of the ranks of a cache that share the weights; None if each has all of them.

    Raises:
        ValueError: weights are shared, and the layers are not plain ones.
    """

    def __init__(
        self,
        gpt: GPTModel,
        attention: CachedAttention,
        vocab_size: int,
        max_positions: int | None,
        shares: SharedWeights | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.attention = attention
        self._gpt, self._shares = gpt, shares
        self._cores: list[CachedCoreAttention] = []
        self._mixers: list[CachedCoreAttention | RecurrentMixer] = []
        for layer in gpt.decoder.layers:
            inner, number = layer.self_attention, len(self._cores)
            if isinstance(inner, RecurrentMixer):
                inner.states, inner.number = attention.states, len(self._mixers) - number
            else:
                inner.core_attention = CachedCoreAttention(inner.core_attention, number, attention, shares)
                self._cores.append(inner.core_attention)
            self._mixers.append(inner if isinstance(inner, RecurrentMixer) else inner.core_attention)
        gpt.post_process = False  # return hidden states: the logits of all tokens of a long prompt would not fit
        gpt.eval()
        self._layers = self._direct_layers(gpt)

    def _direct_layers(self, gpt: GPTModel) -> list[tuple[DirectLayer, Window, AttentionFn]] | None:
        """Return each layer with its window and attention; None to run Megatron's own layers."""
        why = why_not_direct(gpt, shared=self._shares is not None)
        if why is not None and self._shares is not None:
            remedy = "Leave it out, or set model.implementation=local if layers are TransformerEngine's."
            raise refuse("inference.shard_weights", True, f"false, because {why}", remedy)
        if why is not None:
            logger.info("layers run as Megatron's own, which takes the host longer: %s", why)
            return None
        return [
            (DirectLayer(layer, self._shares), core.window, core.rotate_and_attend)
            for layer, core in zip(gpt.decoder.layers, self._cores, strict=True)
        ]

    def reduced(self) -> list[ReducedRowParallelLinear]:
        """Return the layers that were built with a reduction; `set_policy` must be called on all ranks."""
        return [module for module in self._gpt.modules() if isinstance(module, ReducedRowParallelLinear)]

    def logits(self, tokens: Tensor, positions: Tensor, rows: Tensor, scorer: PromptScorer | None = None) -> Tensor:
        """See `inference.cached_attention.CachedModel.logits`."""
        found = self._logits(tokens, positions, rows, scorer)
        return found.to(torch.float32, copy=True)  # outlives the pass: a tensor like any other

    @property
    def _gathers(self) -> SharedWeights | None:
        """The shared weights if ranks have different tokens in this pass; None if each uses its own weights."""
        return None if self.attention.is_replicated else self._shares

    @torch.inference_mode()
    def _logits(self, tokens: Tensor, positions: Tensor, rows: Tensor, scorer: PromptScorer | None) -> Tensor:
        if not tokens.numel() and self._gathers is None:
            self._attend_without_tokens()
            return torch.empty(0, self.vocab_size, device=tokens.device)
        hidden = self._hidden(tokens, positions)
        if scorer is not None:
            for start, logits in self._heads(hidden, scorer.rows):
                scorer.add(start, logits)
        wanted = [logits for _, logits in self._heads(hidden, rows)]
        return torch.cat(wanted) if wanted else torch.empty(0, self.vocab_size, device=tokens.device)

    def _heads(self, hidden: Tensor, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the logits `[at most 512, vocab_size]` of some rows of hidden states `[s, 1, h]`, and where in `rows`
        they begin."""
        if shares := self._gathers:
            yield from shares.together(rows, _HEAD_ROWS, self._head, hidden.__getitem__)
        else:
            for start in range(0, len(rows), _HEAD_ROWS):
                yield start, self._head(hidden[rows[start : start + _HEAD_ROWS]])

    def _head(self, hidden: Tensor) -> Tensor:
        """Return the logits `[s, vocab_size]` of hidden states `[s, 1, h]`."""
        weight = None
        if self._gpt.share_embeddings_and_output_weights:
            weight = self._gpt.shared_embedding_or_output_weight()
        logits: Tensor = self._gpt.output_layer(hidden, weight=weight, runtime_gather_output=True)[0]
        return logits[:, 0, : self.vocab_size]

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return `[s, 1, h]` of tokens and positions `[s]`."""
        embedding = self._gpt.embedding
        if (shares := self._gathers) is None:
            return embedding(tokens[None], positions[None])  # type: ignore[no-any-return]
        both = torch.stack((tokens, positions), 1)
        parts = shares.together(both, _EMBEDDED_ROWS, lambda each: embedding(each[None, :, 0], each[None, :, 1]))
        found = [part for _, part in parts]
        dtype, width = self.attention.shape.dtype, self._gpt.config.hidden_size
        return torch.cat(found) if found else torch.empty(0, 1, width, dtype=dtype, device=tokens.device)

    def _hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the normalized hidden states `[s, 1, h]` of tokens and positions `[s]`."""
        gpt, shares, rotations = self._gpt, self._gathers, None
        if gpt.position_embedding_type == "rope":
            rotations = gpt.rotary_pos_emb.rotations(positions.to(gpt.rotary_pos_emb.inv_freq.device))
        if self._layers is None:
            for core in self._cores:
                core.rotations = rotations
            return gpt(tokens[None], positions[None], None)  # type: ignore[no-any-return]
        hidden = self._embed(tokens, positions)
        if not len(hidden):
            self._attend_without_tokens()
            return hidden
        norms = [*(layer.input_norm for layer, *_ in self._layers), gpt.decoder.final_layernorm]
        stream = Stream(hidden, norms[0](hidden))
        for number, (layer, window, attend) in enumerate(self._layers):
            weights = None if shares is None else shares.layer(number)
            layer(stream, None if rotations is None else rotations.of(window), attend, norms[number + 1], weights)
        return stream.take()

    def _attend_without_tokens(self) -> None:
        """Take part in the other ranks' attention, without launching other kernels on empty tensors."""
        shape, device = self.attention.shape, self.attention.device
        q = torch.empty(0, 1, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device)
        kv = torch.empty(0, 1, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=device)
        for number, mixer in enumerate(self._mixers):
            if self._shares is not None and self._shares.collective:
                self._shares.layer(number)
            if isinstance(mixer, CachedCoreAttention):
                mixer(q, kv, kv)
            elif mixer.states is not None:
                mixer.without_tokens()


def inference_config(config: Config) -> Config:
    """Return a run's configuration without the settings of training.

    Raises:
        ValueError: sizes or settings that inference does not support.
    """
    par = config.parallelism
    refuse_training_sizes(par)
    check_fp8(config)
    if config.model.latent:
        remedy = "MLA supports training and evaluation by `loss_by_position` only."
        raise refuse("model.kv_lora_rank", config.model.kv_lora_rank, "null for inference", remedy)
    if all(config.model.recurrent_layers):
        remedy = "Without attention there is no cache: train and evaluate it by `loss_by_position`."
        raise refuse("model.pattern", config.model.pattern, "a layer * for inference", remedy)
    if config.train.device == "cpu" or not torch.cuda.is_available():
        refuse_peer(config, "inference.transport")
        if config.inference.cuda_graphs == "true":
            raise refuse("inference.cuda_graphs", "true", "auto or false on CPUs", "Only GPUs have CUDA graphs.")
    plain = ParallelismConfig(
        context_parallel_size=par.context_parallel_size,
        tensor_parallel_size=par.tensor_parallel_size,
        data_parallel_size=1,
        expert_tensor_parallel_size=tensor_size_of_experts(config.model),
        sequence_parallel=False,  # a rank's number of tokens need not be a multiple of the size
        cluster=par.cluster,
        timeout_s=par.timeout_s,
    )
    inference = config.inference
    if inference.shard_weights:
        _check_shared_weights(config)
    if config.model.num_moe_experts is not None:  # the host reads how many tokens each expert gets
        if inference.cuda_graphs == "true":
            raise refuse("inference.cuda_graphs", "true", "auto or false with experts", "Set it to auto.")
        inference = replace(inference, cuda_graphs="false")
    return replace(config, parallelism=plain, recompute=RecomputeConfig(), inference=inference)


def _check_shared_weights(config: Config) -> None:
    """Refuse `inference.shard_weights` with what reads all weights for every token, or has no shards."""
    inference, key = config.inference, "inference.shard_weights"
    if config.model.num_moe_experts is not None:
        raise refuse(key, True, "false with experts (model.num_moe_experts)", "Use tensor parallelism for them.")
    if inference.weights == "fp8":
        raise refuse(key, True, "false with inference.weights=fp8", "Weights in FP8 are not gathered for prompts yet.")
    if inference.decode == "plan" or (inference.decode == "auto" and inference.mode != "auto"):
        expected = f"false with inference.decode={inference.decode} and inference.mode={inference.mode}"
        raise refuse(key, True, expected, "Set inference.decode=replicated: plans gather all weights for every token.")


def tensor_size_of_experts(model: ModelConfig) -> int | None:
    """Return `parallelism.expert_tensor_parallel_size` without training: every rank holds whole experts if they have
    biases, which Megatron cannot shard."""
    return 1 if model.num_moe_experts is not None and model.bias else None


def refuse_training_sizes(par: ParallelismConfig) -> None:
    """Raise ValueError for pipeline or data parallelism, which only training supports."""
    if par.pipeline_parallel_size != 1:
        remedy = "Set it to 1; checkpoints load at any sizes."
        raise refuse("parallelism.pipeline_parallel_size", par.pipeline_parallel_size, "1 for inference", remedy)
    if par.data_parallel_size not in (None, 1):
        raise refuse("parallelism.data_parallel_size", par.data_parallel_size, "1 for inference", "Set it to 1.")


def with_length(config: Config, run: Config) -> Config:
    """Return the configuration with a number for `inference.max_model_len`. run: the configuration that was trained.

    Raises:
        ValueError: it is set to more positions than the model has learned.
    """
    inference, most = config.inference, trained_length(run, config.model.rope_scaling)
    asked = inference.max_model_len or most
    if asked > most and config.model.position_embedding == "learned":
        expected = f"at most {most}, the positions that the model has learned"
        raise refuse("inference.max_model_len", asked, expected, "Leave it null.")
    return replace(config, inference=replace(inference, max_model_len=asked))


def build_engine(
    config: Config, groups: ProcessGroupCollection, checkpoints: Path | None, iteration: int | None = None
) -> tuple[LongContextEngine, MegatronTokenizerText]:
    """Build the engine of a run's model, and its tokenizer. Collective over the world.

    Args:
        config: a configuration that `inference_config` returned.
        checkpoints: the folder of checkpoints, saved at any sizes; None leaves weights random.
        iteration: the checkpoint to load; None for the latest.

    With `inference.shard_weights` and several context-parallel ranks, `groups` are replaced (`groups.share_weights`).

    Raises:
        ValueError: no checkpoint, a checkpoint of another model, or a cache that does not fit.
    """
    model, inference, n = config.model, config.inference, groups.cp.size()
    device, cache_group, shared = local_device(), groups.cp, None
    if inference.shard_weights and n > 1:
        shared = share_weights(n)
        groups, cache_group = shared.megatron, shared.cache
    of_model = with_shared_weights(config)
    gpt, tokenizer = load_model(of_model, groups, build_sequence(of_model, groups.cp), checkpoints, iteration)
    shares = None if shared is None else SharedWeights(gpt, shared, inference.transport)
    longest = inference.max_model_len or config.data.seq_length
    pages = free_pages(config, longest, device) if inference.cache_tokens is None else pages_per_rank(config)
    kept = windows_of(config, pages)
    contiguous = sys.maxsize if model.recurrent else MAX_CONTIGUOUS  # recurrent layers read tokens in order
    manager = CacheManager(n, pages, inference.page_tokens, contiguous, inference.exact_reuse, kept)
    numbers = (number for number, recurrent in enumerate(model.recurrent_layers, 1) if not recurrent)
    shape = replace(cache_shape(config), windows=tuple(layer_window(gpt.config, number)[0] for number in numbers))
    slots, kernel = manager.slots, config.attention.kernel
    attention = CachedAttention(cache_group, shape, slots, device, kernel, inference.transport, shared is not None)
    if model.recurrent:
        attention.states = RecurrentStates(cache_group, state_shape(config), inference.recurrent_states, device)
    most = inference.max_model_len
    if model.position_embedding == "learned":
        most = min(most or config.data.seq_length, config.data.seq_length)
    elif most is None and checkpoints is not None:
        most = trained_length(config)
    if dist.get_rank() == 0:
        by = "" if shared is None else f", shared by {n}"
        logger.info("weights: %.2f GiB on each rank%s", stored_bytes(gpt) / GIB, by)
    cached = CachedGPT(gpt, attention, tokenizer.vocab_size, most, shares)
    return LongContextEngine(cached, manager, Chooser(shape.workload, inference.mode), inference), tokenizer


def load_model(
    config: Config,
    groups: ProcessGroupCollection,
    sequence: ShardedSequence,
    checkpoints: Path | None,
    iteration: int | None = None,
) -> tuple[GPTModel, MegatronTokenizerText]:
    """Load a run's model onto this rank's device, with `inference.weights`, and its tokenizer. See `build_engine`."""
    model = replace(config.model, builder="gpt")  # the checkpoints of both are equal
    if config.inference.weights == "fp8":
        model = replace(model, implementation="local")
    config = replace(config, model=model)
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    vocab_size = padded_vocab_size(config.model, tokenizer.vocab_size)
    gpt = build_model(config, transformer_config(config), groups, sequence, vocab_size)
    gpt.to(local_device())
    if config.model.position_embedding == "learned":  # Megatron leaves them in fp32, and its training casts them
        gpt.embedding.position_embeddings.to(gpt.config.params_dtype)
    if checkpoints is not None:
        state = checkpoint.TrainingState([gpt], fingerprint=fingerprint(config, vocab_size))
        # RoPE may differ: users try a model beyond its length before they train it there.
        checkpoint.load(checkpoints, state, iteration=iteration, ignore=RETRAINABLE)
        del state
    if config.inference.weights == "fp8":
        quantize_layers(gpt)
    return gpt, tokenizer
