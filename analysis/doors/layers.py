"""Small models through each door, with TransformerEngine's own attention, and by the definition, on two ranks."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from torch.nn import functional

from analysis.doors.slices import share
from megatron_longctx.integrations import megatron_lm
from megatron_longctx.integrations.megatron_bridge import longctx_layer_spec
from megatron_longctx.mcore import groups

WORLD, VOCABULARY = 2, 512
EXPERTS = {
    # Every expert sees every token: a choice among them would flip with the last bit.
    "num_moe_experts": 4, "moe_router_topk": 4, "moe_ffn_hidden_size": 128, "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp32",
}  # fmt: skip
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": None, "kv_lora_rank": 128, "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "rope_type": "rope",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A batch and a model: the lengths of documents (one: a plain sequence), dtype and fields of the configuration.

    padded: whether documents have padding, which `cu_seqlens_q_padded` describes.
    kind: TransformerEngine's `cp_comm_type`.
    """

    documents: tuple[int, ...] = (2048,)
    bf16: bool = True
    padded: bool = False
    kind: str = "p2p"
    doors: tuple[str, ...] = ("megatron_lm",)
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        """The lengths that Megatron's packs give to documents: multiples of twice the ranks."""
        return [-(-length // (2 * WORLD)) * 2 * WORLD for length in self.documents]


ALL_DOORS = ("megatron_lm", "bridge", "verl")
PACK = (700, 132, 1216)
FUSED = {"apply_rope_fusion": True}
CASES = {
    "dense": Case(doors=ALL_DOORS),
    "dense, fp32": Case(bf16=False),
    "dense, fused RoPE": Case(fields=FUSED),
    "window of 256": Case(kind="all_gather", fields={"window_size": (255, 0)}),
    "packs": Case(PACK, doors=ALL_DOORS),
    "packs, fp32": Case(PACK, bf16=False),
    "packs, fused RoPE": Case(PACK, fields=FUSED),
    "packs with padding": Case((699, 129, 1213), padded=True),
    "experts": Case(fields=EXPERTS),
    "experts, packs": Case(PACK, fields=EXPERTS),
    "latent attention": Case(fields=LATENT),
}
FLOOR = {True: 1.5e-2, False: 2e-4}
"""Relative errors that rounding alone explains, with bf16 and with fp32."""


class Dense(torch.nn.Module):
    """Causal attention of one document by its definition, with the interface of Megatron's core attention."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale, self.before = softmax_scale, (config.window_size or (None,))[0]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        seen = torch.ones(len(query), len(query), dtype=torch.bool, device=q.device).tril()
        if self.before is not None:
            seen = seen.triu(-self.before)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def config_of(case: Case, context: int, **others: Any) -> TransformerConfig:
    cuda, latent = torch.cuda.is_available(), "multi_latent_attention" in case.fields
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    settings: dict[str, Any] = dict(
        num_layers=2, hidden_size=512, num_attention_heads=4, kv_channels=128, ffn_hidden_size=1024,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=functional.silu, add_bias_linear=False,
        attention_dropout=0.0, hidden_dropout=0.0, context_parallel_size=context, params_dtype=dtype,
        pipeline_dtype=dtype, bf16=case.bf16, use_cpu_initialization=not cuda, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
        gradient_accumulation_fusion=False, cp_comm_type=case.kind, moe_grouped_gemm=cuda,
        transformer_impl="transformer_engine" if cuda else "local",
    ) | ({} if latent else {"num_query_groups": 2})  # fmt: skip
    fields = settings | case.fields | ({} if cuda else {"apply_rope_fusion": False}) | others
    return (MLATransformerConfig if latent else TransformerConfig)(**fields)


def gpt(config: TransformerConfig, spec: Any, collection: Any) -> GPTModel:
    model = GPTModel(config, spec, VOCABULARY, 4096, position_embedding_type="rope", pg_collection=collection)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def own_spec(config: TransformerConfig, core: Any = None) -> TransformerBlockSubmodules:
    """Return Megatron's own spec of all layers, with TransformerEngine on GPUs; `core` replaces its core attention."""
    cuda = torch.cuda.is_available()
    block = get_gpt_decoder_block_spec(config, cuda, normalization=config.normalization)
    if core is not None:
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = core
    return block


class _Provider:
    """What a provider of Megatron-Bridge does: it builds a model from its layer spec."""

    def __init__(self, config: TransformerConfig, collection: Any) -> None:
        self.config, self.collection = config, collection
        self.transformer_layer_spec: Any = lambda provider: own_spec(provider.config)
        self._pg_collection = collection

    def provide_distributed_model(self) -> list[GPTModel]:
        spec = self.transformer_layer_spec
        spec = spec if isinstance(spec, ModuleSpec | TransformerBlockSubmodules) else spec(self)
        return [gpt(self.config, spec, self.collection)]


def _through(door: str, config: TransformerConfig, collection: Any) -> GPTModel:
    """Build a model through a door, as its page says; `own` is TransformerEngine's attention.

    Bridge and verl are stand-ins of the two functions that the doors change.
    """
    if door in ("own", "megatron_lm"):
        return gpt(config, own_spec(config) if door == "own" else megatron_lm.layer(config), collection)
    provider = _Provider(config, collection)
    if door == "bridge":
        provider.transformer_layer_spec = longctx_layer_spec(provider.transformer_layer_spec)
        return provider.provide_distributed_model()[0]
    bridge, verl, utils = (ModuleType(name) for name in ("model_provider", "verl.utils", "megatron_utils"))
    bridge.ModelProviderMixin, verl.megatron_utils = _Provider, utils  # type: ignore[attr-defined]
    utils.make_megatron_module = lambda provider: provider.provide_distributed_model()  # type: ignore[attr-defined]
    above = {name: ModuleType(name) for name in ("megatron.bridge", "megatron.bridge.models", "verl")}
    modules = {**above, "megatron.bridge.models.model_provider": bridge, "verl.utils": verl}
    with patch.dict(sys.modules, modules | {"verl.utils.megatron_utils": utils}):
        import megatron_longctx.integrations.verl  # noqa: F401  what external_lib names; once in a process

        found: GPTModel = utils.make_megatron_module(provider=provider)[0]
    return found


def _batch(case: Case) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor, Tensor]:
    """Return each document's tokens and labels, and tokens, labels and what is no padding of the whole batch."""
    generator, device = torch.Generator().manual_seed(1), "cuda" if torch.cuda.is_available() else "cpu"
    documents, padded = [], []
    for length, whole in zip(case.documents, case.lengths, strict=True):
        text = torch.randint(VOCABULARY, (length + 1,), generator=generator).to(device)
        documents.append((text[None, :-1], text[None, 1:]))
        fill = text.new_zeros(whole - length)
        real = torch.arange(whole, device=device) < length
        padded.append((torch.cat([text[:-1], fill]), torch.cat([text[1:], fill]), real))
    tokens, labels, real = (torch.cat(each) for each in zip(*padded, strict=True))
    return documents, tokens, labels, real


def packed(case: Case) -> PackedSeqParams | None:
    if len(case.lengths) == 1:
        return None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    padded, real = (
        torch.tensor([0, *each]).cumsum(0).int().to(device)
        for each in (case.lengths, case.documents if case.padded else case.lengths)
    )
    longest = max(case.lengths)
    return PackedSeqParams("thd", real, real, padded, padded, longest, longest)


Results = dict[str, Tensor]
"""Losses by token of the whole batch, without padding, and the gradients of all parameters, in fp32."""


def _definition(case: Case, collection: Any) -> tuple[dict[str, Tensor], Results]:
    """Return weights that bf16 represents, and the results of the definition in fp32."""
    config = config_of(replace(case, bf16=False), 1, apply_rope_fusion=False)
    model = gpt(config, own_spec(config, Dense), collection)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
        parameter.data.copy_(parameter.data.bfloat16())
    losses = [model(tokens, None, None, labels=labels) for tokens, labels in _batch(case)[0]]
    sum(each.sum() for each in losses).backward()
    found = {"losses": torch.cat(losses, 1)[0].detach(), **_gradients(model)}
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, found


def _gradients(model: GPTModel) -> Results:
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def _results(door: str, case: Case, weights: dict[str, Tensor], collection: Any, world: int) -> Results:
    """Compute the batch with a model through a door, sliced as Megatron does."""
    model = _through(door, config_of(case, world), collection)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name])
    _, tokens, labels, real = _batch(case)
    mine = share(case.lengths, collection.cp.rank(), world)
    positions = torch.cat([torch.arange(length, device=tokens.device) for length in case.lengths])[mine][None]
    losses = model(tokens[mine][None], positions, None, labels=labels[mine][None], packed_seq_params=packed(case))[0]
    losses[real[mine]].sum().backward()
    whole = torch.zeros(len(tokens), device=tokens.device).index_copy(0, mine, losses.detach().float())
    found = {"losses": whole, **_gradients(model)}
    if world > 1:
        for each in found.values():
            dist.all_reduce(each, group=collection.cp)
    return found | {"losses": found["losses"][real]}


def compare(names: Sequence[str]) -> dict[str, dict[str, dict[str, float] | str]]:
    """Return the errors of each case and way to compute it, or why there is no result. Collective over two ranks."""
    cuda, collection = torch.cuda.is_available(), groups.initialize(seed=5)
    truth, found = {}, {}
    for name in names:
        truth[name] = weights, expected = _definition(CASES[name], collection)
        found[name] = {"own, 1 rank": _errors("own", CASES[name], weights, collection, 1, expected)} if cuda else {}
    groups.destroy()
    collection = groups.initialize(context=WORLD, seed=5)
    for name, (weights, expected) in truth.items():
        for door in (*(("own",) if cuda else ()), *CASES[name].doors):
            found[name][f"{door}, {WORLD} ranks"] = _errors(door, CASES[name], weights, collection, WORLD, expected)
    groups.destroy()
    return found


def _errors(
    door: str, case: Case, weights: dict[str, Tensor], collection: Any, world: int, expected: Results
) -> dict[str, float] | str:
    """Return the relative errors of losses and of the worst gradient, or the error that all ranks have."""
    try:
        found = _results(door, case, weights, collection, world)
    except Exception as error:  # TransformerEngine has no such attention, or a door fails: either is a result
        return f"{type(error).__name__}: {str(error).strip()[:300]}"
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    errors = {name: float((found[name] - x).norm() / x.norm()) for name, x in expected.items() if float(x.norm())}
    gradients = [value for name, value in errors.items() if name != "losses"]
    return {"losses": errors["losses"], "gradients": max(gradients) if all(x == x for x in gradients) else float("nan")}


def judge(found: dict[str, dict[str, dict[str, float] | str]]) -> list[str]:
    """Return where a door fails, or is less exact than rounding and TransformerEngine's own attention explain."""
    wrong = []
    for name, ways in found.items():
        floor = FLOOR[CASES[name].bf16]
        engines = [each for way, each in ways.items() if way.startswith("own") and not isinstance(each, str)]
        for way, each in ways.items():
            if way.startswith("own"):
                continue
            if isinstance(each, str):
                wrong.append(f"{name}, {way}: {each}")
                continue
            for what, error in each.items():
                limit = max([floor, *(1.5 * x[what] for x in engines if x[what] == x[what])])
                if not error <= limit:
                    wrong.append(f"{name}, {way}: {what} differ by {error:.2e} from the definition, limit {limit:.2e}")
    return wrong
