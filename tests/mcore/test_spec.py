"""Layer specs with context-parallel attention, and their norms: formulas, dtypes, marks of sequence parallelism."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_longctx.mcore.core_attention import ContextParallelCoreAttention
from megatron_longctx.mcore.experts import SummedLossRouter
from megatron_longctx.mcore.norms import NORMS, RMSNorm
from megatron_longctx.mcore.spec import block_spec, require_transformer_engine, with_context_parallel
from megatron_longctx.mcore.version import mlp_spec
from tests.shared.sequences import sequence_of

HIDDEN = 96
NORM_SETTINGS = {
    "params_dtype": torch.float32,
    "sequence_parallel": False,
    "layernorm_zero_centered_gamma": False,
    "use_cpu_initialization": True,
}


@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_only_core_attention_of_the_local_spec_changes(qk_layernorm: bool) -> None:
    original = get_gpt_layer_local_spec(qk_layernorm=qk_layernorm)
    sequence = sequence_of()
    ours = with_context_parallel(original, sequence)
    replaced = ours.submodules.self_attention.submodules.core_attention
    assert replaced.module is ContextParallelCoreAttention
    assert replaced.params["sequence"] is sequence, "layers share one sequence, not copies of it"
    assert original.submodules.self_attention.submodules.core_attention is DotProductAttention, "a copy"
    ours.submodules.self_attention.submodules.core_attention = DotProductAttention
    assert issubclass(ours.submodules.self_attention.module, SelfAttention), "it also checks RoPE"
    ours.submodules.self_attention.module = SelfAttention
    assert ours == original


def test_blocks_are_specs_too() -> None:
    dense, experts = get_gpt_layer_local_spec(), get_gpt_layer_local_spec(num_experts=4)
    norm = RMSNorm
    block = TransformerBlockSubmodules([dense, experts, dense], norm)
    for given in (block, ModuleSpec(TransformerBlock, submodules=block)):
        ours = with_context_parallel(given, sequence_of())
        layers = getattr(ours, "submodules", ours).layer_specs
        assert getattr(ours, "submodules", ours).layer_norm is norm and layers[0] is layers[2] is not layers[1]
        for layer in layers:
            assert layer.submodules.self_attention.submodules.core_attention.module is ContextParallelCoreAttention
        assert mlp_spec(layers[1]).submodules.router is SummedLossRouter
    assert block.layer_specs[0].submodules.self_attention.submodules.core_attention is DotProductAttention, "a copy"


def test_losses_of_a_router_need_losses_that_are_sums() -> None:
    groups = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    settings = dict(num_layers=1, hidden_size=32, num_attention_heads=4, num_moe_experts=4, moe_ffn_hidden_size=32)
    for losses in ({"moe_aux_loss_coeff": 0.1}, {"moe_z_loss_coeff": 0.1}):
        with pytest.raises(ValueError, match="calculate_per_token_loss=False: expected True with losses of a router"):
            SummedLossRouter(TransformerConfig(**settings, **losses), groups)
        SummedLossRouter(TransformerConfig(**settings, **losses, calculate_per_token_loss=True), groups)
    SummedLossRouter(TransformerConfig(**settings), groups)


@pytest.mark.parametrize(
    "layer",
    [
        ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules()),
        ModuleSpec(module=IdentityOp),
        ModuleSpec(
            module=TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=ModuleSpec(module=IdentityOp))
        ),
    ],
)
def test_a_spec_without_self_attention_is_refused(layer: ModuleSpec) -> None:
    with pytest.raises(ValueError, match=r"expected a self_attention with a core_attention to replace"):
        with_context_parallel(layer, sequence_of())


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="TransformerEngine is installed")
def test_a_missing_transformer_engine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.implementation: .*set model.implementation=local"):
        require_transformer_engine()
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    with pytest.raises(ValueError, match="TransformerEngine"):
        block_spec(config, sequence_of(), transformer_engine=True)


def test_local_layers_have_norms_that_support_sequence_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_longctx.mcore.spec.get_num_layers_to_build", lambda config: 3)
    config = TransformerConfig(num_layers=3, hidden_size=32, num_attention_heads=4, normalization="RMSNorm")
    block = block_spec(config, sequence_of(), transformer_engine=False)
    assert len(block.layer_specs) == 3 and block.layer_norm is RMSNorm
    for layer in block.layer_specs:
        assert (layer.submodules.input_layernorm, layer.submodules.pre_mlp_layernorm) == (RMSNorm, RMSNorm)


def _norm(name: str, size: int = HIDDEN, eps: float = 1e-5, **settings: Any) -> Any:
    return NORMS[name](config=SimpleNamespace(**(NORM_SETTINGS | settings)), hidden_size=size, eps=eps)


def _reference(name: str, x: torch.Tensor, norm: Any) -> torch.Tensor:
    x = x.double()
    if name == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    y = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    return y + norm.bias.double() if name == "LayerNorm" else y


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
def test_values_and_dtypes_of_norms(name: str, parameters: torch.dtype, inputs: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = _norm(name, eps=1e-3, params_dtype=parameters)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(HIDDEN))
    # Far from zero mean: statistics in bf16 would be off by far more than one rounding of the output.
    x = (5 * torch.randn(7, 3, HIDDEN) + 2).to(inputs)
    y = norm(x)
    assert y.dtype == inputs
    assert all(parameter.dtype == parameters for parameter in norm.parameters())
    tolerance = 2e-6 if inputs == torch.float32 else 2**-8
    torch.testing.assert_close(y.double(), _reference(name, x, norm), rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_centered_weights_are_not_rounded(name: str, dtype: torch.dtype) -> None:
    norm = _norm(name, params_dtype=dtype, layernorm_zero_centered_gamma=True)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain = _norm(name)
    assert torch.equal(norm(x), plain(x.float()).to(dtype)), "all weights are 1 at first"
    with torch.no_grad():
        norm.weight.fill_(2**-10)
        plain.weight.fill_(1 + 2**-10)
    assert torch.equal(norm(x), plain(x.float()).to(dtype)) and norm.weight.dtype == dtype


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_norms(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(_norm(name, 6, params_dtype=torch.float64), (x,))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_of_norms_are_marked(sequence_parallel: bool) -> None:
    for name, count in (("RMSNorm", 1), ("LayerNorm", 2)):
        marks = [p.sequence_parallel for p in _norm(name, sequence_parallel=sequence_parallel).parameters()]
        assert marks == [sequence_parallel] * count
