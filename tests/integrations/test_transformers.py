"""transformers' models on this attention: every family, Trainer, fully_shard and torch.compile beside eager."""

import copy
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3NextConfig,
    RobertaConfig,
    RwkvConfig,
    StaticCache,
    WhisperConfig,
)
from transformers.masking_utils import create_causal_mask

from megatron_longctx import ContextParallelAttention
from megatron_longctx.integrations.trainer import ContextParallelTrainer, _data_mesh
from megatron_longctx.integrations.transformers import IGNORED, compare, register, shard
from megatron_longctx.testing.distributed import run_distributed
from tests.docs.test_docs import FENCED, ROOT

PAGE = ROOT / "docs" / "transformers.md"
DOCUMENTS = (13, 5, 22, 1, 9)
SMALL = {
    **dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, pad_token_id=0),
    **dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8),
}
HALF_WINDOWS = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=7),
    "gpt_oss": GptOssConfig(**SMALL, sliding_window=6, num_local_experts=4, num_experts_per_tok=2),
    "gemma3": Gemma3TextConfig(**SMALL, sliding_window=5, layer_types=HALF_WINDOWS),
    "qwen2_moe": Qwen2MoeConfig(  # asks for windows of 0, which no layer uses
        **SMALL, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
}


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def longrope(short: int) -> Phi3Config:
    """A model whose RoPE changes after `short` tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    sizes = {"max_position_embeddings": 64, "original_max_position_embeddings": short} | SMALL
    del sizes["head_dim"]
    return Phi3Config(**sizes, rope_parameters=rope)


def model_of(family: str, implementation: str = "longctx", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[family])
    for key, value in changes.items():
        setattr(config, key, value)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def from_config(config: PretrainedConfig) -> Any:
    return AutoModelForCausalLM.from_config(config, attn_implementation="longctx")


def batch_of(rows: int = 2) -> dict[str, Tensor]:
    words = torch.randint(1, 96, (rows, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(1))
    labels = words.clone()
    labels[:, 3:6] = IGNORED
    return {"input_ids": words, "labels": labels}


def group_of(n: int) -> dist.ProcessGroup | None:
    return dist.group.WORLD if n > 1 else None


def _on_ranks(rank: int, n: int, folder: str) -> tuple[dict[str, tuple[float, float]], list[float]]:
    """Differences from eager (loss, gradients) by family, and the losses of the page's script."""
    register(ContextParallelAttention(group_of(n)))
    families = FAMILIES if n < 3 else ("llama", "gpt_oss", "gemma3")
    found = {family: tuple(compare(model_of(family), batch_of(), DOCUMENTS)) for family in families}
    found["longrope"] = tuple(compare(from_config(longrope(4)), batch_of()))
    if n == 2:
        with pytest.raises(ValueError, match=r"rope_type longrope=\[50, 50, 37\]: expected documents of at most 40"):
            from_config(longrope(40))(**shard(batch_of()))
        register(ContextParallelAttention(group_of(n)))
        turned = DOCUMENTS[:: -1 if rank else 1]
        for what, added, documents in (("tokens", rank, DOCUMENTS), ("documents", 0, turned)):
            with pytest.raises(ValueError, match=f"batch=other {what} on some ranks"):
                model_of("llama")(**shard({"input_ids": batch_of()["input_ids"] + added}, documents))
        mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
        register(ContextParallelAttention(mesh["cp"], schedule="all_gather"))
        model = model_of("gpt_oss")
        for each in (*model.model.layers, model):
            fully_shard(each, mesh=mesh)
        found["fully_shard"] = tuple(compare(model, batch_of(), DOCUMENTS))
        found["compiled"] = _compiled()
    code = next(code for _, code in FENCED.findall(PAGE.read_text(encoding="utf-8")) if "__main__" in code)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, PAGE.name, "exec"), names)
    return found, names["train"](folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def on_ranks(root: Path) -> dict[int, Any]:
    model_of("gpt_oss", "eager").save_pretrained(root)
    return {n: run_distributed(_on_ranks, n, n, str(root))[0] for n in (1, 2, 3)}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_families_equal_eager_document_by_document(on_ranks: dict[int, Any], n: int) -> None:
    found, _ = on_ranks[n]
    assert len(found) == (len(FAMILIES) if n < 3 else 3) + 1 + 2 * (n == 2)
    for family, (loss, gradients) in found.items():
        assert loss < 1e-6 and gradients < 5e-6, family


def test_the_script_of_the_page_trains_alike_on_1_to_3_ranks(on_ranks: dict[int, Any]) -> None:
    one, *others = (losses for _, losses in on_ranks.values())
    assert len(one) == 5 and one[-1] < one[0]
    for losses in others:
        assert losses == pytest.approx(one, abs=1e-5)


def _compiled() -> tuple[float, float]:
    """The differences of a compiled model from the same one as it is."""
    torch._dynamo.config.disable, results = False, []
    for change in (lambda model: model, lambda model: torch.compile(model, backend="aot_eager")):
        model = model_of("mistral", num_hidden_layers=1, layer_types=None)
        loss = change(model)(**shard(batch_of(), DOCUMENTS)).loss
        loss.backward()
        results.append([loss.detach(), *(each.grad for each in model.parameters())])
    loss, *gradients = (float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True))
    return loss, max(gradients)


@pytest.fixture(scope="module", autouse=True)
def alone() -> None:
    register(ContextParallelAttention())


def test_a_second_model_of_one_config_is_refused_not_run_by_eager() -> None:
    config = copy.deepcopy(FAMILIES["llama"])
    first = from_config(config)
    for other in ("eager", "sdpa", "flex_attention"):
        AutoModelForCausalLM.from_config(config, attn_implementation=other)  # changes the config of both
        with pytest.raises(ValueError, match=r"attention_mask=used by another implementation: .*config of its own"):
            first(**shard(batch_of(), DOCUMENTS))
        with pytest.raises(ValueError, match=f"attn_implementation={other}: expected longctx"):
            compare(first, batch_of(), DOCUMENTS)


def test_models_with_attentions_of_their_own() -> None:
    register(ContextParallelAttention(schedule="all_gather"), "second")
    models = {name: model_of("llama", name) for name in ("longctx", "second")}
    losses = [model(**shard(batch_of(), DOCUMENTS, name=name)).loss for name, model in models.items()]
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), abs=1e-6)
    with pytest.raises(ValueError, match="name=longctx: expected 'second', which the model runs"):
        models["second"](**shard(batch_of(), DOCUMENTS))


def test_a_tree_of_prefixes_equals_its_branches() -> None:
    model, words = model_of("qwen3"), batch_of(1)["input_ids"]
    whole = model(**shard({"input_ids": words}, (30, 12, 8), parents=(-1, 0, 0))).logits
    for part in (slice(30, 42), slice(42, 50)):
        branch = torch.cat([words[:, :30], words[:, part]], dim=1)
        torch.testing.assert_close(whole[:, part], model(**shard({"input_ids": branch})).logits[:, 30:])


CALLS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "not sharded": ("llama", batch_of(), "attention_mask=none: expected a batch that shard returned"),
    "a mask of ones": (
        *("llama", batch_of() | {"attention_mask": torch.ones(2, 50)}),
        "attention_mask=a tensor .2, 50.: expected a batch that shard returned",
    ),
    "a mask of pairs": (
        *("llama", batch_of() | {"attention_mask": torch.ones(2, 1, 50, 50)}),
        "attention_mask=a Tensor: expected a batch",
    ),
    "softcap": (Gemma2Config(**SMALL), {}, "softcap=50.0: expected none"),
    "dropout": (LlamaConfig(**SMALL, attention_dropout=0.1), {}, "attention_dropout=0.1: expected 0"),
    "chunks": (
        *(Llama4TextConfig(**SMALL, attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=48), {}),
        "attention_mask=used by another|layer_types=chunked_attention",
    ),
    "layers that recur": (
        *(Qwen3NextConfig(**SMALL, layer_types=["linear_attention", "full_attention"], num_experts=0), {}),
        "attention_mask=used by another|layer_types=linear_attention",
    ),
    "not causal": (LlamaConfig(**SMALL, is_causal=False), {}, "mask=a mask of the model's own"),
    "routers' loss": (
        *(MixtralConfig(**SMALL, num_local_experts=2, output_router_logits=True), {}),
        "attention_mask=used by another|output_router_logits=True: expected none",
    ),
    "dynamic RoPE": (
        LlamaConfig(**SMALL, max_position_embeddings=21, rope_parameters=DYNAMIC),
        {},
        r"rope_type dynamic=\[13, 5, 22, 1, 9, 22\]: expected documents of at most 21",
    ),
    "dynamic RoPE of some layers": (
        Gemma3TextConfig(
            **SMALL,
            max_position_embeddings=21,
            layer_types=HALF_WINDOWS,
            rope_parameters={"full_attention": DYNAMIC, "sliding_attention": DYNAMIC | {"rope_type": "default"}},
        ),
        {},
        r"rope_type dynamic=\[13, 5, 22, 1, 9, 22\]: expected documents of at most 21",
    ),
    "LongRoPE": (longrope(12), {}, "rope_type longrope=.*: expected documents of at most 12 tokens"),
    "other positions": (
        RobertaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, is_decoder=True),
        {},
        "model_type=roberta: expected positions that begin with 0",
    ),
    "positions of its own": (
        WhisperConfig(vocab_size=96, d_model=32, decoder_layers=1, decoder_attention_heads=4, pad_token_id=0),
        {},
        "model_type=whisper: expected positions that begin with 0",
    ),
    "a cache": ("llama", {"use_cache": True}, "use_cache=True: expected none"),
    "a static cache": (
        *("llama", {"past_key_values": lambda model: StaticCache(config=model.config, max_cache_len=80)}),
        "past_key_values=80 keys: expected 50",
    ),
    "probabilities": ("llama", {"output_attentions": True}, "output_attentions=True: expected none"),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_would_be_wrong_is_refused(what: str) -> None:
    config, changes, message = CALLS[what]
    config = copy.deepcopy(FAMILIES[config] if isinstance(config, str) else config)
    model = from_config(config)
    arguments = changes if "input_ids" in changes else shard(batch_of(), DOCUMENTS) | changes
    arguments = {key: value(model) if callable(value) else value for key, value in arguments.items()}
    with pytest.raises(ValueError, match=message):
        model.train()(**arguments)


def test_a_model_that_ignores_masks_is_found_by_compare() -> None:
    config = RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=96, attention_hidden_size=32)
    with pytest.raises(ValueError, match="model=no layer asked for the mask"):
        compare(from_config(config), batch_of())


def test_a_models_own_mask_that_would_be_lost_is_refused() -> None:
    """Models of the installed transformers are refused before by what else they do with the mask."""
    config, sharded = LlamaConfig(**SMALL, attn_implementation="longctx"), shard(batch_of(), DOCUMENTS)
    known = {"inputs_embeds": torch.zeros(2, 50, 32), "attention_mask": sharded["attention_mask"]}
    known["past_key_values"] = None
    config.layer_types = ["conv", "full_attention"]
    with pytest.raises(ValueError, match="layer_types=conv: expected full_attention or sliding_attention"):
        create_causal_mask(config=config, **known)
    config.layer_types = None
    with pytest.raises(ValueError, match="local_size=64: expected the config's sliding_window"):
        AttentionMaskInterface()["longctx"](
            config=config, attention_mask=known["attention_mask"], q_length=50, kv_length=50, local_size=64,
            allow_is_causal_skip=True,
        )  # fmt: skip
    layer_mask, x = create_causal_mask(config=config, **known), torch.zeros(2, 4, 50, 8)
    with pytest.raises(ValueError, match=r"is_causal=False: expected True\. Use a decoder"):
        AttentionInterface()["longctx"](torch.nn.Module(), x, x, x, layer_mask, is_causal=False)


@pytest.mark.parametrize(
    ("changes", "documents", "message"),
    [
        ({"attention_mask": torch.tensor([[1] * 50, [1] * 49 + [0]])}, DOCUMENTS, "attention_mask=1 padding tokens"),
        ({"attention_mask": torch.ones(2, 1, 50, 50)}, DOCUMENTS, "attention_mask=.2, 1, 50, 50.: expected"),
        ({}, (20, 20), "documents=.20, 20.: expected numbers with the sum 50"),
        ({"position_ids": torch.arange(50)[None]}, DOCUMENTS, "position_ids=.0, 1.*: expected the positions"),
        ({"position_ids": torch.arange(100).view(2, 50)}, None, "position_ids=.2, 50.: expected"),
        ({"cu_seq_lens_q": torch.tensor([5, 20, 55])}, None, r"cu_seq_lens_q=\[5, 20, 55\]: expected \[0, 15, 50\]"),
        ({"cu_seq_lens_k": torch.tensor([0, 20, 50])}, DOCUMENTS, r"cu_seq_lens_k=\[0, 20, 50\]: expected"),
        ({"seq_idx": torch.tensor([[0] * 20 + [1] * 30])}, DOCUMENTS, r"seq_idx=\[20, 30\]: expected documents"),
        ({"labels": torch.ones(2, 49).long()}, DOCUMENTS, r"labels=\[2, 49\]: expected \[2, 50\], as the tokens"),
        ({"shift_labels": torch.ones(2, 50).long()}, DOCUMENTS, "shift_labels=others: expected the labels of the next"),
        ({"pixel_values": torch.ones(2, 3, 8, 8)}, DOCUMENTS, "batch.'pixel_values'.=a tensor .2, 3, 8, 8."),
        ({"input_ids": None}, DOCUMENTS, "batch=.*: expected input_ids or inputs_embeds"),
    ],
)
def test_a_batch_that_cannot_be_sharded_is_refused(changes: Any, documents: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard(batch_of() | changes, documents)
    with pytest.raises(ValueError, match="batch=a batch that shard returned"):
        shard(shard(batch_of()))


def test_a_mask_counts_tokens_and_is_not_for_torch() -> None:
    ids = torch.arange(2, 52).expand(2, -1)
    mask = shard({"input_ids": ids}, DOCUMENTS)["attention_mask"]
    assert int(mask.sum()) == ids.numel()
    with pytest.raises(ValueError, match="attention_mask=used by another implementation"):
        torch.cumsum(mask, -1)


def test_what_collators_say_of_documents_is_understood() -> None:
    ends, rest = torch.tensor([0, *accumulate(DOCUMENTS)]), batch_of() | {"attention_mask": torch.ones(2, 50)}
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    flash = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 22, "max_length_k": 22}
    numbers = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS)).expand(2, -1)
    for batch in (rest | {"position_ids": positions}, rest | flash, rest | {"seq_idx": numbers}):
        found, expected = shard(batch), shard(batch_of(), DOCUMENTS)
        assert found.keys() == expected.keys() and found["attention_mask"].shape == (2, 50)
        assert all(torch.equal(found[key], expected[key]) for key in ("input_ids", "position_ids", "shift_labels"))


@pytest.mark.parametrize("name", ["sdpa", "eager", "my_flash", "a/b"])
def test_names_that_transformers_reads_otherwise_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"name={name}: expected a free name"):
        register(ContextParallelAttention(), name)
    with pytest.raises(ValueError, match="name=nothing: expected one of longctx"):
        shard(batch_of(), name="nothing")


def _trained(rank: int, n: int, size: int, folder: str) -> dict[str, list[float]]:
    """The losses of five steps, and of an evaluation: of the Trainer with eager on one rank, and of ours."""
    from transformers import Trainer, TrainingArguments

    groups = [dist.new_group([*range(first, first + size)]) for first in range(0, n, size)] if n > 1 else [None]
    if n > 1:
        for members in ([0, 3], [1, 2]), ([0, 2], [1, 3]):
            apart = [dist.new_group(each) for each in members][rank not in members[0]]
            with pytest.raises(ValueError, match=r"ranks of the attention=.*expected 2 ranks in a row"):
                _data_mesh("cpu", ContextParallelAttention(apart))
    register(ContextParallelAttention(groups[rank // size]))
    rows: list[dict[str, Tensor]] = []
    for number, lengths in enumerate([(20, 30), DOCUMENTS] * 8):
        words = torch.randint(1, 96, (50,), generator=torch.Generator().manual_seed(number))
        positions = torch.cat([torch.arange(length) for length in lengths])
        labels = words.masked_fill(positions == 0, IGNORED)
        rows.append({"input_ids": words, "labels": labels, "position_ids": positions})
    losses = {}
    for implementation in ("eager", "longctx") if n == 1 else ("longctx",):
        arguments = TrainingArguments(
            folder, use_cpu=True, report_to=[], max_steps=5, logging_steps=1, save_strategy="no", learning_rate=1e-2,
            per_device_train_batch_size=1, per_device_eval_batch_size=1, gradient_accumulation_steps=2 * size // n,
            disable_tqdm=True, max_grad_norm=0.0,
        )  # fmt: skip
        kind = type("Mine", (ContextParallelTrainer, Trainer), {}) if implementation == "longctx" else Trainer
        trainer = kind(model_of("qwen3", implementation), arguments, train_dataset=rows, eval_dataset=rows[:8:2])
        trainer.train()
        losses[implementation] = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        losses[implementation].append(trainer.evaluate()["eval_loss"])
        if n > 1:
            with pytest.raises(ValueError, match="prediction_loss_only=False: expected True on 2 ranks"):
                trainer.predict(rows[:4])
    return losses


def test_trainer_takes_the_steps_of_one_rank_on_two_groups_of_two(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    expected = _trained(0, 1, 1, str(tmp_path))
    on_4 = run_distributed(_trained, 4, 4, 2, str(tmp_path))[0]["longctx"]
    assert len(expected["eager"]) == 6  # five steps and an evaluation
    for found in (expected["longctx"], on_4):
        assert found == pytest.approx(expected["eager"], abs=3e-5)


def test_trainers_that_would_shift_labels_again_are_refused(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    kind = type("Mine", (ContextParallelTrainer, Trainer), {})
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1: expected 0"):
        kind(model_of("llama"), arguments)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])

    class Parallel(Trainer):  # as after a launch on several GPUs
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator = SimpleNamespace(parallelism_config=accelerate.ParallelismConfig(tp_size=2))

    with pytest.raises(ValueError, match=r"parallelism_config=.*: expected none with cp_size"):
        type("Mine", (ContextParallelTrainer, Parallel), {})(model_of("llama"), arguments)
    trainer = kind(model_of("llama"), arguments, compute_loss_func=lambda *_, **__: None)
    with pytest.raises(ValueError, match="compute_loss_func=given: expected none"):
        trainer.compute_loss(trainer.model, batch_of())
