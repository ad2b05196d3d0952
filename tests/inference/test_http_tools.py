"""Calls of tools are found in what a model writes, in the format of its template."""

import json

import pytest

from megatron_longctx.serving.http_api import tools

CALL = {"name": "f", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    ("template", "text", "content", "calls", "reasoning"),
    [
        ("<tool_call> arguments", 'so <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "so", 1, None),
        ("<tool_call> arguments", f"<tool_call>{json.dumps(CALL)}</tool_call>" * 2, None, 2, None),
        ("<tool_call> arguments", "<tool_call>{</tool_call>", "<tool_call>{</tool_call>", 0, None),
        ("<tool_call> arguments", "<tool_call>" + 9999 * "[", "<tool_call>" + 9999 * "[", 0, None),
        ("ipython parameters", '{"name": "f", "parameters": {"a": 1}}', None, 1, None),
        ("ipython parameters", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; ' * 2, None, 0, None),
        (
            "ipython parameters",
            '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 1}}',
            None,
            2,
            None,
        ),
        ("ipython parameters", "7", "7", 0, None),
        (
            "<|channel|> to=functions.",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"a": 1}<|call|>',
            None,
            1,
            "hm",
        ),
        ("<|channel|> to=functions.", "<|channel|>final<|message|>yes", "yes", 0, ""),
    ],
)
def test_calls_are_found_in_the_format_of_the_template(
    template: str, text: str, content: str | None, calls: int, reasoning: str | None
) -> None:
    found = tools.format_of("tools " + template)
    assert found is not None and tools.format_of(template) is None and tools.format_of("tools <call>") is None
    message = found.parsed(text).message
    if template.startswith("ipython") and text.count("python_tag") == 2:
        content = text
    assert message["content"] == content and message.get("reasoning_content") == reasoning
    functions = [call["function"] for call in message.get("tool_calls", [])]
    assert [(f["name"], json.loads(f["arguments"])) for f in functions] == [("f", {"a": 1})] * calls
