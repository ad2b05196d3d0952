"""The layers of `analysis.benchmarks.hybrid`, and their errors beside fp64."""

import traceback
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from megatron_longctx.config import Config
from megatron_longctx.mcore import spec
from megatron_longctx.mcore.delta_net import GatedDeltaNet
from megatron_longctx.mcore.model import transformer_config
from megatron_longctx.mcore.pack import Pack
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.testing.references import dense_attention
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.ranks import Ranks

SIZES = {
    "model.hidden_size": 2048, "model.num_attention_heads": 16, "model.num_kv_heads": 2, "model.head_dim": 256,
    "model.ffn_hidden_size": 5120, "model.linear_num_key_heads": 16, "model.linear_num_value_heads": 32,
    "model.linear_key_head_dim": 128, "model.linear_value_head_dim": 128, "model.num_layers": 8,
}  # fmt: skip
TINY = {
    "model.hidden_size": 64, "model.num_attention_heads": 4, "model.num_kv_heads": 2, "model.head_dim": 16,
    "model.ffn_hidden_size": 128, "model.linear_num_key_heads": 2, "model.linear_num_value_heads": 4,
    "model.linear_key_head_dim": 16, "model.linear_value_head_dim": 16, "model.num_layers": 4,
}  # fmt: skip
CHECKED = {"dense": (1607,), "pack": (400, 1, 1, 2, 700, 3, 500), "documents of 1": (1,) * 64 + (1542, 1)}


def config_of(tiny: bool, world: int, cuda: bool) -> Config:
    """Return the configuration of a model of these layers over `world` ranks."""
    sizes = TINY if tiny else SIZES
    precision, device = ("bf16", "cuda") if cuda else ("fp32", "cpu")
    return compose_config([
        "model=tiny_hybrid", *(f"{key}={value}" for key, value in sizes.items()), "model.implementation=local",
        f"parallelism.context_parallel_size={world}", f"train.precision={precision}", f"train.device={device}",
        "data.seq_length=65536", "recompute.mode=layer", "recompute.head_chunk_tokens=8192",
    ])  # fmt: skip


def usable_kernel(alone: ProcessGroupCollection, ranks: Ranks, tiny: bool, tell: Any) -> str:
    """Return `auto` if the kernel that it chooses computes attention of these heads, or else `flash`."""
    config = config_of(tiny, 1, ranks.device == "cuda")
    model, dtype = config.model, torch.bfloat16 if ranks.device == "cuda" else torch.float32
    heads = (model.num_attention_heads, model.num_kv_heads, model.num_kv_heads)
    qkv = [torch.randn(512, 1, h, model.kv_channels, device=ranks.local_device, dtype=dtype) for h in heads]
    leaves = [x.requires_grad_() for x in qkv]
    grad = torch.randn_like(qkv[0])
    try:
        out = build_sequence(config, alone.cp).attention(*leaves, mask=512)
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        q, k, v, of_out = (x.detach().cpu() for x in (*qkv, grad))
        expected = dense_attention(q, k, v, of_out).values()
        errors = [float((x.cpu() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)]
        tell(f"attention's errors with the kernel auto: {errors}")
        return "auto" if all(each < 2e-2 for each in errors) else "flash"
    except Exception:
        tell(f"attention's kernel is flash, because auto fails: {traceback.format_exc(limit=-3)}")
        return "flash"


def check_layer(
    pg: ProcessGroupCollection, alone: ProcessGroupCollection, documents: tuple[int, ...], ranks: Ranks, tiny: bool
) -> dict[str, Any]:
    """Return errors of a layer over ranks, relative (Frobenius) to the reference recurrence in fp64 on one rank.

    by_kernels: of fla-core's kernels in bf16. by_torch: of the reference recurrence with the same bf16 weights and
    inputs. Both for the output and the gradients of the input and of every weight.
    """
    layer, pack = _layer(pg, documents, ranks, tiny)
    one, whole = _layer(alone, documents, ranks, tiny)
    one.load_state_dict(layer.state_dict())
    one.double()._uses_kernels = lambda x: False
    generator, total = torch.Generator().manual_seed(1), sum(documents)
    x, grad = torch.randn(2, total, 1, layer.config.hidden_size, generator=generator).to(layer.conv_weight)
    tokens = pack.tokens(x.device)

    def results() -> dict[str, Tensor]:
        out, of_input, *of_weights = _gradients(layer, x[tokens], grad[tokens], pack)
        sums = [torch.zeros_like(x, dtype=torch.float64).index_copy(0, tokens, each) for each in (out, of_input)]
        for each in (*sums, *of_weights):
            dist.all_reduce(each, group=pg.cp)
        return dict(zip(names, (*sums, *of_weights), strict=True))

    names = ["out", "input", *(name for name, _ in layer.named_parameters())]
    truth = dict(zip(names, _gradients(one, x.double(), grad.double(), whole), strict=True))
    found = {"by_kernels": results()}
    layer._uses_kernels = lambda x: False
    found["by_torch"] = results()
    return {
        kind: {name: float((each - truth[name]).norm() / truth[name].norm()) for name, each in values.items()}
        for kind, values in found.items()
    }


def _layer(pg: ProcessGroupCollection, documents: tuple[int, ...], ranks: Ranks, tiny: bool) -> tuple[Any, Pack]:
    """Build a gated delta net over the ranks of `pg`, with the same weights every time, and a pack for it."""
    config = config_of(tiny, pg.cp.size(), ranks.device == "cuda")
    sequence, megatron = build_sequence(config, pg.cp), transformer_config(config)
    of_layer = spec.block_spec(megatron, sequence, transformer_engine=False).layer_specs[0].submodules.self_attention
    torch.manual_seed(0)
    layer = build_module(of_layer, config=megatron, layer_number=1, pg_collection=pg)
    assert type(layer) is GatedDeltaNet
    return layer.to(ranks.local_device), sequence.pack(documents)


def _gradients(layer: GatedDeltaNet, x: Tensor, grad: Tensor, pack: Pack) -> list[Tensor]:
    """Return the output and the gradients of input and weights, in fp64."""
    x = x.detach().requires_grad_()
    out = layer(x, packed_seq_params=pack)[0]
    return [each.double() for each in (out.detach(), *torch.autograd.grad(out, (x, *layer.parameters()), grad))]
