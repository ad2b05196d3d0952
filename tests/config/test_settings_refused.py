"""Wrong settings raise one ValueError, which names the value, the expectation and the remedy."""

import pytest

from megatron_longctx.config import TYPE_NAMES, Config, data_parallel_size, keys_of
from megatron_longctx.training import compose
from megatron_longctx.training.compose import compose_config, override_config


def refusal(*words: str) -> str:
    with pytest.raises(ValueError) as caught:
        compose_config(words)
    error = caught.value
    assert type(error) is ValueError and error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None, "another error is shown before it"
    text = str(error)
    assert "expected" in text and "\n" not in text and text.endswith((".", "?"))
    for foreign in ("Error merging", "omegaconf", "DictConfig", "mismatched input", "Lexer", "NoneType"):
        assert foreign not in text
    return text


WHOLE_MESSAGES = {
    "train.stepz=3": (
        "train.stepz: expected a key of the configuration; there is none of this name. "
        "Nearest: train.steps, train.seed, train.save."
    ),
    "train.steps=abc": "train.steps=abc: expected an integer. For example train.steps=20.",
    "data.prefix=???": "data.prefix=???: expected text. For example data.prefix=data/stdlib.",
    "run.name=a\nb": "run.name=a\\nb: expected a plain folder name of at most 200 bytes. default is the default.",
    "model=tin": (
        f"model=tin: expected one of {', '.join(compose.recipes()['model'])}. Nearest: tiny, tiny_moe, tiny_mla."
    ),
    "~train.steps": (
        "~train.steps: expected key=value; keys cannot be removed. Leave train.steps out to have its default."
    ),
    **{
        f"parallelism.schedule={given}": (
            f"parallelism.schedule={given}: expected one of auto, all_gather, double_ring, helper, node_gather, "
            f"ring, zigzag, striped, ulysses, usp, tasp. Did you mean parallelism.schedule={meant}?"
        )
        for given, meant in (("allgather", "all_gather"), ("p2p", "ring"))
    },
    "model.num_kv_heads=3": (
        "model.num_kv_heads=3: expected a divisor of model.num_attention_heads=4. Nearest divisors: 2, 4, 1."
    ),
    "optim.beta2=1": "optim.beta2=1.0: expected at least 0 and less than 1. 0.95 is the default.",
    "parallelism.max_buffer_tokens=64": (
        "parallelism.max_buffer_tokens=64: expected null with parallelism.schedule=zigzag. Only all_gather groups its "
        "sources under a bound; leave it null or set parallelism.schedule=all_gather."
    ),
}


@pytest.mark.parametrize("word", WHOLE_MESSAGES)
def test_whole_messages(word: str) -> None:
    assert refusal(word) == WHOLE_MESSAGES[word]


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("modle=tiny", "model"),
        ("steps=3", "train.steps"),
        ("context_parallel_size=4", "parallelism.context_parallel_size"),
        ("schedule=ring", "parallelism.schedule"),
        ("lr=1e-4", "optim.lr"),
        ("train.lr=1e-4", "optim.lr"),
        ("paralelism.schedule=ring", "parallelism.schedule"),
        ("Train.steps=3", "train.steps"),
        ("train.steps.x=3", "train.steps"),
        ("experiment@foo=demo", "experiment"),
        ("+train.stepz=3", "train.steps"),
        ("++modle.name=x", "model.name"),
    ],
)
def test_unknown_keys_name_the_nearest(word: str, nearest: str) -> None:
    message = refusal(word)
    name = word.split("=")[0].lstrip("+")
    assert message.startswith(f"{name}: expected a key of the configuration; there is none of this name. Nearest: ")
    assert nearest in message.split("Nearest: ")[1].rstrip(".").split(", ")


@pytest.mark.parametrize("word", ["foo=1", "+foo=1", "hydra.run.dir=x", "schema=x", "a=b=c"])
def test_unknown_keys_without_a_similar_one(word: str) -> None:
    message = refusal(word)
    assert message.startswith(f"{word.split('=')[0].lstrip('+')}: expected a key of the configuration")
    assert message.endswith("`megatron-longctx keys` prints all keys.")


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("model=lama3_8b", "llama3_8b"),
        ("parallelism=tp2cp4", "tp2_cp4"),
        ("experiment=dem", "demo"),
        ("model=qwen3", "qwen3_8b"),
    ],
)
def test_unknown_recipes_name_the_nearest(word: str, nearest: str) -> None:
    message = refusal(word)
    assert message.startswith(f"{word}: expected one of ") and nearest in message.split("Nearest: ")[1]


KEY_OF_SECTION = "{word}: expected one of the keys inside {key}, which has no recipes to choose from. Set {key}."
SETTING = "{word}: expected a setting of the form group=NAME or key.subkey=value. "
REMOVAL = "{word}: expected key=value; keys cannot be removed. Leave "
INTEGER = "{word}: expected an integer. For example {key}="


@pytest.mark.parametrize(
    ("words", "beginning"),
    [
        (("model=../config", "model=null", "experiment=null", "model="), "{word}: expected one of "),
        (("parallelism=cp2,cp4",), "{word}: expected one of "),
        (("train=3", "data=foo", "attention=zigzag", "optim={lr: 1}"), KEY_OF_SECTION),
        (("hello", "=3", "train.steps", "", "experiment"), SETTING),
        (("~train", "~model", "~train.steps", "~foo=1", "~"), REMOVAL),
        (("train.steps=2.5", "train.steps=1 2", "train.steps=", "train.seed=0x1", "train.steps={a:1}"), INTEGER),
        (("data.seq_length=${nope}",), INTEGER),
        (("a\nb=3", "a\nb", "~a\nb", "+train.steps=1\n2"), ""),
    ],
)
def test_malformed_overrides(words: tuple[str, ...], beginning: str) -> None:
    for word in words:
        assert refusal(word).startswith(beginning.format(word=word, key=word.split("=")[0]))


def test_a_key_without_a_value_is_suggested_with_one() -> None:
    for word in ("train.steps", "experiment"):
        assert refusal(word).endswith(f"Did you mean {word}=…?")


# One key of every type and of every section: test_every_key has wrong values for all keys.
OF_TYPES = {(key.kind, key.nullable): name for name, key in keys_of(Config).items()}
OF_SECTIONS = {name.partition(".")[0]: name for name in keys_of(Config)}


@pytest.mark.parametrize("name", sorted({*OF_TYPES.values(), *OF_SECTIONS.values()}))
def test_keys_refuse_a_wrong_type(name: str) -> None:
    key = keys_of(Config)[name]
    wrong = f"{name}=???" if key.kind is str else f"{name}=abc"
    kind = TYPE_NAMES[key.kind]
    nullable = " or null" if key.nullable else ""
    assert refusal(wrong).startswith(f"{wrong}: expected {kind}{nullable}. For example {name}=")
    if not key.nullable and key.kind is not str:
        assert refusal(f"{name}=null").startswith(f"{name}=null: expected {kind}")


@pytest.mark.parametrize("key", ["train.steps", "optim.lr", "train.save", "run.name", "model", "nothing"])
@pytest.mark.parametrize("value", ["[" * 3000 + "]" * 3000, "{a:" * 3000, "(" * 3000, "9" * 5000, "x" * 20_000])
def test_long_and_deep_values_are_refused_in_one_line(key: str, value: str) -> None:
    message = refusal(f"{key}={value}")
    assert message.startswith((f"{key}={value[:100]}"[:100], f"{key}: ")) and len(message) < 700
    with pytest.raises(ValueError, match=rf"^{key}") as caught:
        override_config(Config(), [f"{key}={value}"])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("optim.min_lr=1", "optim.min_lr=1.0: expected at most optim.lr=0.0003"),
        ("optim.decay_style=WSD", "optim.wsd_decay_steps=None: expected a number with optim.decay_style=WSD"),
        ("optim.wsd_decay_steps=3",
         "optim.wsd_decay_steps=3: expected a number with optim.decay_style=WSD, null with any other"),
        ("optim.decay_style=WSD optim.wsd_decay_steps=11", "optim.wsd_decay_steps=11: expected at most 10, the steps"),
        ("optim.warmup_steps=20", "optim.warmup_steps=20: expected fewer steps than the decay (20"),
        ("optim.decay_steps=5", "optim.warmup_steps=10: expected fewer steps than the decay (5"),
        ("data.packing=best_fit train.micro_batch_size=2 train.global_batch_size=2",
         "train.micro_batch_size=2: expected 1 with data.packing=best_fit. A pack is one sequence"),
        ("data.packing=documents data.max_wait_steps=8",
         "data.max_wait_steps=8: expected 0 or null with data.packing=documents. Only the packs of best_fit"),
        ("data.tokenizer=huggingface",
         "data.tokenizer_path=None: expected a path with data.tokenizer=huggingface. Set data.tokenizer_path."),
        ("inference.exact_reuse=true",
         "inference.prefill_chunk=None: expected a number with inference.exact_reuse=true. Set it to 2048."),
        ("train.eval_interval=5", "train.eval_interval=5: expected null with data.split=100,0,0, which has no second"),
        ("train.eval_interval=5 data.split=9,1 train.micro_batch_size=3 train.global_batch_size=3",
         "train.eval_samples=32: expected a multiple of train.micro_batch_size=3"),
        ("optim.distributed=false optim.states_on_host=true",
         "optim.states_on_host=True: expected false with optim.distributed=false"),

        ("parallelism.schedule=ulysses parallelism.layout=zigzag",
         "parallelism.layout=zigzag: expected one of auto, contiguous"),
        ("parallelism=cp4 parallelism.schedule=usp parallelism.layout=balanced",
         "parallelism.layout=balanced: expected one of auto, zigzag. Leave it at auto, or choose another schedule"),
        ("parallelism.schedule=ring parallelism.max_buffer_tokens=8",
         "parallelism.max_buffer_tokens=8: expected null with parallelism.schedule=ring"),
        ("parallelism.max_attention_gib=2",
         "parallelism.max_attention_gib=2.0: expected null with parallelism.schedule=zigzag"),
        ("parallelism.inner_size=2 parallelism.context_parallel_size=4",
         "parallelism.inner_size=2: expected null with parallelism.schedule=zigzag"),
        ("parallelism.schedule=double_ring parallelism.rounds=3",
         "parallelism.rounds=3: expected null with parallelism.schedule=double_ring. Only node_gather has rounds"),
        ("parallelism.schedule=usp parallelism.inner_size=3 parallelism.context_parallel_size=4",
         "parallelism.inner_size=3: expected a divisor of parallelism.context_parallel_size=4. "
         "Nearest divisors: 2, 4, 1"),
        ("parallelism.outer_schedule=ring",
         "parallelism.outer_schedule=ring: expected zigzag with parallelism.schedule=zigzag"),
        ("parallelism.schedule=usp parallelism.outer_schedule=ulysses",
         "parallelism.outer_schedule=ulysses: expected one of all_gather, double_ring, helper, node_gather, "
         "ring, zigzag, tasp"),
        ("parallelism.overlap_param_gather=true optim.distributed=false",
         "parallelism.overlap_param_gather=true: expected auto or false with optim.distributed=false"),
        ("parallelism.overlap_param_gather=true parallelism.overlap_grad_reduce=false",
         "parallelism.overlap_param_gather=true: expected auto or false with parallelism.overlap_grad_reduce=false"),
        ("attention.sum_in_node=true parallelism=cp2",
         "attention.sum_in_node=true: expected parallelism.cluster, which defines the nodes"),
        ("recompute.kept_results=0.5 recompute=layer",
         "recompute.kept_results=0.5: expected 1.0 with recompute.mode=layer"),
        ("attention.keep_received=true recompute=attention_output",
         "attention.keep_received=true: expected auto or false with recompute.mode=attention_output"),
        ("attention.kv_int8=true model.head_dim=6 parallelism=cp2",
         "attention.kv_int8=True: expected false with model.head_dim=6, which 4 does not divide"),
        ("model=gpt2 parallelism.tensor_parallel_size=5",
         "parallelism.tensor_parallel_size=5: expected a divisor of model.num_kv_heads=12. Nearest divisors: 4, 6, 3"),
        ("parallelism.tensor_parallel_size=4",
         "parallelism.tensor_parallel_size=4: expected a divisor of model.num_kv_heads=2. Nearest divisors: 2, 1"),
        ("parallelism.tensor_parallel_size=2 data.seq_length=4095",
         "parallelism.tensor_parallel_size=2: expected a divisor of data.seq_length=4095"),
        ("parallelism.tensor_parallel_size=2 model.vocab_size=513",
         "parallelism.tensor_parallel_size=2: expected a divisor of model.vocab_size=513"),
        ("parallelism.pipeline_parallel_size=3",
         "parallelism.pipeline_parallel_size=3: expected a divisor of model.num_layers=4. Nearest divisors: 2, 4"),

        ("model.num_attention_heads=5", "model.num_attention_heads=5: expected a divisor of model.hidden_size=128"),
        ("model.head_dim=7", "model.head_dim=7: expected an even head dimension with rope"),
        ("model.window_pattern=2", "model.window_pattern=2: expected null with model.window=null"),
        ("model.bias=true model.qkv_bias=true", "model.qkv_bias=True: expected false with model.bias=true"),
        ("model.moe_z_loss_coeff=1", "model.moe_z_loss_coeff=1.0: expected null with model.num_moe_experts=null"),
        ("parallelism.expert_model_parallel_size=2",
         "parallelism.expert_model_parallel_size=2: expected 1 with model.num_moe_experts=null"),
        ("model=tiny_moe recompute.mlp_tile_tokens=8",
         "recompute.mlp_tile_tokens=8: expected null with model.num_moe_experts="),
    ],
)  # fmt: skip
def test_values_out_of_range(words: str, message: str) -> None:
    assert refusal(*words.split()).startswith(message)


@pytest.mark.parametrize("prefix", ["1 a 0 b", "0 a 0 b"])
def test_datasets_without_weight(prefix: str) -> None:
    expected = f"data.prefix={prefix}: expected weights that are each at least 1/10000 of their sum;"
    assert refusal(f"data.prefix={prefix}").startswith(expected)


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (
            "parallelism=tp2_cp4", 12,
            "world size=12: expected a multiple of tensor 2 x context 4 x pipeline 1 = 8. "
            "Start that many ranks or change the parallelism sizes.",
        ),
        (
            "parallelism=cp4 parallelism.data_parallel_size=3", 8,
            "parallelism.data_parallel_size=3: expected 2, because 8 ranks / (tensor 1 x context 4 x pipeline 1) = 2. "
            "Set it to 2 or null, or start 12 ranks.",
        ),
        (
            "parallelism=cp2 train.global_batch_size=9 train.micro_batch_size=2", 4,
            "train.global_batch_size=9: expected a multiple of train.micro_batch_size x data-parallel ranks = 2 x 2. "
            "Nearest: 8 or 12.",
        ),
        (
            "train.global_batch_size=2", 4,
            "train.global_batch_size=2: expected a multiple of train.micro_batch_size x data-parallel ranks = 1 x 4. "
            "Nearest: 4.",
        ),
    ],
)  # fmt: skip
def test_sizes_that_do_not_make_the_world(words: str, world: int, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        data_parallel_size(compose_config(words.split()), world)
    assert str(caught.value) == message


def test_sizes_that_make_the_world() -> None:
    config = compose_config(["parallelism=tp2_cp4", "train.global_batch_size=6"])
    assert [data_parallel_size(config, world) for world in (8, 16, 24)] == [1, 2, 3]
