"""JSON schemas and regular expressions: what xgrammar would leave out of one is refused."""

import json
from typing import Any

import pytest

from megatron_longctx.serving.grammar import _check_followed, _left_out_of_regex, _refuse

INTEGER, STRING, OBJECT = {"type": "integer"}, {"type": "string"}, {"type": "object"}
PROPERTY = {"properties": {"a": INTEGER}}
# Schemas, each with an instance that breaks it.
BROKEN: tuple[tuple[dict[str, Any], str], ...] = (
    *((INTEGER | {key: 5}, text) for key, text in (("minimum", "4"), ("maximum", "6"), ("exclusiveMinimum", "5"))),
    *((INTEGER | {"multipleOf": 3}, "4"), ({"type": "number", "multipleOf": 3}, "4.0"), ({"minimum": 5}, "3")),
    *((STRING | {"minLength": 3}, '"a"'), (STRING | {"pattern": "^a+$"}, '"b"'), (STRING | {"format": "date"}, '"x"')),
    (STRING | {"pattern": "^a+$", "minLength": 3}, '"a"'),
    (STRING | {"format": "date", "maxLength": 1}, '"2020-01-01"'),
    *(({"maxLength": 1}, '"abc"'), ({"type": ["string", "null"], "maxLength": 1}, '"abc"'), ({"not": INTEGER}, "1")),
    *(({"items": INTEGER}, '["x"]'), ({"items": INTEGER, "maxItems": 1}, "[1, 2]"), (PROPERTY, '{"a": "x"}')),
    *(({"items": INTEGER, key: value}, "[1, 1]") for key, value in (("uniqueItems", True), ("contains", {"const": 3}))),
    *((OBJECT | {"required": ["a"]}, "{}"), (OBJECT | PROPERTY | {"required": ["a"]}, "{}"), ({"const": 3}, "4")),
    (OBJECT | {"additionalProperties": INTEGER, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    (OBJECT | {"additionalProperties": INTEGER, "maxProperties": 1}, '{"a": 1, "b": 2}'),
    *(({key: [INTEGER], "minimum": 5}, "3") for key in ("anyOf", "oneOf", "allOf")),
    *((INTEGER | {key: [{"minimum": 5}]}, "3") for key in ("anyOf", "oneOf", "allOf")),
    *((OBJECT | PROPERTY | {"anyOf": [{"required": ["a"]}]}, "{}"), ({"enum": [1, 9], "minimum": 5}, "1")),
    ({"$ref": "#/$defs/x", "$defs": {"x": INTEGER}, "minimum": 5}, "3"),
    ({"anyOf": [{"allOf": [STRING, INTEGER]}]}, "1"),
    *(({"$ref": "https://fox/schema"}, "1"), ({"anyOf": []}, "1"), ({"properties": {"a": {"not": {}}}}, '{"a": 1}')),
    ({"if": INTEGER, "then": {"minimum": 3}}, "1"), (STRING | {"format": "regex"}, '"("'),
    *((STRING | {"pattern": regex}, text) for regex, text in (("a^b", '"ab"'), ("(a$|b)c", '"ac"'), (r"\Aa", '"Aa"'))),
    *((STRING | {"pattern": regex}, text) for regex, text in (('"', '"""'), (r"\n", '"\n"'), (r"\x22", '"""'))),
    *((OBJECT | {"patternProperties": {key: INTEGER}}, text) for key, text in (("a^", '{"a": ""}'), ('"', '{""": 1}'))),
    (OBJECT | PROPERTY | {"propertyNames": {"pattern": "^b$"}}, '{"a": 1}'),
)  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "text"), BROKEN, ids=lambda each: each if isinstance(each, str) else json.dumps(each)
)
def test_a_schema_is_followed_or_refused(schema: dict[str, Any], text: str) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    try:
        _check_followed(schema)
    except ValueError as error:
        assert "is not supported: leave it out" in str(error)
        return
    info = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)], vocab_size=256, stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema), any_whitespace=False)
    matcher = xgrammar.GrammarMatcher(compiled)
    assert not (matcher.accept_string(text) and matcher.accept_token(0))


def test_schemas_that_libraries_make_are_taken() -> None:
    nothing = {"type": "null"}
    _check_followed(OBJECT | {
        "$defs": {"X": {"enum": ["a", "b"], "title": "X", "type": "string"}}, "title": "Answer", "required": ["x"],
        "properties": {
            "x": {"$ref": "#/$defs/X", "description": "one", "default": "a"}, "y": {"const": "b", "type": "string"},
            "z": {"anyOf": [INTEGER | {"minimum": 0}, nothing], "default": None, "title": "Z", "x-order": 1},
            "w": {"type": ["array", "null"], "items": {"allOf": [{"$ref": "#/$defs/X"}]}, "uniqueItems": False},
        },
        "additionalProperties": False,
    })  # fmt: skip


@pytest.mark.parametrize("regex", ["a^b", "a$b", "(^a|b)c", "(a)$|^b", "^^a", r"\Aa\Z", r"[\h]", r"\\^"])
def test_what_would_be_left_out_of_a_regular_expression_is_refused(regex: str) -> None:
    with pytest.raises(ValueError, match=r"in(side)? a regular expression is not supported: leave it out"):
        _refuse(_left_out_of_regex(regex))


@pytest.mark.parametrize("regex", ["^a|b$", "^a$|^b$", "^(a|b)$", r"\^a\$", "[^$]", "[$^]+", r"\d+\.\w*[\]^]", "^", ""])
def test_anchors_at_ends_and_escapes_are_taken(regex: str) -> None:
    _refuse(_left_out_of_regex(regex))
