"""A GPT small enough to train in a test, with dense attention, on any parallel sizes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch.nn import functional

from megatron_longctx.config import OptimConfig
from megatron_longctx.mcore import checkpoint, groups, norms
from megatron_longctx.mcore import optimizer as optim

VOCABULARY, SEQUENCE, BATCH = 64, 16, 4
FINGERPRINT = {"num_layers": 2, "hidden_size": 32, "vocab_size": VOCABULARY}


@dataclass(frozen=True)
class Layout:
    """Parallel sizes and precision; the remaining ranks are data parallel."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    distributed: bool = True
    bf16: bool = False
    overlap: bool = False
    bucket_size: int | None = None
    clip_grad: float = 1.0
    tied: bool = False


class DenseAttention(torch.nn.Module):
    """Causal attention over the whole sequence, with the interface of Megatron's core attention."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def model_config(layout: Layout, **overrides: Any) -> TransformerConfig:
    dtype = torch.bfloat16 if layout.bf16 else torch.float32
    settings: dict[str, Any] = dict(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=functional.silu, add_bias_linear=False,
        attention_dropout=0.0, hidden_dropout=0.0, tensor_model_parallel_size=layout.tensor,
        context_parallel_size=layout.context, pipeline_model_parallel_size=layout.pipeline,
        sequence_parallel=layout.tensor > 1, pipeline_dtype=dtype, params_dtype=dtype, bf16=layout.bf16,
        use_cpu_initialization=True, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, apply_rope_fusion=False, gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )  # fmt: skip
    return TransformerConfig(**(settings | overrides))


def build_model(config: TransformerConfig, collection: ProcessGroupCollection, *, tied: bool) -> GPTModel:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    norm = norms.RMSNorm
    spec.submodules.input_layernorm = norm
    spec.submodules.pre_mlp_layernorm = norm
    spec.submodules.self_attention.submodules.core_attention = DenseAttention
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=_stage_specs(config, spec, collection), layer_norm=norm),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=collection.pp.rank() == 0,
        post_process=collection.pp.rank() == collection.pp.size() - 1,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        pg_collection=collection,
    )


def _stage_specs(config: TransformerConfig, spec: Any, collection: ProcessGroupCollection) -> list[Any]:
    return [spec] * (config.num_layers // collection.pp.size())


class Trainer:
    """Groups, model, optimizer and schedule of one layout, and a training step like that of Megatron's loop."""

    def __init__(self, layout: Layout, **config_overrides: Any) -> None:
        self.groups = groups.initialize(tensor=layout.tensor, context=layout.context, pipeline=layout.pipeline, seed=7)
        self.config = model_config(layout, **config_overrides)
        settings = OptimConfig(lr=2e-2, min_lr=1e-3, warmup_steps=1, decay_steps=10, clip_grad=layout.clip_grad)
        ddp_config = partial(optim.DistributedDataParallelConfig, bucket_size=layout.bucket_size)
        with patch.object(optim, "DistributedDataParallelConfig", ddp_config):
            self.models = optim.wrap_ddp(
                [build_model(self.config, self.groups, tied=layout.tied)],
                self.config,
                self.groups,
                distributed=layout.distributed,
                overlap_grad_reduce=layout.overlap,
                overlap_param_gather=layout.overlap and layout.distributed,
            )
        self.optimizer = optim.build_optimizer(self.models, settings, self.groups)
        self.scheduler = optim.build_scheduler(self.optimizer, settings, 10, BATCH)
        self.gradient_norms: list[float] = []
        optim.connect(self.config, self.models, self.optimizer)

    def state(self, **fingerprint: Any) -> checkpoint.TrainingState:
        return checkpoint.TrainingState(self.models, self.optimizer, self.scheduler, FINGERPRINT | fingerprint)

    def train(self, steps: range) -> list[float]:
        """Return the mean loss of each step's batch, equal on every rank."""
        return [self.step(step) for step in steps]

    def step(self, step: int) -> float:
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        share = BATCH // self.groups.dp.size()
        first = self.groups.dp.rank() * share
        samples = (_sample(step, index) for index in itertools.count(first))
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=samples,
            model=self.models,
            num_microbatches=share,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        success, norm, _ = self.optimizer.step()
        assert success
        self.gradient_norms.append(float(norm))
        self.scheduler.step(increment=BATCH)
        total = torch.tensor([sum(float(part["loss"]) for part in losses), float(len(losses))])
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def close(self) -> None:
        groups.destroy()


def _sample(step: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + index)
    # The same four of few tokens repeat: the loss falls within a few steps.
    head = torch.randint(8, (4,), generator=generator)
    return head.repeat(SEQUENCE // 4 + 1)[: SEQUENCE + 1][None]


def _forward_step(samples: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(samples)
    positions = torch.arange(SEQUENCE)[None]
    output = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())

    def loss_of(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = per_token.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_of


def megatrons_share(lengths: Sequence[int], rank: int, world: int) -> list[int]:
    """Return a rank's tokens of a pack by the definition of TransformerEngine's `thd_get_partitioned_indices`.

    Every document has 2 * world equal chunks, and a rank has the chunk of its number from each end.
    """
    tokens: list[int] = []
    for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
        chunk = length // (2 * world)
        for number in (rank, 2 * world - 1 - rank):
            tokens += range(start + chunk * number, start + chunk * (number + 1))
    return tokens
