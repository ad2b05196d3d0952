"""Import and export: bit-identical weights, the logits of `transformers`, and refusals that leave no files."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_longctx.cli import cli
from megatron_longctx.cli.conversion import export_model, import_model, new_folder
from megatron_longctx.mcore import checkpoint_reader
from megatron_longctx.models.huggingface import HuggingFaceFolder
from megatron_longctx.serving.inference_job import build_job
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.compose import RESOLVED, load_config, save_config
from tests.shared.published import VOCAB, ours, same, tensors_of, theirs, write_model

pytestmark = pytest.mark.usefixtures("on_cpu")
# Keyed by name: family, dtype, and fields that differ from the tiny model.
MODELS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "llama": ("llama", torch.float32, {}),
    "llama, biases, tied, bf16": (
        "llama", torch.bfloat16, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "qwen2, in shards": ("qwen2", torch.float32, {"head_dim": 16, "shard_size": "20KB", "rope_theta": 1e6}),
    "mixtral, bf16": ("mixtral", torch.bfloat16, {"num_local_experts": 3}),
    "qwen3_moe, dense layers too": ("qwen3_moe", torch.float32, {
        "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 4,
        "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "gpt_oss, in shards": ("gpt_oss", torch.float32, {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8,
                                                      "shard_size": "20KB"}),
    "qwen3_5_text, tied": ("qwen3_5_text", torch.float32, {
        "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
        "linear_key_head_dim": 6, "linear_value_head_dim": 10, "tie_word_embeddings": True}),
    "qwen3_next, bf16": ("qwen3_next", torch.bfloat16, {
        "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 12,
        "num_hidden_layers": 4, "mlp_only_layers": [1], "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10}),
}  # fmt: skip
PROMPT = list(range(5, 40))
Published = dict[str, tuple[Path, Any]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """The folder of every model, and the model in `transformers`."""
    root = tmp_path_factory.mktemp("published")
    return {
        name: (root / str(number), write_model(root / str(number), family, dtype, **fields))
        for number, (name, (family, dtype, fields)) in enumerate(MODELS.items())
    }


@pytest.fixture(scope="module")
def runs(published: Published, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    found = {}
    for number, (name, (folder, _)) in enumerate(published.items()):
        found[name] = root / str(number)
        import_model(str(folder), [f"out={found[name]}"])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_export_restores_every_tensor(name: str, published: Published, runs: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_model([f"checkpoint={runs[name]}", f"out={tmp_path / 'back'}"])
    folder, model = published[name]
    assert same(tensors_of(tmp_path / "back"), tensors_of(folder))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert again.dtype == model.dtype and again.config.rope_parameters == model.config.rope_parameters
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq), "transformers' own"
    assert torch.equal(again(torch.tensor([PROMPT])).logits, model(torch.tensor([PROMPT])).logits)
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (folder, tmp_path / "back")]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert tokenizers[0]("the quick fox?").input_ids == tokenizers[1]("the quick fox?").input_ids


def test_settings_may_scale_rope(published: Published, runs: dict[str, Path]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder, _), run = published["llama"], str(runs["llama"])
    words = {"model.rope_scaling.kind": "linear", "model.rope_scaling.factor": 4.0}
    job = build_job({"checkpoint": run}, [f"{key}={value}" for key, value in words.items()])
    assert job.config.model.rope_scaling.factor == 4.0
    with pytest.raises(ValueError, match=r"of another model.*hidden_size"):
        build_job({"checkpoint": run}, ["model.hidden_size=128"])
    (logits, tokens), *_ = run_distributed(ours, 1, run, PROMPT, 5, {}, words)
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": 4.0}
    stretched = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    expected, likeliest = theirs(stretched, PROMPT, 5, len(logits))
    assert VOCAB - 10 <= len(logits) < VOCAB  # the size of the tokenizer
    assert (logits - expected).norm() < 1e-4 * expected.norm() and tokens == likeliest
    plain, _ = theirs(published["llama"][1], PROMPT, 1, len(logits))
    assert (logits - plain).norm() > 1e-2 * plain.norm()


def test_the_run_has_the_models_configuration_and_tokenizer(published: Published, runs: dict[str, Path]) -> None:
    config = load_config(runs["qwen2, in shards"] / RESOLVED)
    assert (config.model.name, config.model.head_dim, config.model.qkv_bias) == ("qwen2", 16, True)
    assert (config.model.rope_base, config.model.vocab_size, config.data.seq_length) == (1e6, VOCAB, 256)
    assert config.train.precision == "fp32"
    assert load_config(runs["llama, biases, tied, bf16"] / RESOLVED).train.precision == "bf16"
    folder = Path(config.data.tokenizer_path or "")
    assert config.data.tokenizer == "huggingface" and folder == runs["qwen2, in shards"] / "tokenizer"
    source = published["qwen2, in shards"][0]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()


def test_rows_for_tensor_parallel_ranks_are_added_and_removed_again(published: Published, tmp_path: Path) -> None:
    folder, _ = published["llama"]
    words = [f"out={tmp_path / 'run'}", "model.vocab_size=304", "parallelism.tensor_parallel_size=2"]
    import_model(str(folder), words)
    assert load_config(tmp_path / "run" / RESOLVED).model.vocab_size == 304
    export_model([f"checkpoint={tmp_path / 'run'}", f"out={tmp_path / 'back'}"])
    assert same(tensors_of(tmp_path / "back"), tensors_of(folder))
    assert json.loads((tmp_path / "back/config.json").read_text())["vocab_size"] == VOCAB


def test_another_precision_rounds(published: Published, tmp_path: Path) -> None:
    folder, _ = published["llama"]
    import_model(str(folder), [f"out={tmp_path / 'run'}", "train.precision=bf16"])
    export_model([f"checkpoint={tmp_path / 'run'}", f"out={tmp_path / 'back'}"])
    assert same(tensors_of(tmp_path / "back"), {key: x.bfloat16() for key, x in tensors_of(folder).items()})


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: next(folder.glob(name)).unlink()


def _cut(name: str) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return cut


def _fields(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def rewrites(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return write


NORM = "model.layers.1.input_layernorm.weight"
WRONG: dict[str, tuple[str, Callable[[Path], None], list[str], str]] = {
    "no config": ("llama", _without("config.json"), [], r"SOURCE=.*: expected a folder with config\.json"),
    "no JSON": ("llama", _cut("config.json"), [], r"config\.json: expected a JSON file"),
    "no weights": ("llama", _without("model.safetensors"), [], r"expected model\.safetensors, or .*pickles"),
    "truncated": ("llama", _cut("model.safetensors"), [], r"model\.safetensors: damaged, or not a safetensors file"),
    "missing shard": (
        "qwen2, in shards", _without("model-00002-*"), [],
        r"model-00002-of-0000\d\.safetensors: expected this file of the model; it is missing",
    ),
    "truncated index": ("qwen2, in shards", _cut("model.safetensors.index.json"), [], r"expected a JSON file"),
    "missing tensor": ("llama", rewrites(lambda t: t.pop(NORM)), [], rf"tensors={NORM}: expected a tensor of the file"),
    "another tensor": (
        "llama", rewrites(lambda t: t.update(x=t[NORM].clone())), [], r"tensors=x: expected tensors that the architec",
    ),
    "wrong shape": (
        "llama", rewrites(lambda t: t.update({NORM: t[NORM][1:].clone()})), [],
        rf"tensors={NORM} \(31,\): expected the shape \(32,\)",
    ),
    "wrong dtype": ("llama", rewrites(lambda t: t.update({NORM: t[NORM].char()})), [], rf"{NORM} is of I8, expected"),
    "another size": ("llama", _fields(intermediate_size=64), [], r"expected the shape \(64, 32\), as config\.json"),
    "architecture": ("llama", _fields(architectures=["FooForCausalLM"]), [], r"architectures=\['FooForCausalLM'\]"),
    "scaling": (
        "llama", _fields(rope_parameters={"rope_type": "wavy", "rope_theta": 1e4}), [], r"rope_parameters=.*wavy",
    ),
    "tokenizer": ("llama", _fields(vocab_size=280), [], r"expected the shape \(280, 32\)"),
    "no tokenizer": ("llama", _cut("tokenizer.json"), [], r"cannot be read by huggingface[^\n]*$"),
    "other function": ("llama", lambda folder: None, ["model.window=8"], r"model\.window=8: expected None, as .* has"),
    "another folder": ("llama", lambda folder: None, ["run.name=x"], r"run\.name=x: expected no value: out=RUN is"),
    "fewer rows": ("llama", lambda folder: None, ["model.vocab_size=299"], r"model\.vocab_size=299: expected at least"),
    "no such setting": ("llama", lambda folder: None, ["model.windw=8"], r"model\.windw: expected a key"),
    "no divisor": (
        "llama", lambda folder: None, ["parallelism.tensor_parallel_size=4"], r"parallelism\.tensor_parallel_size=4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_source_is_refused_by_name_and_leaves_no_files(name: str, published: Published, tmp_path: Path) -> None:
    model, spoil, words, message = WRONG[name]
    folder = shutil.copytree(published[model][0], tmp_path / "source")
    spoil(folder)
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=message):
        import_model(str(folder), [f"out={tmp_path / 'out/run'}", *words])
    assert not list((tmp_path / "out").iterdir())


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "source", "llama", torch.float32, vocab_size=280)
    with pytest.raises(ValueError, match=r"data\.tokenizer_path=.*expected at most the 280 tokens .*; this has 290"):
        import_model(str(tmp_path / "source"), [f"out={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_existing_folders_are_not_overwritten(published: Published, runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for refused in (
        lambda: import_model(str(published["llama"][0]), [f"out={tmp_path / 'out'}"]),
        lambda: export_model([f"checkpoint={runs['llama']}", f"out={tmp_path / 'out'}"]),
    ):
        with pytest.raises(ValueError, match=r"out=.*: expected a new folder; this one already exists"):
            refused()
    with pytest.raises(ValueError, match=r"out=: expected out=FOLDER"):
        import_model(str(published["llama"][0]), [])


def test_the_partial_folder_of_a_killed_import_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run.1.partial").mkdir()
    with new_folder(str(tmp_path / "run")):
        pass
    assert f"{tmp_path / 'run.1.partial'} is of another import or export into run: delete it if" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.1.partial"}


def test_a_full_disk_leaves_no_files(
    published: Published, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.save

    def full(*args: Any, **how: Any) -> None:
        real(*args, **how)
        if args[1].tell() > 30_000:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        import_model(str(published["llama"][0]), [f"out={tmp_path / 'run'}"])
    assert not list(tmp_path.iterdir())


def test_buffers_of_old_versions_and_copies_of_tied_weights_are_accepted(published: Published, tmp_path: Path) -> None:
    name = "llama, biases, tied, bf16"
    folder = shutil.copytree(published[name][0], tmp_path / "source")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewrites(lambda t: t.update(inv_freq | {"lm_head.weight": embedding.clone()}))(folder)
    import_model(str(folder), [f"out={tmp_path / 'run'}"])
    rewrites(lambda t: t.update({"lm_head.weight": embedding + 1}))(folder)
    with pytest.raises(ValueError, match=r"tensors=lm_head\.weight: expected tensors that the architecture has"):
        import_model(str(folder), [f"out={tmp_path / 'other'}"])


def test_layers_that_predict_several_tokens_are_left_out(
    published: Published, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(published["qwen3_next, bf16"][0], tmp_path / "source")
    rewrites(lambda t: t.update({"mtp.fc.weight": torch.ones(2, 2), "mtp.norm.weight": torch.ones(2)}))(folder)
    with caplog.at_level(logging.INFO):
        import_model(str(folder), [f"out={tmp_path / 'run'}"])
    assert "left out: 2 tensors mtp.*" in caplog.text
    assert load_config(tmp_path / "run" / RESOLVED).train.precision == "bf16", "as all weights that are not left out"
    name = "model.layers.0.linear_attn.A_log"
    rewrites(lambda t: t.update({name: t[name].float() + 1e-4}))(folder)
    for words, message in (([], "bf16 weights became fp32, as some"), (["train.precision=bf16"], "fp32 weights were")):
        with caplog.at_level(logging.INFO):
            import_model(str(folder), [f"out={tmp_path / message}", *words])
        assert message in caplog.text
        caplog.clear()
    rewrites(lambda t: t.update({"mtpx": torch.ones(2)}))(folder)
    with pytest.raises(ValueError, match=r"tensors=mtpx: expected tensors that the architecture has"):
        import_model(str(folder), [f"out={tmp_path / 'other'}"])


def test_only_a_few_tensors_are_in_memory_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "source", "llama", torch.float32, num_hidden_layers=24)
    largest, whole = VOCAB * 32 * 4, sum(x.nbytes for x in tensors_of(tmp_path / "source").values())
    reads = _alive(monkeypatch, HuggingFaceFolder, "read")
    import_model(str(tmp_path / "source"), [f"out={tmp_path / 'run'}"])
    assert sum(reads) > 0 and max(reads) <= 2 * largest < whole / 8
    reads = _alive(monkeypatch, checkpoint_reader, "read_tensor")
    export_model([f"checkpoint={tmp_path / 'run'}", f"out={tmp_path / 'back'}"])
    assert sum(reads) > 0 and max(reads) <= 2 * largest
    assert same(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "source"))


def _alive(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Return a list that gets, at each call of a function that reads tensors, the bytes of those in memory."""
    real, found, read = getattr(owner, name), [], []

    def counted(*args: Any) -> torch.Tensor:
        tensor: torch.Tensor = real(*args)
        read.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        found.append(sum(size for storage, size in read if not storage.expired()))
        return tensor

    monkeypatch.setattr(owner, name, counted)
    return found


@pytest.mark.parametrize(
    ("seq_length", "fields", "expected"),
    [
        (64, {}, 256),  # the model's own length is kept after training on shorter sequences
        (64, {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, 256),
        (512, {}, 512),
        (64, {"num_hidden_layers": 3}, 64),  # another model's
        (64, {"architectures": ["FooForCausalLM"]}, 64),
    ],
)
def test_the_length_of_an_exported_model(
    seq_length: int, fields: dict[str, Any], expected: int, runs: dict[str, Path], tmp_path: Path
) -> None:
    """The tokenizer's longest text is never below it."""
    run = shutil.copytree(runs["llama"], tmp_path / "run")
    config = load_config(run / RESOLVED)
    data = replace(config.data, seq_length=seq_length, tokenizer_path=str(run / "tokenizer"))
    save_config(replace(config, data=data), run / RESOLVED)
    _fields(**fields)(run / "tokenizer")
    settings = run / "tokenizer/tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 100}))
    export_model([f"checkpoint={run}", f"out={tmp_path / 'back'}"])
    assert json.loads((tmp_path / "back/config.json").read_text())["max_position_embeddings"] == expected
    copied = json.loads((tmp_path / "back/tokenizer_config.json").read_text())
    assert copied["model_max_length"] == max(100, expected)


def test_an_exported_model_has_the_length_that_its_rope_is_scaled_to(tmp_path: Path) -> None:
    """Also after training on shorter sequences, and with the tokenizer of another model."""
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    write_model(tmp_path / "source", "llama", torch.float32, max_position_embeddings=512, rope_parameters=rope)
    import_model(str(tmp_path / "source"), [f"out={tmp_path / 'run'}", "data.seq_length=128"])
    _fields(num_hidden_layers=3)(tmp_path / "run/tokenizer")
    export_model([f"checkpoint={tmp_path / 'run'}", f"out={tmp_path / 'back'}"])
    assert json.loads((tmp_path / "back/config.json").read_text())["max_position_embeddings"] == 512


def test_shards_of_a_size(runs: dict[str, Path], published: Published, tmp_path: Path) -> None:
    export_model([f"checkpoint={runs['llama']}", f"out={tmp_path / 'back'}", "shard_gb=1e-5"])
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    largest = max(tensor.nbytes for tensor in tensors_of(tmp_path / "back").values())
    assert len(files) > 2 and all(each.stat().st_size <= max(10_000, 2 * largest) + 2000 for each in files)
    assert same(tensors_of(tmp_path / "back"), tensors_of(published["llama"][0]))
    for wrong in ("0", "-1", "five", "nan"):
        with pytest.raises(ValueError, match=f"shard_gb={wrong}: expected a number"):
            export_model([f"checkpoint={runs['llama']}", f"out={tmp_path / 'other'}", f"shard_gb={wrong}"])


def test_damaged_weights_are_not_exported(
    runs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(runs["llama"], tmp_path / "run")
    path = run / "checkpoints/iter_0000000"
    words = [f"checkpoint={run}", f"out={tmp_path / 'back'}"]
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 0x40
    (path / "__0_0.distcp").write_bytes(content)
    with pytest.raises(ValueError, match=r"__0_0\.distcp is damaged: its sha256 is not the one it was saved with"):
        export_model(words)
    assert {each.name for each in tmp_path.iterdir()} == {"run"}
    (path / "digests.json").unlink()
    export_model(words)
    assert f"{path} was saved without digests: damage to it may go unnoticed" in caplog.text


def test_the_commands_log_what_they_do(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="megatron_longctx")
    monkeypatch.setattr("megatron_longctx.config.progress.EVERY_S", 1e-4)
    folder, _ = published["llama"]
    run, back = tmp_path / "run", tmp_path / "back"
    assert cli.main(["import", str(folder), f"out={run}"]) == 0
    assert cli.main(["export", str(run), f"out={back}", "iteration=0"]) == 0
    messages = [record.getMessage() for record in caplog.records]
    for work in ("importing", "exporting"):
        assert any(re.match(rf"{work}: \d+ of \d+ weights, .* so far", line) for line in messages), work
    imported, exported = (line for line in messages if " so far" not in line)
    assert f"imported {folder} (llama, fp32) into {run}" in imported
    assert f"exported step 0 of {run} (llama, float32) into {back}" in exported
    assert cli.main(["export", f"checkpoint={run}", f"out={tmp_path / 'b'}", "iteration=5"]) == 2
    assert cli.main(["export", f"checkpoint={run}", f"out={tmp_path / 'b'}", "train.steps=5"]) == 2
