"""Rollouts as trees of tokens: prompts with their responses, or with turns that branch, from lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy

from ..core.errors import shown
from ..models.chat import Chat
from ..models.trees import Example, Tree, merged
from .text_files import Row, content, parsed

ROLLOUT_KEYS = ({"prompt", "responses"}, {"prompt", "children"})
_PER_TOKEN = ("old_logprobs", "ref_logprobs")
_COLUMNS = ("advantages", *_PER_TOKEN)
_FORM = '{"prompt": …, "responses": [{"text": "…", "reward": 1.0}, …]}, or with `children` that may have children'
_EPSILON = 1e-4  # added to the standard deviation of rewards, as in TRL's GRPO


class Rollouts:
    """The rollouts of JSONL files.

    A line has a `prompt`, and `responses` or nested `children`: each a text, a list of token ids, or an object with
    `text` or `tokens`. An object may have a `reward` or an `advantage`, and for each of its tokens `old_logprobs`,
    `ref_logprobs` and a `loss_mask`. A text that ends a branch gets the end-of-document token. The prompt and each
    text are tokenized alone. The prompt is not learned; of the others, every token is, once.

    The advantage of a response with a reward is that of GRPO: (reward - mean) / (standard deviation + 1e-4) over the
    responses of its line.

    Args:
        load_chat: returns the chat template, if the lines have messages.

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

        Raises:
            ValueError: a line in another form, or one whose responses have other values than those of the first line.
                The message has the file and the line.
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
            raise ValueError(f"expected {_FORM}. Fix or remove the line.") from None
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
                    raise ValueError(
                        f"expected `{name}` of {len(tokens)} tokens; it has {len(node[name])}. Correct it."
                    )
        if "advantage" in content:
            node["advantages"] = [_number("advantage", content["advantage"])] * len(tokens)
        if "reward" in content:
            node["reward"] = _number("reward", content["reward"])
        return node | {"learned": [weight > 0 for weight in node["loss_mask"]]}


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not numpy.isfinite(value):
        raise ValueError(f"expected a finite number in `{name}`; got {shown(value)}. Correct it.")
    return float(value)
