"""The core attention of Megatron's layers: equal to dense attention, and unsupported uses are refused."""

import re
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch.nn import functional

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.core_attention import ContextParallelCoreAttention
from megatron_longctx.mcore.optimizer import wrap_ddp
from megatron_longctx.mcore.sequence import ShardedSequence
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import dense_attention, visible
from tests.mcore.tiny_gpt import megatrons_share
from tests.shared.sequences import sequence_of

LENGTH, BATCH, HEADS, GROUPS, DIM = 13, 2, 4, 2, 8


def _core(sequence: Any = None, config: dict[str, Any] | None = None, **arguments: Any) -> ContextParallelCoreAttention:
    settings = dict(num_layers=1, hidden_size=32, num_attention_heads=HEADS, num_query_groups=GROUPS)
    settings |= {"attention_dropout": 0.0, "context_parallel_size": 1}
    return ContextParallelCoreAttention(
        sequence=sequence or sequence_of(length=LENGTH),
        config=TransformerConfig(**(settings | (config or {}))),
        **({"layer_number": 1, "attn_mask_type": AttnMaskType.causal} | arguments),
    )


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(LENGTH, BATCH, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("mask", [AttnMaskType.causal, AttnMaskType.no_mask])
@pytest.mark.parametrize("at_call", [False, True])
def test_it_equals_dense_attention(mask: AttnMaskType, scale: float | None, at_call: bool) -> None:
    q, k, v = _inputs()
    if at_call:
        other = AttnMaskType.no_mask if mask is AttnMaskType.causal else AttnMaskType.causal
        out = _core(attn_mask_type=other, softmax_scale=scale)(q, k, v, None, attn_mask_type=mask)
    else:
        out = _core(attn_mask_type=mask, softmax_scale=scale)(q, k, v, None)
    causal = mask is AttnMaskType.causal
    heads_first = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    dense = functional.scaled_dot_product_attention(*heads_first, is_causal=causal, scale=scale, enable_gqa=True)
    assert out.shape == (LENGTH, BATCH, HEADS * DIM)
    torch.testing.assert_close(out, dense.permute(2, 0, 1, 3).flatten(2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        ({"attention_dropout": 0.1}, {}, "attention_dropout=0.1: expected 0"),
        ({}, {"attention_dropout": 0.2}, "attention_dropout=0.2: expected 0"),
        ({}, {"attention_type": "cross"}, "attention_type=cross: expected self"),
        (
            {},
            {"pg_collection": SimpleNamespace(cp=SimpleNamespace(size=lambda: 4))},
            "context-parallel size=4: expected the sequence's 1",
        ),
    ],
)
def test_unsupported_settings_are_refused(config: dict[str, Any], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        _core(config=config, **arguments)


def test_supported_settings() -> None:
    # An argument overrides the configuration; two head sizes and TransformerEngine's mode are accepted.
    _core(config={"attention_dropout": 0.1}, attention_dropout=0.0)
    groups: Any = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    _core(k_channels=8, v_channels=4, cp_comm_type="p2p", pg_collection=groups)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"attention_mask": torch.ones(1, 1, 1, 1), "attn_mask_type": AttnMaskType.no_mask},
            "attention_mask=given: expected None with no_mask",
        ),
        ({"attention_bias": torch.zeros(1, 1, LENGTH, LENGTH)}, "attention_bias=given: expected None"),
        ({"packed_seq_params": PackedSeqParams()}, "packed_seq_params.qkv_format=None: expected thd"),
        ({"attn_mask_type": AttnMaskType.padding}, "attention_mask=None: expected a mask tensor or packed documents"),
        ({"attn_mask_type": AttnMaskType.padding_causal}, "attention_mask=None: expected a mask tensor or packed"),
        ({"attn_mask_type": AttnMaskType.arbitrary}, "expected one of causal, no_mask, padding_causal, padding"),
    ],
)
def test_unsupported_calls_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        _core()(*_inputs(), **({"attention_mask": None} | arguments))


def _packed(stops: list[int], padded: list[int] | None = None, **other: Any) -> PackedSeqParams:
    sums = torch.tensor(stops, dtype=torch.int32)
    wide = None if padded is None else torch.tensor(padded, dtype=torch.int32)
    given = {"cu_seqlens_q": sums, "cu_seqlens_kv": sums.clone(), "cu_seqlens_q_padded": wide}
    return PackedSeqParams(**({"qkv_format": "thd", "cu_seqlens_kv_padded": wide} | given | other))


@pytest.mark.parametrize("mask", [AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.padding])
def test_megatrons_packed_documents(mask: AttnMaskType) -> None:
    """Megatron's layers pass them without a batch dimension."""
    q, k, v = (x[:, 0] for x in _inputs())
    documents = [slice(0, 4), slice(4, 5), slice(5, LENGTH)]
    out = _core()(q, k, v, None, attn_mask_type=mask, packed_seq_params=_packed([0, 4, 5, 5, LENGTH]))
    for rows in documents:
        alone = _core(sequence_of(length=rows.stop - rows.start))
        kind = AttnMaskType.no_mask if mask is AttnMaskType.padding else AttnMaskType.causal
        expected = alone(*(x[rows, None] for x in (q, k, v)), None, attn_mask_type=kind)
        torch.testing.assert_close(out[rows], expected, rtol=1e-12, atol=1e-12)


def test_a_mask_of_a_causal_layer_is_ignored_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    core, expected = _core(), _core()(*_inputs(), None)
    for _ in range(2):  # another mask than the causal one: TransformerEngine does not read it, either
        assert torch.equal(core(*_inputs(), torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool)), expected)
    assert caplog.text.count("--no-create-attention-mask-in-dataloader") == 1


SPANS = ((0, 9), (5, 12), (5, 12), (1, 7))
LONG = 12  # Megatron slices it for two ranks


def _hidden(spans: Any, causal: bool, form: str, length: int = LONG) -> torch.Tensor:
    """Return a mask tensor: for keys alone, for all pairs, or for pairs of tokens that are both no padding."""
    real = torch.zeros(len(spans), length, dtype=torch.bool)
    for row, (start, stop) in enumerate(spans):
        real[row, start:stop] = True
    if form == "keys":
        return ~real[:, None, None]
    seen = real[:, None].expand(-1, length, -1) & (real[:, :, None] if form == "both" else True)
    return ~(seen.tril() if causal else seen)[:, None]


def _errors_with_padding(rank: int) -> dict[Any, float]:
    """Return how far attention over padded rows is from Megatron's own, for this rank's share and on one rank."""
    collection = groups.initialize(context=2, seed=1)
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=HEADS, num_query_groups=GROUPS)
    config.attention_dropout, errors = 0.0, dict[Any, float]()
    whole = tuple(torch.randn(LONG, len(SPANS), heads, DIM, dtype=torch.float64) for heads in (HEADS, GROUPS, GROUPS))
    for x in whole:
        dist.broadcast(x, 0)
    sequences = {2: ShardedSequence(ContextParallelAttention(collection.cp)), 1: sequence_of(length=LONG)}
    for causal, form in product((False, True), ("keys", "pairs", "both")):
        kind = AttnMaskType.padding_causal if causal else AttnMaskType.padding
        pairs = _hidden(SPANS, causal, "pairs" if form == "keys" else form)
        padding = _hidden(SPANS, False, "keys")[:, 0, 0].T[..., None]
        grad = torch.ones(LONG, len(SPANS), HEADS * DIM, dtype=torch.float64).cumsum(0).masked_fill(padding, 0)
        leaves = [x.clone().requires_grad_() for x in whole]
        out = DotProductAttention(config, 1, kind, "self", pg_collection=collection)(*leaves, pairs)
        expected = [out.masked_fill(padding, 0), *torch.autograd.grad(out, leaves, grad)]
        for world, sequence in sequences.items():
            hidden = _hidden(SPANS, causal, form)
            if world > 1 and form != "keys":
                hidden = hidden[:, :, megatrons_share((LONG,), rank, world)]
            own = sequence.pack_of(None, LONG // world).tokens(grad.device)
            core = _core(sequence, {"context_parallel_size": world}, attn_mask_type=kind)
            leaves = [x[own].requires_grad_() for x in whole]
            out = core(*leaves, hidden)
            found = [out.masked_fill(padding[own], 0), *torch.autograd.grad(out, leaves, grad[own])]
            assert torch.isfinite(out).all()
            errors[world, kind, form] = max(
                float((x - y[own]).detach().abs().max()) for x, y in zip(found, expected, strict=True)
            )
    with pytest.raises(ValueError, match=r"attention_mask\[1\]=another mask"):  # on both ranks, by one rank's queries
        hidden = _hidden(SPANS, False, "pairs")[:, :, megatrons_share((LONG,), rank, 2)].clone()
        hidden[1, 0, 3, 7] |= rank == 1
        _core(sequences[2], {"context_parallel_size": 2}, attn_mask_type=AttnMaskType.padding)(
            *(x[:6] for x in whole), hidden
        )
    groups.destroy()
    return errors


def test_padding_in_mask_tensors_is_megatrons() -> None:
    """For outputs and gradients of all tokens but padding, on one rank, and on two with Megatron's slices."""
    for errors in run_distributed(_errors_with_padding, 2):
        assert len(errors) == 12 and not {case: each for case, each in errors.items() if not each < 1e-11}


@pytest.mark.parametrize("mask", [AttnMaskType.padding, AttnMaskType.padding_causal])
def test_padding_in_windows_and_for_all_rows(mask: AttnMaskType) -> None:
    core, causal = _core(config={"window_size": (2, 0)}, attn_mask_type=mask), mask is AttnMaskType.padding_causal
    hidden = _hidden([(3, 10)], causal, "keys", LENGTH)
    seen = visible([3, 7, 3], causal=causal, window=(2, 0))
    expected = dense_attention(*_inputs(), torch.zeros(LENGTH, BATCH, HEADS, DIM), seen=seen)["out"].flatten(2)
    torch.testing.assert_close(core(*_inputs(), hidden)[3:10], expected[3:10], rtol=1e-12, atol=1e-12)
    hidden[:] = _hidden([(0, LENGTH)], causal, "keys", LENGTH)  # a changed tensor is read again
    assert torch.equal(core(*_inputs(), hidden), _core(core.sequence, {"window_size": (2, 0)})(*_inputs(), None))


_GAP = torch.tensor([False] * 4 + [True] * 3 + [False] * 6)[None, None, None]


@pytest.mark.parametrize(
    ("hidden", "causal", "words"),
    [
        (_GAP, False, "attention_mask[0]=another mask: expected a padding mask: each token sees the keys 0 to 12, and"),
        (_GAP, True, "sees the keys 0 to 12 up to itself, and padding sees these or none"),
        (~_GAP[..., :6], False, f"attention_mask=torch.bool [1, 1, 1, 6]: expected torch.bool [2, 1, q, {LENGTH}]"),
        (_GAP.float(), False, f"attention_mask=torch.float32 [1, 1, 1, {LENGTH}]: expected torch.bool"),
        (torch.ones(2, 1, 1, LENGTH, dtype=torch.bool), False, "attention_mask[0]=True for all keys: expected False"),
        (_hidden([(0, 9), (0, 13)], True, "pairs", LENGTH), False, "attention_mask[0]=another mask"),
        (_hidden([(0, 9), (0, 13)], False, "pairs", LENGTH), True, "attention_mask[0]=another mask"),
    ],
)
def test_masks_that_are_no_padding_are_refused(hidden: torch.Tensor, causal: bool, words: str) -> None:
    core = _core(attn_mask_type=AttnMaskType.padding_causal if causal else AttnMaskType.padding)
    with pytest.raises(ValueError, match=re.escape(words)):
        core(*_inputs(), hidden)
    pack = core.sequence.pack([4, 9])
    with pytest.raises(ValueError, match="attention_mask=given: expected None for packed documents"):
        core(*_inputs(), hidden, packed_seq_params=pack)


@pytest.mark.parametrize("mask", [AttnMaskType.causal, AttnMaskType.padding])
@pytest.mark.parametrize("config", [{}, {"window_size": (2, 0)}])
def test_no_token_attends_to_padding_between_documents(mask: AttnMaskType, config: dict[str, Any]) -> None:
    leaves = [x[:, 0].requires_grad_() for x in _inputs()]
    params = _packed([0, 4, 9], [0, 6, LENGTH])  # tokens 4, 5, 11 and 12 are padding
    out = _core(config=config)(*leaves, None, packed_seq_params=params, attn_mask_type=mask)[:, 0]
    pack = sequence_of(length=LENGTH).pack([4, 2, 5, 2])
    kind = {"packed_seq_params": pack, "attn_mask_type": mask}
    expected = _core(config=config)(*(x[:, None] for x in leaves), None, **kind)[:, 0]
    real = torch.tensor([0, 1, 2, 3, 6, 7, 8, 9, 10])
    torch.testing.assert_close(out[real], expected[real], rtol=1e-12, atol=1e-12)
    assert torch.isfinite(out).all()
    for x in torch.autograd.grad(out[real].sum(), leaves):
        assert not x[[4, 5, 11, 12]].any() and x[real].any()


def test_megatrons_parameters_are_read_once_and_after_changes() -> None:
    sequence, params = sequence_of(length=LENGTH), _packed([0, 4, LENGTH])
    pack = sequence.pack_of(params)
    assert pack.documents == (4, 9) and sequence.pack_of(params) is pack
    assert sequence_of(length=LENGTH).pack_of(params) is not pack, "the pack of another model"
    sequence.pack_of(params)
    params.cu_seqlens_q[1] = params.cu_seqlens_kv[1] = 6
    assert sequence.pack_of(params).documents == (6, 7)
    params.cu_seqlens_q = params.cu_seqlens_kv = torch.tensor([0, 1, LENGTH])
    assert sequence.pack_of(params).documents == (1, 12)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (_packed([0, 4], qkv_format="sbhd"), "qkv_format=sbhd: expected thd"),
        (_packed([0, 4], cu_seqlens_kv=torch.tensor([0, 5])), "cu_seqlens_kv=other: expected what cu_seqlens_q says"),
        (_packed([0, 4], [0, 6], cu_seqlens_kv_padded=torch.tensor([0, 5])), "cu_seqlens_kv_padded=other: expected"),
        (_packed([0, 4], cu_seqlens_q=None), "cu_seqlens_kv=other: expected what cu_seqlens_q says"),
        (_packed([0]), "cu_seqlens_q=[0], padded [0]: expected sums of lengths that begin with 0"),
        (_packed([1, 4]), "cu_seqlens_q=[1, 4], padded [1, 4]: expected sums"),
        (_packed([0, 4, 2]), "expected lengths from 0 on, each at most its padded one"),
        (_packed([0, 4, 9], [0, 3, 9]), "expected lengths from 0 on, each at most its padded one"),
        (_packed([0, 4, 9], [0, 9]), "expected sums of lengths that begin with 0, and padded ones of as many"),
        (_packed([0, 4], local_cp_size=2), "packed_seq_params.local_cp_size=given: expected None"),
        (_packed([0, 5, 12]), "query has 13 tokens: expected 12"),
    ],
)
def test_invalid_packed_documents_are_refused(params: PackedSeqParams, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        _core()(*(x[:, 0] for x in _inputs()), None, packed_seq_params=params)


@pytest.mark.parametrize("skip", [None, 2, 3, [1, 0, 0, 1, 1, 0]])
def test_windows_follow_megatrons_rule(skip: Any) -> None:
    for number in range(1, 7):
        core = _core(
            config={"window_size": (3, 0), "window_attn_skip_freq": skip, "num_layers": 6}, layer_number=number
        )
        windowed = is_layer_window_attention((3, 0), skip, number)
        assert core.window == ((3, 0) if windowed else (None, None))
        out = core(*_inputs(), None)
        seen = visible([LENGTH], window=core.window)
        expected = dense_attention(*_inputs(), torch.zeros(LENGTH, BATCH, HEADS, DIM), seen=seen)["out"]
        torch.testing.assert_close(out, expected.flatten(2), rtol=1e-12, atol=1e-12)


def test_windows_that_megatron_sees_differently_are_refused() -> None:
    """Megatron's own attention shows later tokens in causal layers, and takes negative sizes literally."""
    with pytest.raises(ValueError, match=re.escape("window_size=(3, 2): expected (3, 0) with a causal mask")):
        _core(config={"window_size": (3, 2)})
    core = _core(config={"window_size": (3, 2)}, attn_mask_type=AttnMaskType.no_mask)
    expected = dense_attention(
        *_inputs(), torch.zeros(LENGTH, BATCH, HEADS, DIM), seen=visible([LENGTH], causal=False, window=(3, 2))
    )
    torch.testing.assert_close(core(*_inputs(), None), expected["out"].flatten(2), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=re.escape("window_size=(3, 2): expected (3, 0) with a causal mask")):
        core(*_inputs(), None, attn_mask_type=AttnMaskType.causal)
    for size in ((-1, 0), (3, -1), (-1, -1)):
        with pytest.raises(ValueError, match=re.escape(f"window_size={size}: expected numbers of tokens from 0 on")):
            _core(config={"window_size": size})
        skipped = {"window_size": size, "window_attn_skip_freq": [1, 0], "num_layers": 2}
        assert _core(config=skipped, layer_number=2).window == (None, None)


@pytest.mark.parametrize("kind", ["vanilla", "off-by-one", "learnable"])
def test_sinks_are_megatrons(kind: str) -> None:
    config = {"softmax_type": kind, "use_cpu_initialization": True, "init_method_std": 1.0}
    torch.manual_seed(3)
    core = _core(config=config)
    assert list(core.state_dict()) == (["softmax_offset"] if kind == "learnable" else [])
    sink = core.softmax_offset
    assert sink is None if kind == "vanilla" else bool(sink.any()) == (kind == "learnable")
    truth = dense_attention(*_inputs(), torch.ones(LENGTH, BATCH, HEADS, DIM), sink=sink)
    out = core(*_inputs(), None)
    torch.testing.assert_close(out, truth["out"].flatten(2), rtol=1e-6, atol=1e-6)
    if kind == "learnable":
        out.sum().backward()
        torch.testing.assert_close(sink.grad.double(), truth["dsink"], rtol=1e-5, atol=1e-5)
        for tp, rank in ((2, 0), (2, 1), (4, 3)):
            torch.manual_seed(3)
            ranks: Any = SimpleNamespace(size=lambda tp=tp: tp, rank=lambda rank=rank: rank)
            group: Any = SimpleNamespace(tp=ranks, cp=SimpleNamespace(size=lambda: 1))
            share = _core(config=config | {"num_query_groups": 4}, pg_collection=group).softmax_offset
            assert torch.equal(share, sink.chunk(tp)[rank]) and share.tensor_model_parallel


def _gradients_of_sinks(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [_gradient_of_sinks(rank, overlap) for overlap in (False, True)]


def _gradient_of_sinks(rank: int, overlap: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return DDP's gradient of bf16 sinks after two micro-batches, and the sum in fp32 of all of its parts."""
    world = dist.get_world_size()
    collection = groups.initialize(context=world, seed=1)
    attention = ContextParallelAttention(collection.cp)
    sequence = ShardedSequence(attention, LENGTH)
    settings = {"softmax_type": "learnable", "use_cpu_initialization": True, "context_parallel_size": world}
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16, "calculate_per_token_loss": True}
    core = _core(sequence, {**settings, **bf16}, pg_collection=collection)
    [model] = wrap_ddp([core], core.config, collection, distributed=False, overlap_grad_reduce=overlap)
    model.zero_grad_buffer()
    expected = torch.zeros(HEADS)
    for number in range(2):
        q, k, v = (x[sequence.whole.tokens(x.device)].bfloat16() for x in _inputs())
        sinks = core.softmax_offset.detach().float().requires_grad_()
        out = attention(q, k, v, mask=LENGTH, sink=sinks)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2 * rank + number)).bfloat16()
        out.backward(grad)
        expected += sinks.grad
        with nullcontext() if number else model.no_sync():
            core(q, k, v, None).backward(grad.flatten(2))
    model.finish_grad_sync()
    dist.all_reduce(expected)
    groups.destroy()
    return core.softmax_offset.main_grad.clone(), expected


def test_gradients_of_bf16_sinks_are_summed_in_fp32() -> None:
    for found, expected in run_distributed(_gradients_of_sinks, 2)[0]:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [5, LENGTH])
def test_tokens_of_other_ranks_are_refused_before_rotation(rows: int) -> None:
    """Tokens of another layout, or the whole sequence if `shard_batch` was forgotten."""
    sequence = sequence_of(rank=1, world=3, length=LENGTH)
    sequence.whole.rotations = SimpleNamespace(of=lambda window: lambda x: x[:0])  # for other tokens
    q, k, v = (x[:rows] for x in _inputs())
    words = rf"query has {rows} tokens: expected 4, the share of rank 1 of 3 in 13\. Pass .*shard_batch"
    with pytest.raises(ValueError, match=words):
        _core(sequence)(q, k, v, None)


def test_heads_that_the_schedule_cannot_divide_are_refused_when_the_layer_is_built() -> None:
    sequence = sequence_of(rank=0, world=3, length=LENGTH, schedule="ulysses")
    with pytest.raises(ValueError, match=r"3 context-parallel ranks that share the heads.*4 query heads"):
        _core(sequence=sequence, config={"context_parallel_size": 3})
