"""Chats as text: templates of files and tokenizers, invalid templates, and text that is streamed token by token."""

import random
from pathlib import Path

import pytest
from megatron.core.tokenizers import MegatronTokenizer

from megatron_longctx.mcore.tokenizer import build_tokenizer, detokenize
from megatron_longctx.models import chat as chat_module
from megatron_longctx.models.chat import Chat, load_chat, special_tokens, template_of
from megatron_longctx.models.chat_template import ChatTemplate, InvalidTemplate
from megatron_longctx.serving.text_stream import TextStream

TEMPLATE = """\
{%- for message in messages %}
<|{{ message['role'] }}|>{{ message['content'] }}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what <is> it?"},
    {"role": "assistant", "content": "a thing"},
    {"role": "user", "content": "which?"},
]
BYTES = build_tokenizer("byte-level")


def chat_with(template: str, folder: Path) -> Chat:
    (folder / "chat.jinja").write_text(template)
    return load_chat(str(folder / "chat.jinja"), BYTES)


def test_without_a_template_a_chat_has_one_message_per_line() -> None:
    plain = load_chat(None, BYTES)
    assert plain == Chat() and plain.text(TALK) == "be brief\nwhat <is> it?\na thing\nwhich?\n"


def test_a_template_formats_roles_and_ends_replies(tmp_path: Path) -> None:
    chat = chat_with(TEMPLATE, tmp_path)
    assert chat.text(TALK[:2]) == "<|system|>be brief<|end|>\n<|user|>what <is> it?<|end|>\n<|assistant|>"
    assert chat.text(TALK[1:3], reply=False) == "<|user|>what <is> it?<|end|>\n<|assistant|>a thing<|end|>\n"
    assert (chat.stop_tokens, chat.stop_texts) == ((), ("<|end|>",))


def test_an_end_of_a_single_token_is_a_stop_token(tmp_path: Path) -> None:
    chat = chat_with("{% for m in messages %}{{ m.content }}\x03\n{% endfor %}", tmp_path)
    assert (chat.stop_tokens, chat.stop_texts) == ((3,), ())


def test_every_turn_begins_with_the_previous_turns(tmp_path: Path) -> None:
    for chat in (Chat(), chat_with(TEMPLATE, tmp_path)):
        before = BYTES.tokenize(chat.text(TALK[:2]) + "a thing")
        after = BYTES.tokenize(chat.text(TALK))
        assert after[: len(before)] == before and len(after) > len(before)


def test_a_files_template_takes_precedence_over_the_tokenizers(tmp_path: Path) -> None:
    metadata = {"library": "byte-level", "chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}"}
    own = MegatronTokenizer.from_pretrained(metadata_path=metadata)
    assert load_chat(None, own).text(TALK[:2]) == "[be brief][what <is> it?]"
    (tmp_path / "other").write_text("{{ messages | length }}{{ eos_token }}")
    assert load_chat(str(tmp_path / "other"), own).text(TALK) == "4"
    own.chat_template = {"default": "{{ messages[0].role }}", "tools": "x"}
    assert load_chat(None, own).text(TALK) == "system"
    assert template_of(BYTES) is None


def test_templates_receive_the_texts_of_special_tokens(tmp_path: Path) -> None:
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "byte-level"})
    # As the wrapper of Hugging Face's tokenizers stores them.
    tokenizer._tokenizer.bos_token, tokenizer._tokenizer.eos_token = "<s>", "</s>"
    assert special_tokens(tokenizer) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "", "pad_token": ""}
    path = tmp_path / "chat.jinja"
    path.write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    chat = load_chat(str(path), tokenizer)
    assert chat.text(TALK[1:3]) == "<s>what <is> it?</s>a thing</s>" and chat.stop_texts == ("</s>",)


def test_the_features_that_templates_of_hugging_face_use(tmp_path: Path) -> None:
    source = """\
{% for m in messages %}
{% if m.role == 'system' %}{% continue %}{% endif %}
{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}
{% endfor %}
{{ strftime_now('%Y') | length }}{% if tools %}tools{% endif %}"""
    assert chat_with(source, tmp_path).text(TALK) == '{"role": "user", "content": "what <is> it?"}4'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", r"expected a Jinja template \(line 1: Unexpected end of template"),
        ("\n{{ messages | nonsense }}", r"expected a Jinja template \(line 2: No filter named 'nonsense'"),
        ("{{ 1 // 0 }}", r"formats a user's question \(messages: the chat template fails on them \(ZeroDivisionError"),
        ("{{ raise_exception('only tools') }}", r"refused by the chat template: only tools\)"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute .append. of .list. object is unsafe"),
        ("{% include '/etc/passwd' %}", "fails on them|no loader"),
        ("{{ nobody.name }}", "'nobody' is undefined"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_broken_template_is_refused(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        chat_with(source, tmp_path)
    assert str(caught.value).startswith(f"inference.chat_template={tmp_path}/chat.jinja: expected a")
    assert str(caught.value).endswith("Correct it, or name another file with inference.chat_template.")


UNBOUNDED = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ (10 ** 10 ** 10) | length }}",
    "text": "{{ 'x' * 10 ** 12 }}",
    "format": "{{ '%999999999999d' % 1 }}",
    "doubling": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}"
    ),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_template_is_bounded_in_time_and_memory(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "_MAX_CPU_S", 1.0)
    with pytest.raises(ValueError, match=r"formats a user's question \(messages: .*(takes more than|Error)"):
        chat_with(UNBOUNDED[name], tmp_path)


def test_a_template_that_exceeded_its_bounds_still_formats_the_next_chat() -> None:
    source = "{% if n %}{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{% endif %}{{ x * m }}"
    template = ChatTemplate(source, cpu_s=0.5)
    for _ in range(2):
        assert template.render({"x": "é\n", "m": 2}) == "é\né\n"
        with pytest.raises(ValueError, match=r"^the chat template takes more than 0.5 s of processor time or 2048 MiB"):
            template.render({"n": 99_999})
    with pytest.raises(ValueError, match=r"makes 3,000,000 characters of them, more than 1,04\d,\d+"):
        template.render({"x": "x" * 30, "m": 100_000})
    assert template.render({"x": "x" * 200_000, "m": 10}) == "x" * 2_000_000, "a long conversation may be long"


def test_a_template_that_cannot_be_parsed_ends_only_its_process() -> None:
    for source in ("{{ " + "[" * 3000, "{{ " + "(" * 100_000 + ")" * 100_000 + " }}", "{% if x %}" * 3000):
        with pytest.raises(InvalidTemplate, match=r"^\S.{5,}"):
            ChatTemplate(source, cpu_s=5)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "large").write_bytes(b" " * (2**20 + 1))
    for name, message in (
        ("nowhere", r"nowhere: expected a file with a Jinja template \(No such file"),
        ("bytes", "not UTF-8"),
        ("large", r"large: expected a file with a Jinja template \(more than 1,048,576 bytes\)"),
        ("/dev/zero", r"a device or a pipe, not a file"),
    ):
        with pytest.raises(ValueError, match=message):
            load_chat(str(tmp_path / name), BYTES)


def test_messages_that_a_template_refuses(tmp_path: Path) -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}"
    with pytest.raises(ValueError, match="messages: refused by the chat template: users first"):
        chat_with(source, tmp_path).text(TALK)
    # A template that refuses all replies still formats first questions. The end of its replies stays unknown.
    source = "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}"
    chat = chat_with(source, tmp_path)
    assert chat.text(TALK[:1]) == "" and chat.stop_texts == ()


def streamed(text: str, *stops: str) -> tuple[str, bool]:
    """Return the text of a stream that receives `text` byte by byte, and whether a stop text ended it."""
    stream = TextStream(lambda ids: bytes(ids).decode("utf-8", errors="replace"), stops)
    shown = ""
    for byte in text.encode():
        shown += stream.feed(byte)
        assert not any(stop in shown for stop in stops)
        if stream.stopped:
            return shown, True
    return shown + stream.finish(), stream.stopped


def test_stop_texts_end_a_stream_wherever_tokens_split_them() -> None:
    assert streamed("one two three", "two", "tw!") == ("one ", True)
    assert streamed("one tw", "two") == ("one tw", False)
    assert streamed("größer", "ß") == ("grö", True)
    assert streamed("größer") == ("größer", False)
    assert streamed("aab", "ab") == ("a", True)
    assert streamed("xaby", "ab", "b") == ("x", True)


def test_a_stop_text_before_half_a_character_ends_the_stream() -> None:
    pieces = [b"one", b" sto", b"p\xc3"]
    stream = TextStream(lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace"), ["stop"])
    shown = [stream.feed(i) for i in range(3)]
    assert "".join(shown) + stream.finish() == "one " and stream.stopped


def test_a_stream_equals_the_decoded_whole() -> None:
    source = random.Random(0)
    for _ in range(200):
        ids = [source.choice((source.randrange(256), *"aß€😀".encode(), 256, 257)) for _ in range(60)]
        stream = TextStream(lambda ids: detokenize(BYTES, ids))
        assert "".join(stream.feed(token) for token in ids) + stream.finish() == detokenize(BYTES, ids)


def test_spaces_that_a_decoder_strips_at_the_start_are_kept_between_tokens() -> None:
    words = ["▁one", "▁two", "th", "ree", "▁", "four"]
    stream = TextStream(lambda ids: "".join(words[i] for i in ids).replace("▁", " ").lstrip(" "))
    assert "".join(stream.feed(i) for i in range(6)) + stream.finish() == "one twothree four"


@pytest.mark.parametrize(("character", "stops", "most"), [("x", ("stop",), 3), ("\ufffd", (), 199), ("", (), 199)])
def test_decoding_does_not_slow_down_with_the_text(character: str, stops: tuple[str, ...], most: int) -> None:
    """This includes tokens without a complete character, which a model may repeat to the end."""
    decoded: list[int] = []

    def decode(ids: object) -> str:
        decoded.append(len(list(ids)))  # type: ignore[call-overload]
        return character * decoded[-1]

    stream = TextStream(decode, stops)
    shown = "".join(stream.feed(i) for i in range(500))
    assert len(shown) >= 400 * len(character) and len(shown + stream.finish()) == 500 * len(character)
    assert max(decoded) <= most
