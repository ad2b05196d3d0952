"""A server of a random Llama, an `openai` client of it, and the model that `transformers` reads from the same files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_longctx.cli.conversion import import_model
from megatron_longctx.training.compose import RESOLVED, load_config
from tests.inference.test_serve import serving
from tests.shared.published import write_model

TEMPLATE = (  # tools in the format of Qwen
    "{% if tools %}tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    '<tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>{% endif %}'
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPT = [45, 60, 71, 90, 60, 45, 33, 71]


@contextmanager
def openai_server(folder: Path) -> Iterator[Any]:
    """Run the server on 2 context-parallel ranks."""
    from openai import OpenAI
    from transformers import AutoTokenizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.delenv("MEGATRON_LONGCTX_API_KEY", raising=False)
        model = write_model(folder / "published", "llama", torch.float32, vocab_size=290, max_position_embeddings=1024)
        import_model(str(folder / "published"), [f"out={folder / 'run'}"])
        (folder / "chat.jinja").write_text(TEMPLATE)
        settings = [
            *("parallelism=cp2", "inference.cache_tokens=4000", "serve.max_active=8", "inference.max_model_len=1000"),
            *(f"inference.chat_template={folder / 'chat.jinja'}", "serve.served_model_name=fox"),
        ]
        with serving(load_config(folder / "run" / RESOLVED), folder, *settings, name="fox") as client:
            openai = OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key="none", max_retries=0)
            tokenizer = AutoTokenizer.from_pretrained(folder / "published")
            assert len(tokenizer) == 290
            yield SimpleNamespace(client=client, openai=openai, model=model, tokenizer=tokenizer, folder=folder)


def reference(served: Any, prompt: Sequence[int], count: int, *processors: Any) -> list[int]:
    """The likeliest tokens by `transformers`, after what these processors make of its logits."""
    from transformers import LogitsProcessorList

    ids = torch.tensor([prompt])
    found = served.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None,
        pad_token_id=0, logits_processor=LogitsProcessorList(processors),
    )  # fmt: skip
    return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def completed(served: Any, **parameters: Any) -> Any:
    """The first choice of a completion."""
    extra = {"ignore_eos": True} | parameters.pop("extra", {})
    if "guided_json" in extra or "guided_regex" in extra or "guided_choice" in extra:
        del extra["ignore_eos"]
    given = {"model": "fox", "prompt": PROMPT, "temperature": 0, "logprobs": 0} | parameters
    return served.openai.completions.create(**given, extra_body=extra).choices[0]
