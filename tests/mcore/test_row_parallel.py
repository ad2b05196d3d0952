"""Row-parallel layers with quantized sums: alone, in a GPT with TP=2, and in its layer spec."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_longctx.config import ReductionConfig
from megatron_longctx.lowbit.quantized import all_reduce
from megatron_longctx.lowbit.reduction import ReductionPolicy
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.model import build_model, transformer_config
from megatron_longctx.mcore.row_parallel import ReducedRowParallelLinear, RowReductions, with_reductions
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.mcore.version import mlp_spec
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.tolerances import relative_error
from tests.shared.training import tiny_config

VOCABULARY, LENGTH = 96, 24
MODES = ("none", "int8", "int6", "int4")


def _step(layer: Any, x: torch.Tensor, weight_of_loss: torch.Tensor) -> tuple[torch.Tensor, Any, Any, Any]:
    """Return the output, the bias that is left to add, and the gradients of input and weight."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    out, left = layer(leaf)
    (out * weight_of_loss).sum().backward()
    return out.detach(), left, leaf.grad, layer.weight.grad


def _one_layer(rank: int) -> None:
    collection = groups.initialize(tensor=2, seed=5)
    gen = torch.Generator().manual_seed(rank)
    policy = ReductionPolicy("int8", group_size=32, min_kib=0)
    cases = ((False, True), (True, True), (True, False))
    for sequence_parallel, (bias, skip) in itertools.product((False, True), cases):
        common: dict[str, Any] = dict(
            config=TransformerConfig(
                num_layers=1,
                hidden_size=32,
                num_attention_heads=4,
                tensor_model_parallel_size=2,
                sequence_parallel=sequence_parallel,
                use_cpu_initialization=True,
            ),
            init_method=torch.nn.init.xavier_normal_,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=skip,
            tp_group=collection.tp,
        )
        theirs = RowParallelLinear(64, 48, **common)
        if bias:
            torch.nn.init.constant_(theirs.bias, 0.25)
        x = torch.randn(6, 2, 32, generator=gen)
        rows = 3 if sequence_parallel else 6
        weight_of_loss = torch.randn(rows, 2, 48, generator=torch.Generator().manual_seed(9))
        expected, expected_left, *expected_gradients = _step(theirs, x, weight_of_loss)
        for in_training, train in itertools.product((False, True), (True, False)):
            reductions = RowReductions(in_training=in_training)
            layer = ReducedRowParallelLinear(64, 48, reductions=reductions, policy=policy, **common)
            layer.load_state_dict(theirs.state_dict())
            where = f"{sequence_parallel=}, {bias=}, {skip=}, {in_training=}, {train=}"
            out, left, *gradients = _step(layer.train(train), x, weight_of_loss)
            error = relative_error(out, expected)
            assert 1e-4 < error < 0.01 if in_training or not train else error == 0, f"{where}: error {error}"
            assert left is (None if expected_left is None else layer.bias), where
            assert all(map(torch.equal, gradients, expected_gradients)), f"{where}: not those of the exact sum"
            # If `auto` quantizes nothing, the layer equals Megatron's.
            layer.set_policy(ReductionPolicy("auto", min_kib=1e6))
            out, _, *gradients = _step(layer, x, weight_of_loss)
            assert all(map(torch.equal, (out, *gradients), (expected, *expected_gradients))), where
            if not bias and not sequence_parallel:
                layer.set_policy(policy)
                partial = torch.nn.functional.linear(x, theirs.weight).detach()
                quantized = all_reduce(partial, collection.tp, bits=8, group_size=32)
                assert torch.equal(layer.eval()(x)[0], quantized), "the quantized all-reduce"
                layer.set_policy(ReductionPolicy("none"))
                assert torch.equal(layer(x)[0], theirs(x)[0]), "Megatron's layer without a reduction"
    groups.destroy()


def test_a_layer_quantizes_its_sum_only() -> None:
    run_distributed(_one_layer, 2)


def _gpt(rank: int, root: Path, sequence_parallel: bool) -> dict[str, Any]:
    """Return errors of one GPT under every policy, and whether ranks agree."""
    settings = {
        "parallelism.tensor_parallel_size": 2,
        "parallelism.sequence_parallel": sequence_parallel,
        "data.seq_length": LENGTH,
        "reduction.min_kib": 0.0,
        "reduction.group_size": 32,
    }
    collection = groups.initialize(tensor=2, seed=3)
    models = {}
    for output, down in [(mode, mode) for mode in MODES] + [("int4", "none"), ("none", "int4")]:
        chosen = {"reduction.output_projection": output, "reduction.down_projection": down}
        config = tiny_config(root, "gpt", {**settings, **chosen})
        model = build_model(
            config, transformer_config(config), collection, build_sequence(config, collection.cp), VOCABULARY
        )
        models[output, down] = model
    exact = models["none", "none"]
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(2, -1)

    def logits(model: Any, train: bool) -> torch.Tensor:
        with torch.set_grad_enabled(train):
            return model.train(train)(tokens[:, :-1], positions, None)

    found: dict[str, Any] = {"equal": True, "trained": True, "error": {}}
    wanted = logits(exact, False)
    for key, model in models.items():
        model.load_state_dict(exact.state_dict())
        found["error"][key] = relative_error(logits(model, False), wanted)
        found["trained"] &= torch.equal(logits(model, True), wanted)
        losses = model.eval()(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).detach()
        copies = [torch.empty_like(losses) for _ in range(2)]
        dist.all_gather(copies, losses)
        found["equal"] &= torch.equal(*copies)
    kinds = [type(m).__name__ for m in models["int4", "none"].modules() if isinstance(m, RowParallelLinear)]
    found["kinds"] = sorted(set(kinds))
    groups.destroy()
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_gpt_under_every_policy(tmp_path: Path, sequence_parallel: bool) -> None:
    for found in run_distributed(_gpt, 2, tmp_path, sequence_parallel):
        error = found["error"]
        assert found["equal"], "tensor-parallel ranks compute the same loss"
        assert found["trained"], "training is exact unless asked otherwise"
        assert error["none", "none"] == 0
        assert 0 < error["int8", "int8"] < error["int6", "int6"] <= error["int4", "int4"] < 0.3
        if sequence_parallel:
            assert error["int6", "int6"] == error["int4", "int4"], "what is gathered there is not the sum"
        else:
            assert error["int6", "int6"] < error["int4", "int4"]
        assert all(0 < error[key] < error["int4", "int4"] for key in (("int4", "none"), ("none", "int4")))
        assert found["kinds"] == ["ReducedRowParallelLinear", "RowParallelLinear"]


def test_the_spec_changes_where_a_policy_quantizes() -> None:
    original = get_gpt_layer_local_spec()
    reductions = RowReductions.of(ReductionConfig(output_projection="int4", down_projection="int8", group_size=64))
    layer = with_reductions(original, reductions)
    for part, policy in (
        (layer.submodules.self_attention.submodules.linear_proj, ReductionPolicy("int4", 64)),
        (mlp_spec(layer).submodules.linear_fc2, ReductionPolicy("int8", 64)),
    ):
        assert part.module is ReducedRowParallelLinear
        assert part.params["policy"] == policy and part.params["reductions"] is reductions
    assert original.submodules.self_attention.submodules.linear_proj is RowParallelLinear, "a copy"
    assert with_reductions(original, RowReductions()) == original


def test_specs_without_the_layer_are_refused() -> None:
    reductions = RowReductions(down_projection=ReductionPolicy("int8"))
    for mlp in (IdentityOp, ModuleSpec(module=IdentityOp)):
        layer = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(mlp=mlp))
        with pytest.raises(ValueError, match=r"reduction.down_projection=int8: expected none .*mlp.linear_fc2"):
            with_reductions(layer, reductions)
