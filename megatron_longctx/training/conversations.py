"""Lines of JSON as tokens: conversations, with a mask of the assistant's, and rollouts.

Rollouts are trees: prompts with their responses, or with turns that branch.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy

from ..core.errors import refuse, shown
from ..mcore.corpus import Document
from ..models.chat import Chat, load_chat
from ..models.trees import Example, Tree, divided, merged
from .text_files import CONVERSATION_KEYS, Piece, Row, content, parsed

Messages = Sequence[Mapping[str, Any]]
# The most tokens at the end of a text that may change when more text follows.
_MAX_REPLACED = 8
_FEW = 8  # answers, whose first turns are all laid out and tokenized
_CONTEXT = 64  # tokens before an answer
_MAX_SHIFT = 4  # tokens that may differ where a part of a text begins
_FORM = '{"messages": [{"role": "user", "content": "…"}, …]} or {"prompt": "…", "completion": "…"}, in UTF-8'


def chat_of(template: str | None, tokenizer: Any) -> Chat:
    """Return the template of the file, or the tokenizer's own. Refuse what has none that can be used."""
    chat = load_chat(template, tokenizer, "--chat-template")
    if chat.template is None:
        expected = "a file: the lines are conversations, and this tokenizer has no chat template"
        raise refuse("--chat-template", None, expected, "Name a file with a Jinja template.")
    return chat


def conversations(part: Path | Piece, chat: Chat, encode: Callable[[str], Sequence[int]]) -> Iterator[Document]:
    """Return the tokens of every line's conversation, with a mask of the tokens to learn: the assistant's.

    A line has `messages`, or a `prompt` and its `completion`: texts, or lists of messages. Only answers in the
    completion are learned. Refuse other lines, lines without an answer, and a template that does not lay them out turn
    by turn, with the file and the line.
    """
    return parsed(part, lambda row: _tokens(*_messages(row), chat, encode), CONVERSATION_KEYS)


def with_shared_beginnings(documents: Iterable[Document], capacity: int) -> Iterator[tuple[int, Tree]]:
    """Yield conversations as trees of at most `capacity` tokens, in which equal beginnings are stored once.

    All tokens of the conversations are in memory. A longer conversation is a tree of its own.
    """
    examples = []
    for ids, learned in documents:
        weights = numpy.array([0.0, *(learned or ())[1:]], numpy.float32)
        example = Example(numpy.array(ids), weights, numpy.zeros((len(ids), 0), numpy.float32))
        if len(ids) > capacity:
            yield 0, merged([example])[0]
        elif ids:
            examples.append(example)
    for tree in merged(examples):
        yield from ((0, part) for part in divided(tree, capacity))


def _messages(row: Row) -> tuple[list[Mapping[str, Any]], int]:
    """Return the messages of a line or row, and how many of them are the prompt, which is not learned."""
    prompt: Messages = []
    try:
        found = content(row)
        json.dumps(found, ensure_ascii=False).encode()  # refuses half of a surrogate pair
        if "messages" in found:
            completion = found["messages"]
        else:
            prompt, completion = (
                [{"role": role, "content": part}] if isinstance(part, str) else part
                for role, part in (("user", found["prompt"]), ("assistant", found["completion"]))
            )
        messages = [*prompt, *completion]
        if not all(isinstance(message["role"], str) for message in messages):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"expected {_FORM}. Fix or remove the line.") from None
    if not any(message["role"] == "assistant" and message.get("content") != "" for message in completion):
        raise ValueError("expected an answer of role `assistant` that is not empty. Fix or remove the line.")
    return messages, len(prompt)


def _tokens(messages: Messages, prompt: int, chat: Chat, encode: Callable[[str], Sequence[int]]) -> Document:
    """Return tokens and mask. An answer is what the template adds after the generation prompt, with the end of turn."""
    text = chat.text(messages, reply=False)
    ids = list(encode(text))
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    learned_answers = [at for at in answers if at >= prompt]
    spans: list[tuple[int, int]] | None = None
    if len(learned_answers) > _FEW:
        with suppress(ValueError):  # then the first turns are laid out in full
            spans = list(_spans(messages, text, learned_answers, chat, messages[: answers[0] + 1]))
    if spans is None:
        spans = list(_spans(messages, text, learned_answers, chat))
    learned = [False] * len(ids)
    known: list[tuple[int, int]] = []  # positions in the text with their numbers of tokens
    for span in spans:
        for end in span:
            known.append((end, _num_tokens(ids, text, end, known if len(spans) > _FEW else [], encode)))
        begin, end = known[-2][1], known[-1][1]
        learned[begin:end] = [True] * (end - begin)
    return ids, learned


def _spans(
    messages: Messages, text: str, answers: Sequence[int], chat: Chat, head: Messages | None = None
) -> Iterator[tuple[int, int]]:
    """Yield where in `text`, that of all messages, every answer begins and ends.

    `head` is the first turn. If given, it replaces all turns before an answer's own, whose texts would take time
    in the square of their number. Refuse a text that does not begin with that of its first turns or, with a head, that
    depends on more than its turn.
    """
    start = done = skipped = 0
    for at in answers:
        before = head if start and head is not None else ()
        parts = [chat.text([*before, *messages[start:end]], end == at)[skipped:] for end in (at, at + 1)]
        if not (text.startswith(parts[1], done) and parts[1].startswith(parts[0])):
            raise ValueError(
                f"expected a chat template whose text of a conversation begins with that of its first turns; it "
                f"does not at message {at + 1}. Use another template, or a line for each of its answers."
            )
        yield done + len(parts[0]), done + len(parts[1])
        if head is not None:
            start, done = at + 1, done + len(parts[1])
            skipped = skipped or len(chat.text(head, reply=False))
    if head is not None and chat.text([*head, *messages[start:]], reply=False)[skipped:] != text[done:]:
        raise ValueError("expected turns that do not depend on earlier ones")


def _num_tokens(
    ids: Sequence[int], text: str, end: int, known: Sequence[tuple[int, int]], encode: Callable[[str], Sequence[int]]
) -> int:
    """Return how many tokens a conversation shares with its first `end` characters.

    `known` are earlier positions with their numbers of tokens. The tokens since one of them suffice if they match the
    conversation's in a single place. They may differ where they begin, as with a token at the start of a text.
    """
    context = _CONTEXT
    while begun := next((mark for mark in reversed(known) if mark[1] + context <= known[-1][1]), None):
        part, found = list(encode(text[begun[0] : end])), []
        for shift in range(max(begun[1] - _MAX_SHIFT, 0), begun[1] + _MAX_SHIFT + 1):
            equal = _MAX_SHIFT + _num_equal(ids[shift + _MAX_SHIFT : shift + len(part)], part[_MAX_SHIFT:])
            if len(part) - equal <= _MAX_REPLACED:
                found.append(shift + equal)
        if len(found) == 1:
            return found[0]
        context *= 2
    first = list(encode(text[:end]))
    count = _num_equal(ids, first)
    if len(first) - count > _MAX_REPLACED:
        raise ValueError(
            "expected a tokenizer whose tokens of the first turns do not depend on what follows. Use another tokenizer "
            "or another template."
        )
    return count


def _num_equal(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return how many first tokens are equal. A token that spans the end of a text is not."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False)))


_PER_TOKEN = ("old_logprobs", "ref_logprobs")
_COLUMNS = ("advantages", *_PER_TOKEN)
_TREE_FORM = '{"prompt": …, "responses": [{"text": "…", "reward": 1.0}, …]}, or with `children` that may have children'
_EPSILON = 1e-4  # added to the standard deviation of rewards, as in TRL's GRPO


class Rollouts:
    """The rollouts of JSONL files.

    A line has a `prompt`, and `responses` or nested `children`: each a text, a list of token ids, or an object with
    `text` or `tokens`. An object may have a `reward` or an `advantage`, and for each of its tokens `old_logprobs`,
    `ref_logprobs` and a `loss_mask`. A text that ends a branch gets the end-of-document token. The prompt and each
    text are tokenized alone. The prompt is not learned; of the others, every token is, once.

    The advantage of a response with a reward is that of GRPO: (reward - mean) / (standard deviation + 1e-4) over the
    responses of its line. `load_chat` returns the chat template, if the lines have messages.

    Attributes:
        columns: the values that all responses have (`corpus.SIDES`).
        chat: the template, if lines so far had messages; after construction, the first one.
    """

    def __init__(
        self, paths: Sequence[Path], encode: Callable[[str], Sequence[int]], eod: int, load_chat: Callable[[], Chat]
    ) -> None:
        self._paths, self._encode, self._eod, self._load_chat = paths, encode, eod, load_chat
        self.chat: Chat | None = None
        first = next((line for path in paths for line in parsed(path, self._responses)), [])
        self.columns = tuple(name for name in _COLUMNS if first and name in first[0][-1])

    def trees(self) -> Iterator[tuple[int, Tree]]:
        """Yield every tree with the number of its line.

        Refuse lines of another form, or whose responses have other values than those of the first, with file and line.
        """
        for path in self._paths:
            for number, trees in enumerate(parsed(path, self._trees), start=1):
                yield from ((number, tree) for tree in trees)

    def _trees(self, line: Row) -> list[Tree]:
        counted: set[int] = set()
        examples = []
        for branch in self._responses(line):
            tokens: list[int] = []
            weights: list[float] = []
            values: list[list[float]] = []
            for place, node in enumerate(branch):
                again, size = id(node) in counted, len(node["tokens"])
                counted.add(id(node))
                tokens += node["tokens"]
                weights += [0.0] * size if again else node["loss_mask"]
                for name in _COLUMNS if place else ():
                    if (name in node) != (name in self.columns):
                        text = "`advantage` or `reward`" if name == "advantages" else f"`{name}`"
                        which = "every response" if name in self.columns else "no response"
                        raise ValueError(f"expected {text} in {which}, as in the first line. Correct it.")
                columns = [node.get(name, [0.0] * size) for name in self.columns]
                values += [[x[at] * node["learned"][at] for x in columns] for at in range(size)]
            weights[0] = 0.0
            table = numpy.array(values, numpy.float32).reshape(len(tokens), len(self.columns))
            examples.append(Example(numpy.array(tokens), numpy.array(weights, numpy.float32), table))
        return merged(examples)

    def _responses(self, line: Row) -> list[list[dict[str, Any]]]:
        """Return the branches of a line: their nodes from the prompt on, each with tokens and values."""
        try:
            found = content(line)
            prompt, nested, end = found["prompt"], "responses" not in found, [self._eod]
            if isinstance(prompt, list) and any(isinstance(each, dict) for each in prompt):
                if nested:
                    raise ValueError("expected `responses` after messages; `children` follow a text or tokens. Fix it.")
                prompt, end = self._chat_prompt(prompt)
            node = self._node({"tokens" if isinstance(prompt, list) else "text": prompt}, False)
            branches = list(self._branches(found["children" if nested else "responses"], [node], nested, end))
        except (KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError, UnicodeError):
            raise ValueError(f"expected {_TREE_FORM}. Fix or remove the line.") from None
        rewards = [branch[-1].pop("reward", None) for branch in branches]
        if any(reward is not None for reward in rewards):
            if None in rewards:
                raise ValueError("expected a `reward` of every response of the line, or of none. Add it.")
            mean, spread = fmean(rewards), stdev(rewards) if len(rewards) > 1 else 0.0
            for branch, reward in zip(branches, rewards, strict=True):
                advantage = (reward - mean) / (spread + _EPSILON)
                branch[-1].setdefault("advantages", [advantage] * len(branch[-1]["tokens"]))
        return branches

    def _chat_prompt(self, messages: list[dict[str, Any]]) -> tuple[str, list[int]]:
        """Return the text of messages up to where the reply begins, and the tokens that end a reply."""
        if not all(isinstance(message["role"], str) for message in messages):
            raise TypeError
        chat = self.chat = self.chat or self._load_chat()
        end = [*chat.stop_tokens, *(token for text in chat.stop_texts for token in self._encode(text))]
        return chat.text(messages), end or [self._eod]

    def _branches(
        self, children: Any, above: list[dict[str, Any]], nested: bool, end: list[int]
    ) -> Iterator[list[dict[str, Any]]]:
        if not isinstance(children, list) or not children:
            raise TypeError
        for child in children:
            content = child if isinstance(child, dict) else {"tokens" if isinstance(child, list) else "text": child}
            below = content.get("children") if nested else None
            node = self._node(content, True, [] if below else end)
            if nested and "reward" in node:
                raise ValueError("expected `advantage`, not `reward`, in children: branches share their tokens.")
            yield from self._branches(below, [*above, node], True, end) if below else [[*above, node]]

    def _node(self, content: dict[str, Any], learned: bool, end: Sequence[int] = ()) -> dict[str, Any]:
        """Return the tokens of a part of a rollout, with a number of each kind for every token."""
        if "tokens" in content:
            tokens = content["tokens"]
            if not all(type(token) is int and token >= 0 for token in tokens):
                raise ValueError(f"expected token ids from 0 on; got {shown(tokens)}. Fix or remove the line.")
        else:
            content["text"].encode()  # refuses half of a surrogate pair
            tokens = [*self._encode(content["text"]), *end]
        if not tokens:
            raise ValueError("expected a prompt and responses that are not empty. Fix or remove the line.")
        node: dict[str, Any] = {"tokens": list(tokens), "loss_mask": [float(learned)] * len(tokens)}
        for name in (*_PER_TOKEN, "loss_mask"):
            if learned and name in content:
                node[name] = [_number(name, x) for x in content[name]]
                if len(node[name]) != len(tokens):
                    found = len(node[name])
                    raise ValueError(f"expected `{name}` of {len(tokens)} tokens; it has {found}. Correct it.")
        if {"advantage", "reward"} <= content.keys():
            raise ValueError("expected a `reward` or an `advantage`; both are given. Leave one out.")
        if "advantage" in content:
            node["advantages"] = [_number("advantage", content["advantage"])] * len(tokens)
        if "reward" in content:
            node["reward"] = _number("reward", content["reward"])
        return node | {"learned": [weight > 0 for weight in node["loss_mask"]]}


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not numpy.isfinite(value):
        raise ValueError(f"expected a finite number in `{name}`; got {shown(value)}. Correct it.")
    return float(value)
