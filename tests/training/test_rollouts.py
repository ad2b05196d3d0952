"""Rollouts from JSONL to batches: trees with the tokens, labels and values of every response."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.config import Config
from megatron_longctx.core.plans.mask import documents
from megatron_longctx.mcore.corpus import check_corpus
from megatron_longctx.mcore.data import TrainingBatch, TrainingData, check_packs, first_pack
from megatron_longctx.mcore.tokenizer import BYTE_LEVEL_EOD, build_tokenizer
from megatron_longctx.training.text import Source, prepare
from tests.shared.training import tiny_config
from tests.shared.trees import tokens_before

TOKENIZER = build_tokenizer("byte-level")
ROLLOUTS = {"data.format": "rollouts", "data.packing": "best_fit"}


def write(root: Path, *lines: Any, name: str = "corpus", template: str | None = None) -> Path:
    path = root / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if template is not None:
        (root / "template").write_text(template)
    prepare(Source(str(path)), root / name, "byte-level", None, template and str(root / "template"))
    return path


def config_of(root: Path, **settings: Any) -> Config:
    return tiny_config(root, "rollouts", {**ROLLOUTS, **settings})


def learned(batches: list[TrainingBatch]) -> list[tuple[str, int, tuple[float, ...]]]:
    """Return the text up to each learned label, the label's weight, and its values, sorted."""
    found = []
    for batch in batches:
        assert batch.documents is not None and batch.parents is not None
        places = documents(batch.documents, parents=batch.parents).documents
        for node, (start, stop, _) in enumerate(places):
            before = tokens_before(batch.tokens[0].tolist(), batch.documents, batch.parents, node)
            for at in range(start, stop):
                before.append(int(batch.tokens[0, at]))
                if weight := float(batch.loss_mask[0, at]):
                    text = "".join(map(_letter, [*before, int(batch.labels[0, at])]))
                    values = (batch.advantages, batch.old_logprobs, batch.ref_logprobs)
                    found.append((text, weight, tuple(round(float(x[0, at]), 4) for x in values if x is not None)))
    return sorted(found)


def _letter(token: int) -> str:
    return "." if token == BYTE_LEVEL_EOD else chr(token)


def pass_of(config: Config) -> list[TrainingBatch]:
    data = TrainingData(config, TOKENIZER, 384)
    return [data[[number]] for number in range(data._sources[0].order.size)]


def test_every_response_is_learned_from_the_prompts_last_token_on(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "abc", "responses": ["xy", "xz", {"text": "z"}]}, {"prompt": "q", "responses": ["r"]})
    config = config_of(tmp_path)
    assert check_corpus(config.data) == 2 + 1 + 3 + 3 + 3 + 3  # ab, c, xy., xz., cz., and qr.
    (batch,) = pass_of(config)
    texts = ("abcx", "abcxy", "abcxy.", "abcx", "abcxz", "abcxz.", "abcz", "abcz.", "qr", "qr.")
    # xy and xz share the x, which both learn.
    assert sum(weight for _, weight, _ in learned([batch])) == len(texts)
    assert {text for text, _, _ in learned([batch])} == {*texts}
    assert first_pack(config) == (batch.documents, batch.parents) and batch.advantages is None


def test_rewards_become_advantages_of_their_group(tmp_path: Path) -> None:
    """As in TRL: (reward - mean) / (standard deviation + 1e-4), here 2 over the square root of 2, plus 1e-4."""
    first = {"tokens": [120], "reward": 1, "old_logprobs": [-0.5]}
    second = {"tokens": [120, 121], "reward": 3.0, "old_logprobs": [-0.25, -2], "loss_mask": [1, 0]}
    write(tmp_path, {"prompt": [97, 98], "responses": [first, second]},
          {"prompt": "a", "responses": [{"text": "b", "advantage": 0.5, "old_logprobs": [-1, -1]}]})  # fmt: skip
    expected = [("ab", 1.0, (0.5, -1.0)), ("ab.", 1.0, (0.5, -1.0)), ("abx", 1.0, (-0.7071, -0.5)),
                ("abx", 1.0, (0.7071, -0.25))]  # fmt: skip
    found = learned(pass_of(config_of(tmp_path)))
    assert [(text, weight, (pytest.approx(a, abs=2e-4), b)) for text, weight, (a, b) in expected] == found


def test_turns_that_branch_are_learned_once(tmp_path: Path) -> None:
    leaves = [{"text": "1", "advantage": 1}, {"text": "2", "advantage": 2, "children": [{"text": "3", "advantage": 3}]}]
    write(tmp_path, {"prompt": "p", "children": [{"text": "uv", "advantage": -1, "children": leaves}]})
    assert learned(pass_of(config_of(tmp_path))) == [
        ("pu", 1, (-1,)), ("puv", 1, (-1,)), ("puv1", 1, (1,)), ("puv1.", 1, (1,)), ("puv2", 1, (2,)),
        ("puv23", 1, (3,)), ("puv23.", 1, (3,)),
    ]  # fmt: skip


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}a[{% endif %}"
)
QUESTION = [{"role": "system", "content": "s"}, {"role": "user", "content": "why"}]


def test_a_prompt_of_messages_is_laid_out_by_the_template_which_ends_the_responses(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": QUESTION, "responses": ["x", {"tokens": [121]}]}, {"prompt": "q", "responses": ["r"]},
          template=TEMPLATE)  # fmt: skip
    texts = [text for text, _, _ in learned(pass_of(config_of(tmp_path)))]
    assert texts == ["qr", "qr.", "s[s]u[why]a[x", "s[s]u[why]a[x]", "s[s]u[why]a[y"]


@pytest.mark.parametrize(
    ("line", "template", "expected"),
    [
        ({"prompt": QUESTION, "responses": ["x"]}, None, "--chat-template=None: expected a file: the lines are conv"),
        ({"prompt": QUESTION, "children": ["x"]}, TEMPLATE, "expected `responses` after messages; `children` follow"),
        ({"prompt": [{"content": "x"}], "responses": ["x"]}, TEMPLATE, 'expected {"prompt": …, "responses": '),
        ({"prompt": [*QUESTION, 7], "responses": ["x"]}, TEMPLATE, 'expected {"prompt": …, "responses": '),
        ({"prompt": [{"role": "user"}], "responses": ["x"]}, "{{ messages[0].content + 'a' }}", "messages: "),
    ],
)
def test_messages_that_cannot_be_laid_out_are_refused(
    line: Any, template: str | None, expected: str, tmp_path: Path
) -> None:
    good = {"prompt": QUESTION if template else "a", "responses": ["b"]}
    with pytest.raises(ValueError) as raised:
        write(tmp_path, good, line, template=template)
    assert str(raised.value).startswith(f"{tmp_path / 'corpus.jsonl'}:2: {expected}")
    with pytest.raises(ValueError, match=r"--chat-template=.*expected none for rollouts whose prompts are no messages"):
        write(tmp_path, {"prompt": "a", "responses": ["b"]}, template=TEMPLATE)


def test_a_tree_that_does_not_fit_repeats_its_prompt_and_learns_no_token_twice(tmp_path: Path) -> None:
    responses = [f"{number}" * 3 for number in range(9)]
    write(tmp_path, {"prompt": "x", "responses": ["y"]}, {"prompt": "abcdefgh", "responses": responses})
    whole = learned(pass_of(config_of(tmp_path)))
    cut = config_of(tmp_path, **{"data.seq_length": 30, "optim.warmup_steps": 0})
    batches = pass_of(cut)
    assert len(batches) > 2 and learned(batches) == whole
    assert all(sum(batch.lengths) <= 30 for batch in batches)
    (line,) = TrainingData(cut, TOKENIZER, 384).describe()
    repeated = sum(sum(batch.lengths) for batch in batches) - sum(sum(b.lengths) for b in pass_of(config_of(tmp_path)))
    assert f"1 documents longer than data.seq_length cut, which repeats {repeated} tokens of their prefixes" in line
    with pytest.raises(ValueError, match=r"seq_length=9: expected branches of at most 9 tokens; one has 12"):
        TrainingData(config_of(tmp_path, **{"data.seq_length": 9}), TOKENIZER, 384)


def test_conversations_that_begin_alike_share_it_and_learn_as_before(tmp_path: Path) -> None:
    """The third conversation goes on after the second one, whose answer both learn. It is longer than 27 tokens."""
    turns = [
        ["a long question", "no"],
        ["a long question", "yes"],
        ["a long question", "yes", "why", "so"],
        ["b", "no"],
    ]
    template, path = tmp_path / "template", tmp_path / "chats.jsonl"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    roles = ("user", "assistant") * 2
    lines = [[{"role": role, "content": x} for role, x in zip(roles, each, strict=False)] for each in turns]
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in lines))
    weights, tokens = [], []
    for shared in (60, 27, None):
        corpus = prepare(Source(str(path)), tmp_path / "corpus", "byte-level", None, str(template), shared)
        tokens.append(corpus.tokens)
        if shared is not None:
            found: Counter[str] = Counter()
            for text, weight, _ in learned(pass_of(config_of(tmp_path))):
                found[text] += int(weight)
            weights.append(found)
    assert weights[0] == weights[1] and weights[0].total() == 4 + 5 + 9 + 4
    assert (weights[0]["[a long question]["], weights[0]["[a long question][ye"]) == (3, 2)
    assert tokens[0] < tokens[1] < tokens[2]
    with pytest.raises(ValueError, match=r"--share-prefixes=9: expected a number of tokens from 1 on, and conv"):
        prepare(Source("stdlib"), tmp_path / "apart", "byte-level", share_prefixes=9)


def test_packs_of_trees_are_padded_and_cover_all_ranks(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "abc", "responses": ["xy", "z"]})
    (batch,) = pass_of(config_of(tmp_path, **{"parallelism.tensor_parallel_size": 2}))
    assert sum(batch.lengths) % 2 == 0 and batch.parents is not None
    assert (batch.parents[-1], batch.lengths[-1], float(batch.loss_mask[0, -1])) == (-1, 1, 0)
    with pytest.raises(ValueError, match=r"data.packing=best_fit: expected packs of 16 tokens, enough"):
        check_packs(config_of(tmp_path, **{"parallelism.context_parallel_size": 8}))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"prompt": "a", "responses": []}, 'expected {"prompt": …, "responses": '),
        ({"prompt": "a", "responses": [{"txt": "b"}]}, 'expected {"prompt": …, "responses": '),
        ({"prompt": "", "responses": [{"text": "b", "reward": 1}]}, "expected a prompt and responses that are not"),
        ({"prompt": "a", "responses": [{"text": "b"}]}, "expected `advantage` or `reward` in every response"),
        ({"prompt": "a", "responses": [{"text": "b", "reward": 1}, "c"]}, "expected a `reward` of every response of"),
        ({"prompt": "a", "responses": [{"text": "b", "reward": "1"}]}, "expected a finite number in `reward`; got 1"),
        ({"prompt": "a", "responses": [{"tokens": [1.5], "reward": 1}]}, "expected token ids from 0 on; got [1.5]"),
        ({"prompt": "a", "responses": [{"tokens": [1], "reward": 1, "loss_mask": [1, 1]}]},
         "expected `loss_mask` of 1 tokens; it has 2"),
        ({"prompt": "a", "responses": [{"tokens": [1], "reward": 1, "old_logprobs": [-1]}]},
         "expected `old_logprobs` in no response, as in the first line"),
        ({"prompt": "a", "responses": [{"text": "b", "reward": 1, "advantage": 2}]}, "expected a `reward` or an"),
        ({"prompt": "a", "children": [{"text": "b", "reward": 1}]}, "expected `advantage`, not `reward`, in children"),
    ],
)  # fmt: skip
def test_lines_that_cannot_be_used_are_refused_with_their_number(line: Any, expected: str, tmp_path: Path) -> None:
    good = {"prompt": "a", "responses": [{"text": "b", "reward": 1}]}
    with pytest.raises(ValueError) as raised:
        write(tmp_path, good, line)
    assert str(raised.value).startswith(f"{tmp_path / 'corpus.jsonl'}:2: {expected}")
    assert not list(tmp_path.glob("corpus.*x"))


def test_the_format_and_the_dataset_agree(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "abc", "responses": ["xy", "z"]})
    plain = {"data.seq_length": 4, "optim.warmup_steps": 0}
    with pytest.raises(ValueError, match=r"data.format=documents: expected rollouts: .*corpus has trees"):
        check_corpus(tiny_config(tmp_path, "plain", plain).data)
    (tmp_path / "text.md").write_text("a text that is long enough")
    prepare(Source(str(tmp_path / "text.md")), tmp_path / "text", "byte-level")
    with pytest.raises(ValueError, match=r"expected a dataset of rollouts; .*text.tree.idx is missing"):
        check_corpus(config_of(tmp_path, **{"data.prefix": str(tmp_path / "text")}).data)
    with pytest.raises(ValueError, match=r"data.packing=none: expected best_fit with data.format=rollouts"):
        config_of(tmp_path, **{"data.packing": "none"})
