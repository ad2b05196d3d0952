"""Conversations as tokens: only answers are learned, and errors have the line."""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.config import DataConfig
from megatron_longctx.models.chat import Chat
from megatron_longctx.models.chat_template import ChatTemplate
from megatron_longctx.training import conversations as text_of_conversations
from megatron_longctx.training import text
from megatron_longctx.training.conversations import conversations
from megatron_longctx.training.text import Source
from tests.shared.training import tiny_corpus

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is it?"},
    {"role": "assistant", "content": "a thing"},
    {"role": "user", "content": "which?"},
    {"role": "assistant", "content": "that one"},
]
ROLES = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
CHATML = ROLES + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
MARKED = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
INSTRUCT = """\
{%- for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} </s>
{%- elif m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"""
SPOKEN = (
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
FORGETFUL = "{% for m in messages %}{{ m.content if loop.last else '…' }}|{% endfor %}"
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('a user begins') }}{% endif %}" + CHATML


def characters(text: str) -> list[str]:
    return list(text)


def words(text: str) -> list[str]:
    """Split like a byte-pair encoding: a space belongs to the next word, or is a token if nothing follows."""
    return re.findall(r" ?\w+|\s+|[^\w\s]", text)


def learned(tmp_path: Path, template: str, line: Any, encode: Callable[[str], Sequence[Any]] = characters) -> list[str]:
    """Return the learned texts, each a run of neighbouring tokens."""
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(line) + "\n")
    ((ids, mask),) = conversations(path, Chat(ChatTemplate(template, 60.0)), encode)
    assert mask is not None and len(mask) == len(ids)
    runs = itertools.groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
    return ["".join(str(token) for token, _ in run) for learn, run in runs if learn]


@pytest.mark.parametrize("encode", [characters, words])
@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (ROLES, ["<|assistant|>a thing<|end|>\n", "<|assistant|>that one<|end|>\n"]),  # without a generation prompt
        (CHATML, ["a thing<|end|>\n", "that one<|end|>\n"]),
        (MARKED, ["a thing<|end|>\n", "that one<|end|>\n"]),
        (INSTRUCT, [" a thing </s>", " that one </s>"]),
    ],
)
def test_the_answers_are_learned_whatever_the_template(
    tmp_path: Path, template: str, answers: list[str], encode: Callable[[str], list[str]]
) -> None:
    assert learned(tmp_path, template, {"messages": TALK}, encode) == answers


def test_a_token_that_spans_the_start_of_an_answer_belongs_to_it(tmp_path: Path) -> None:
    assert learned(tmp_path, SPOKEN, {"messages": TALK}) == ["a thing\n", "that one\n"]
    assert learned(tmp_path, SPOKEN, {"messages": TALK}, words) == [" a thing\n", " that one\n"]


LONG = [
    {"role": "user" if number % 2 else "assistant", "content": f"{'so ' * (number % 5)}{number}: it is  {number**2}"}
    for number in range(1, 41)
]
GREETING = "{% if messages[0].role != 'system' %}<|system|>be kind<|end|>\n{% endif %}"


def marked(text: str) -> list[str]:
    """Begin with a special token and a space, as some tokenizers do."""
    return ["<s>", *words(f" {text}")]


@pytest.mark.parametrize("encode", [words, marked])
@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (CHATML, LONG),
        (GREETING + SPOKEN, [*LONG, TALK[3]]),
        (INSTRUCT, [TALK[0], *LONG]),
        (CHATML, [{"role": turn["role"], "content": "a"} for turn in LONG]),  # the same tokens again and again
        (CHATML.replace("{{ m.content }}", "{{ loop.index }}{{ m.content }}"), LONG),  # not the same text everywhere
        (INSTRUCT.replace("<s>", "<s>{{ messages | length }}"), LONG[:1] * 2 + LONG[1:2] * 20),
    ],
)
def test_many_answers_are_found_by_their_own_turns_as_by_all_turns(
    template: str,
    messages: list[Any],
    encode: Callable[[str], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for line in ({"messages": messages}, {"prompt": messages[:3], "completion": messages[3:]}):
        found = []
        for few in (8, 1000):
            monkeypatch.setattr(text_of_conversations, "_FEW", few)
            try:
                found.append(learned(tmp_path, template, line, encode))
            except ValueError as error:
                found.append([str(error)])
        assert found[0] == found[1]


def test_the_work_grows_with_the_number_of_answers_not_with_its_square(tmp_path: Path) -> None:
    work: list[list[int]] = []

    class Counted(Chat):
        def text(self, messages: Any, reply: bool = True) -> str:
            work[-1][0] += len(messages)
            return super().text(messages, reply)

    def encode(text: str) -> list[str]:
        work[-1][1] += len(text)
        return words(text)

    for messages in (LONG[:40], LONG):
        work.append([0, 0])
        (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
        list(conversations(tmp_path / "chats.jsonl", Counted(ChatTemplate(CHATML, 60.0)), encode))
    assert all(twice < 2.5 * once for once, twice in zip(*work, strict=True)), work


def test_prompts_and_completions(tmp_path: Path) -> None:
    line: dict[str, Any] = {"prompt": "why?", "completion": "so"}
    assert learned(tmp_path, CHATML, line) == ["so<|end|>\n"]
    line = {"prompt": TALK[:4], "completion": TALK[4:]}
    assert learned(tmp_path, CHATML, line) == ["that one<|end|>\n"], "answers of the prompt are not learned"


@pytest.mark.parametrize(
    ("template", "line", "message"),
    [
        (CHATML, "not json", r'expected \{"messages": .*\} or \{"prompt": .*\}, in UTF-8\. Fix or remove the line'),
        (CHATML, b"\xff", "in UTF-8"),
        (CHATML, [], "expected .*messages"),
        (CHATML, {"text": "x"}, "expected .*messages"),
        (CHATML, {"messages": ["x"]}, "expected .*messages"),
        (CHATML, {"messages": [{"role": "user", "content": "\ud800"}]}, "expected .*messages"),
        (CHATML, {"messages": []}, "expected an answer of role `assistant` that is not empty"),
        (CHATML, {"messages": TALK[:2]}, "expected an answer of role `assistant`"),
        (CHATML, {"prompt": "x", "completion": ""}, "expected an answer of role `assistant`"),
        (STRICT, {"messages": TALK}, "messages: refused by the chat template: a user begins"),
        ("{% if 1 // 0 %}{% endif %}", {"messages": TALK}, r"the chat template fails on them \(ZeroDivisionError"),
        (FORGETFUL, {"messages": TALK}, "begins with that of its first turns; it does not at message 2"),
    ],
)
def test_an_error_has_the_file_and_line(tmp_path: Path, template: str, line: Any, message: str) -> None:
    good = json.dumps({"messages": TALK[3:]}).encode()
    bad = line if isinstance(line, bytes) else line.encode() if isinstance(line, str) else json.dumps(line).encode()
    path = tmp_path / "chats.jsonl"
    path.write_bytes(good + b"\n" + bad + b"\n")
    chat = Chat(ChatTemplate(template, 60.0))
    at = 1 if "1 // 0" in template or template == FORGETFUL else 2  # the good line fails as well
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}:{at}: .*{message}"):
        list(conversations(path, chat, characters))


def test_a_tokenizer_whose_tokens_depend_on_the_whole_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"chats\.jsonl:1: expected a tokenizer whose tokens of the first turns do"):
        learned(tmp_path, CHATML, {"messages": TALK}, lambda text: [f"{len(text)}{letter}" for letter in text])


def test_every_missing_dataset_of_a_blend_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(text, "prepare", lambda *args: calls.append(args))
    tiny_corpus(tmp_path / "a")
    text.prepare_missing(DataConfig(prefix=f"0.7 {tmp_path}/a 0.3 {tmp_path}/b"))
    text.prepare_missing(DataConfig(prefix=f"{tmp_path}/a"))
    assert calls == [(Source("stdlib"), tmp_path / "b", "byte-level", None)]
