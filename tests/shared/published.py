"""Tiny published models, as `transformers` writes them, and what this project's engine makes of imported ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_longctx.config import Config
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.inference import build_engine, inference_config
from megatron_longctx.training.compose import RESOLVED, load_config
from tests.shared.training import changed

VOCAB = 300
CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
TEXTS = ("the quick brown fox jumps over the lazy dog", "all that glitters is not gold", "to be, or not to be?")


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of a few merges, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>"]
    bpe.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=VOCAB - 10, special_tokens=special, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=special[0], eos_token=special[1])
    fast.chat_template = CHAT
    fast.save_pretrained(folder)


def write_model(
    folder: Path,
    family: str,
    dtype: torch.dtype,
    shard_size: str = "5GB",
    vision: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """A random model of a family, with its tokenizer; the model of `transformers` itself comes back.

    vision: its layers for images, whose family has them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(len(family))
    if vision is None:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | fields), dtype=dtype)
    else:
        config = AutoConfig.for_model(family, text_config=SIZES | fields, vision_config=vision)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases begin as ones and zeros, which would hide where they are put
                parameter.add_(0.2 * torch.randn(parameter.shape).to(dtype))
    model.save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder)
    return model.eval()


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[key].dtype == value.dtype and torch.equal(found[key], value) for key, value in expected.items()
    )


def theirs(model: Any, prompt: Sequence[int], new_tokens: int, tokens: int) -> tuple[Tensor, list[int]]:
    """Logits of the last token of a prompt, and the likeliest tokens after it among the first `tokens`, by
    `transformers`."""
    ids, found, first = torch.tensor([prompt]), [], None
    cache, places = None, torch.arange(len(prompt))[None]
    with torch.inference_mode():
        for _ in range(new_tokens):
            # Bamba's own positions of tokens after cached ones begin at 0 again.
            out = model(ids, position_ids=places, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[0, -1, :tokens].float()
            first = logits if first is None else first
            found.append(int(logits.argmax()))
            ids, places = torch.tensor([found[-1:]]), places[:, -1:] + 1
    assert first is not None
    return first, found


def ours(
    rank: int,
    run: str | Config,
    prompt: Sequence[int],
    new_tokens: int,
    sizes: dict[str, int],
    others: dict[str, Any] | None = None,
) -> tuple[Tensor, list[int]]:
    """The same by this project's engine, as this rank of a joined group. run: its folder or its configuration.
    others: settings over the run's."""
    folder = Path(run) if isinstance(run, str) else Path(run.run.root, run.run.name)
    config = load_config(folder / RESOLVED) if isinstance(run, str) else run
    settings = {f"parallelism.{axis}_parallel_size": size for axis, size in sizes.items()} | (others or {})
    config = inference_config(changed(config, settings))
    collection = groups.from_config(config.parallelism)
    engine, tokenizer = build_engine(config, collection, folder / "checkpoints")
    session = engine.open()
    session.append(prompt)
    logits = engine.next_logits([session])[0][: tokenizer.vocab_size].clone()
    found = session.generate(Sampling(max_new_tokens=new_tokens, temperature=0.0))
    engine.release()
    groups.destroy()
    return logits, found
