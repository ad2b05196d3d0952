"""The doors of Megatron-Bridge and verl: their own slices, RoPE and providers, and what they refuse."""

import importlib
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.integrations import megatron_bridge
from megatron_longctx.integrations.megatron_bridge import longctx_layer_spec
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.core_attention import ContextParallelCoreAttention
from megatron_longctx.mcore.sequence import ShardedSequence
from megatron_longctx.mcore.version import RELEASE
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.tolerances import relative_error
from tests.mcore.tiny_gpt import DenseAttention, Layout, megatrons_share, model_config

VOCABULARY, DOCUMENTS = 64, (9, 14, 4)


def _loaded(distribution: str, *names: str) -> list[ModuleType]:
    """Import modules of a framework without the rest of it, which needs GPUs; skip if it is not installed."""
    origin = next((Path(p) / distribution for p in sys.path if (Path(p) / distribution).is_dir()), None)
    if origin is None:
        pytest.skip(f"needs {distribution.replace('/', '.')}, which is not installed")
    root = distribution.replace("/", ".")
    for name in names:
        parts = name.split(".")[:-1]
        for i in range(len(parts) + 1):
            package = ".".join([root, *parts[:i]])
            if package not in sys.modules:
                module = sys.modules[package] = ModuleType(package)
                module.__path__ = [str(origin.joinpath(*parts[:i]))]
                above, _, leaf = package.rpartition(".")
                if above:
                    setattr(importlib.import_module(above), leaf, module)
    try:
        return [importlib.import_module(f"{root}.{name}") for name in names]
    except ModuleNotFoundError as error:
        pytest.skip(f"{root} needs {error.name}, which is not installed")


def _padded(lengths: tuple[int, ...], world: int) -> list[int]:
    """Return the lengths that Megatron's packs give to documents: multiples of twice the ranks."""
    return [-(-length // (2 * world)) * 2 * world for length in lengths]


def _slices(lengths: list[int], rank: int, world: int) -> Tensor:
    return torch.tensor(megatrons_share(lengths, rank, world))


def _params(lengths: list[int], **others: Any) -> PackedSeqParams:
    stops = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams("thd", stops, stops, stops, stops, max(lengths), max(lengths), **others)


def _gpt(config: Any, spec: Any) -> GPTModel:
    collection = config.__dict__.pop("collection")
    return GPTModel(config, spec, VOCABULARY, 64, position_embedding_type="rope", pg_collection=collection)


def _config(collection: Any, world: int, **settings: Any) -> Any:
    config = model_config(Layout(context=world), **settings)
    config.collection = collection
    config._pg_collection = collection
    return config


def _text(lengths: tuple[int, ...], padded: list[int]) -> tuple[list[Tensor], Tensor, Tensor]:
    documents = [torch.arange(length + 1) ** 2 * (i + 3) % VOCABULARY for i, length in enumerate(lengths)]
    pads = [torch.zeros(p - n, dtype=torch.long) for p, n in zip(padded, lengths, strict=True)]
    whole = torch.cat([torch.cat([d[:-1], pad]) for d, pad in zip(documents, pads, strict=True)])
    labels = torch.cat([torch.cat([d[1:], pad]) for d, pad in zip(documents, pads, strict=True)])
    return documents, whole, labels


def _parity(rank: int, block: bool) -> None:
    """Compare a model with documents of Megatron's own slices and RoPE with each document alone on one rank."""
    world = dist.get_world_size()
    padded = _padded(DOCUMENTS, world)
    documents, whole, labels = _text(DOCUMENTS, padded)
    dense = get_gpt_layer_local_spec(normalization="RMSNorm")
    dense.submodules.self_attention.submodules.core_attention = DenseAttention
    collection = groups.initialize(seed=5)
    alone = _gpt(_config(collection, 1), dense)
    expected = [alone(d[None, :-1], None, None, labels=d[None, 1:]) for d in documents]
    sum(x.sum() for x in expected).backward()
    gradients = {name: p.grad for name, p in alone.named_parameters()}
    groups.destroy()

    config = _config(groups.initialize(context=world, seed=5), world)
    if block:
        spec = longctx_layer_spec(
            partial(get_gpt_decoder_block_spec, use_transformer_engine=False, normalization="RMSNorm")
        )
    else:
        spec = longctx_layer_spec(get_gpt_layer_local_spec(normalization="RMSNorm"), schedule="all_gather")
    model = _gpt(config, spec(config, vp_stage=None))
    model.load_state_dict(alone.state_dict())
    mine, params = _slices(padded, rank, world), _params(padded)
    losses = model(whole[None, mine], None, None, labels=labels[None, mine], packed_seq_params=params)
    real = torch.cat([torch.arange(p) < n for p, n in zip(padded, DOCUMENTS, strict=True)])[mine]
    (losses * real).sum().backward()
    truth = torch.cat([torch.cat([x[0], x.new_zeros(p - x.shape[1])]) for x, p in zip(expected, padded, strict=True)])
    torch.testing.assert_close(losses[0][real], truth.detach()[mine][real], rtol=2e-6, atol=2e-6)
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        assert relative_error(parameter.grad, gradients[name]) < 5e-6, name
    groups.destroy()


@pytest.mark.parametrize(("world", "block"), [(1, False), (2, True), (3, False)])
def test_megatrons_own_slices_and_rope_give_what_each_document_gives_alone(world: int, block: bool) -> None:
    run_distributed(_parity, world, block)


def _zigzag_of_a_pack(rank: int) -> None:
    padded = _padded(DOCUMENTS, 2)
    _, whole, labels = _text(DOCUMENTS, padded)
    config = _config(groups.initialize(context=2, seed=5), 2)
    model = _gpt(config, longctx_layer_spec(get_gpt_layer_local_spec(), layout="zigzag")(config))
    mine = _slices(padded, rank, 2)
    with pytest.raises(ValueError, match="layout=zigzag: expected per_document"):
        model(whole[None, mine], None, None, labels=labels[None, mine], packed_seq_params=_params(padded))
    groups.destroy()


def test_a_pack_in_zigzag_is_refused_at_the_first_step() -> None:
    run_distributed(_zigzag_of_a_pack, 2)


class SoftcappedAttention(DotProductAttention):  # type: ignore[misc]
    """As in Bridge's Gemma 2: core attention that computes something else."""


def test_what_would_be_wrong_is_refused_before_a_layer_is_built() -> None:
    spec = get_gpt_layer_local_spec()
    with pytest.raises(ValueError, match="layout=striped: expected zigzag or per_document, in which Megatron slices"):
        longctx_layer_spec(spec, layout="striped")
    with pytest.raises(ValueError, match="layer spec=None"):
        longctx_layer_spec(None)
    with pytest.raises(ValueError, match=r"attention_backend=local: .*Bridge would put Megatron's own attention"):
        longctx_layer_spec(spec)(SimpleNamespace(attention_backend=AttnBackend.local))
    spec.submodules.self_attention.submodules.core_attention = SoftcappedAttention
    with pytest.raises(ValueError, match="core_attention=SoftcappedAttention: expected DotProductAttention or TEDot"):
        longctx_layer_spec(lambda config: spec)(SimpleNamespace())


class Provider:
    """Builds, as Bridge's providers do, a model from its layer spec, or from another."""

    def __init__(self, core: str = "ours") -> None:
        self.core, self.transformer_layer_spec = core, get_gpt_layer_local_spec()

    def provide_distributed_model(self) -> list[torch.nn.Module]:
        layer = torch.nn.Module()
        layer.core_attention = torch.nn.Identity()
        if self.core == "ours":
            assert getattr(self.transformer_layer_spec, "longctx", False)
            layer.core_attention.__class__ = ContextParallelCoreAttention
        return [layer]


@pytest.fixture
def frameworks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand-ins for the two functions of Bridge and verl that the doors change."""
    monkeypatch.setattr(
        Provider, "provide_distributed_model", Provider.provide_distributed_model
    )  # restored afterwards
    names = ("megatron.bridge", "megatron.bridge.models", "megatron.bridge.models.model_provider", "verl", "verl.utils")
    for name in (*names, "verl.utils.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["megatron.bridge.models.model_provider"].ModelProviderMixin = Provider  # type: ignore[attr-defined]
    utils = sys.modules["verl.utils"].megatron_utils = sys.modules["verl.utils.megatron_utils"]  # type: ignore[attr-defined]
    utils.make_megatron_module = lambda provider=None, bridge=None: provider.provide_distributed_model()
    monkeypatch.delitem(sys.modules, "megatron_longctx.integrations.verl", raising=False)
    megatron_bridge.switch_providers.cache_clear()
    return utils


def test_importing_the_door_of_verl_switches_every_provider(frameworks: Any, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        importlib.import_module("megatron_longctx.integrations.verl")
        megatron_bridge.switch_providers()  # SkyRL's way
    assert [each.message.partition(" that")[0] for each in caplog.records] == ["every Megatron-Bridge model"]
    provider = Provider()
    own = provider.transformer_layer_spec
    frameworks.make_megatron_module(provider=provider)
    assert provider.transformer_layer_spec is own, "what Bridge saves of a provider has its own spec"
    provider.transformer_layer_spec = given = longctx_layer_spec(own, schedule="ring")
    frameworks.make_megatron_module(provider=provider)
    assert provider.transformer_layer_spec is given
    with pytest.raises(ValueError, match=r"vanilla_mbridge=True: expected False.*use_mbridge=True"):
        frameworks.make_megatron_module(bridge=object())
    with pytest.raises(ValueError, match="provider=Provider: expected one that builds its layers from its layer spec"):
        frameworks.make_megatron_module(provider=Provider("its own"))
    del provider.transformer_layer_spec
    with pytest.raises(ValueError, match="provider=Provider: expected one with transformer_layer_spec or hybrid"):
        frameworks.make_megatron_module(provider=provider)


def _verl_slices(rank: int, world: int) -> None:
    (util,) = _loaded("verl", "models.mcore.util")
    collection = groups.initialize(context=world)
    documents, _, _ = _text(DOCUMENTS, list(DOCUMENTS))
    width = max(DOCUMENTS) + 3
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.bool)
    for row, document in enumerate(documents):  # padded on the left, as verl's prompts are
        ids[row, width - len(document) + 1 :], mask[row, width - len(document) + 1 :] = document[:-1], True
    packed, params = util.preprocess_packed_seqs(ids, mask)
    padded = _padded(DOCUMENTS, world)
    assert params.cu_seqlens_q.diff().tolist() == padded
    whole = _text(DOCUMENTS, padded)[1]
    own = ShardedSequence(ContextParallelAttention(collection.cp, layout="per_document")).pack_of(params)
    for tokens in (_slices(padded, rank, world), own.tokens(whole.device)):
        assert torch.equal(packed[0], whole[tokens])
    nested = torch.nested.nested_tensor([d[:-1] for d in documents], layout=torch.jagged)
    assert torch.equal(util.preprocess_thd_engine(nested)[0][0], packed[0])
    groups.destroy()


def test_verls_own_slices_are_the_layouts() -> None:
    _loaded("verl", "models.mcore.util")
    run_distributed(_verl_slices, 2, 2)


def _bridge_provides(rank: int, world: int) -> None:
    gpt_provider, packs = _loaded("megatron/bridge", "models.gpt_provider", "training.utils.packed_seq_utils")
    collection = groups.initialize(context=world, seed=5)
    provider = gpt_provider.GPTModelProvider(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64,
        context_parallel_size=world, vocab_size=VOCABULARY, seq_length=64, position_embedding_type="rope",
        normalization="RMSNorm", attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True,
        bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        transformer_layer_spec=gpt_provider.local_layer_spec,
    )  # fmt: skip
    provider.transformer_layer_spec = longctx_layer_spec(provider.transformer_layer_spec)
    provider._pg_collection = collection
    provider.finalize()
    model = provider.provide(pre_process=True, post_process=True)
    assert isinstance(model.decoder.layers[1].self_attention.core_attention, ContextParallelCoreAttention)
    padded = _padded(DOCUMENTS, world)
    _, whole, labels = _text(DOCUMENTS, padded)
    real = torch.tensor([0, *DOCUMENTS]).cumsum(0).int()
    stops = torch.tensor([0, *padded]).cumsum(0).int()
    batch = {"cu_seqlens_q": real, "cu_seqlens_q_padded": stops, "cu_seqlens_kv_padded": stops, "max_seqlen_q": 16}
    params = packs.get_packed_seq_params(batch)
    mine = _slices(padded, rank, world)
    losses = model(whole[None, mine], None, None, labels=labels[None, mine], packed_seq_params=params)
    all_losses = torch.zeros(len(whole)).index_copy(0, mine, losses[0].detach())
    dist.all_reduce(all_losses)
    start = 0
    for length, document in zip(padded, _text(DOCUMENTS, padded)[0], strict=True):
        # Alone, padded to what two ranks need, a document has the same losses.
        alone = torch.cat([document[:-1], torch.zeros(length - len(document) + 1, dtype=torch.long)])
        target = torch.cat([document[1:], torch.zeros(length - len(document) + 1, dtype=torch.long)])
        part = _slices([length], rank, world)
        found = model(alone[None, part], None, None, labels=target[None, part], packed_seq_params=_params([length]))
        torch.testing.assert_close(found[0].detach(), all_losses[start : start + length][part], rtol=1e-5, atol=1e-5)
        start += length
    groups.destroy()


def test_bridges_own_provider_builds_it_from_its_layer_spec() -> None:
    _loaded("megatron/bridge", "models.gpt_provider")
    run_distributed(_bridge_provides, 2, 2)


@pytest.mark.skipif(RELEASE < (0, 19), reason="HybridModel is new in Megatron-Core 0.19")
def test_a_hybrid_providers_stack_is_switched_without_its_mamba_layers() -> None:
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    provider = SimpleNamespace(_pg_collection=SimpleNamespace(cp=None))
    for given in (hybrid_stack_spec, lambda: hybrid_stack_spec, lambda config: hybrid_stack_spec):
        layers = longctx_layer_spec(given)(provider).submodules
        core = layers.attention_layer.submodules.self_attention.submodules.core_attention
        assert core.module is ContextParallelCoreAttention
        with pytest.raises(ValueError, match="hybrid_layer_pattern=mamba_layer"):
            build_module(layers.mamba_layer)
