"""The server's clients and their features: `openai`, `lm_eval`, and answers that equal those of `transformers`."""

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.scheduler import Request, Scheduler
from megatron_longctx.mcore import groups, inference
from megatron_longctx.mcore.inference import build_engine, inference_config
from megatron_longctx.serving.grammar import Grammars
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.compose import RESOLVED, load_config
from tests.inference.http_server import until
from tests.inference.openai_server import PROMPT, completed, openai_server, reference
from tests.inference.test_serve import Client
from tests.shared.jobs import PATIENCE_S
from tests.shared.published import TEXTS
from tests.shared.training import changed

pytest.importorskip("openai")
SCHEMA = {"type": "object", "properties": {"fox": {"type": "boolean"}}, "required": ["fox"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "fox", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with openai_server(tmp_path_factory.mktemp("clients")) as running:
        yield running


def test_penalties_and_biases_give_the_tokens_of_transformers(served: Any) -> None:
    from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor
    from transformers import SequenceBiasLogitsProcessor as Bias

    def of_counts(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids[0, len(PROMPT) :], minlength=scores.shape[1])
        return scores - 0.9 * counts - 0.7 * (counts > 0)

    plain = reference(served, PROMPT, 24)
    stop = plain[2]
    for ours, theirs in (
        ({}, ()),
        ({"extra": {"repetition_penalty": 1.4}}, (RepetitionPenaltyLogitsProcessor(1.4),)),
        ({"frequency_penalty": 0.9, "presence_penalty": 0.7}, (of_counts,)),
        ({"logit_bias": {str(plain[0]): -100, "77": 3}}, (Bias([[[plain[0]], -100.0], [[77], 3.0]]),)),
        (
            {"extra": {"min_tokens": 20, "stop_token_ids": [stop]}},
            (MinNewTokensLengthLogitsProcessor(len(PROMPT), 20, [stop], device="cpu"),),
        ),
    ):
        expected = reference(served, PROMPT, 24, *theirs)
        if "min_tokens" in ours.get("extra", {}):
            assert stop not in expected[:20] and stop in plain[:20]
            expected = expected[: expected.index(stop)] if stop in expected else expected
        found = completed(served, max_tokens=24, **ours)
        assert found.text == served.tokenizer.decode(expected), ours
        assert ours == {} or expected != plain


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ({"guided_json": SCHEMA}, r'\{"fox": (true|false)\}'),
        ({"guided_regex": "[ab]{2}-[0-9]{3}"}, "[ab]{2}-[0-9]{3}"),
        ({"guided_choice": ["a fox", 'no "dog"']}, 'a fox|no "dog"'),
        ({"guided_choice": ["\U0001f98a"]}, "\U0001f98a"),
    ],
    ids=["json", "regex", "choice", "a character of four bytes"],
)
def test_grammars_give_the_tokens_of_transformers(served: Any, grammar: dict[str, Any], pattern: str) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo.from_huggingface(served.tokenizer, vocab_size=290, stop_token_ids=[1])
    compiler = xgrammar.GrammarCompiler(info)
    ((kind, value),) = grammar.items()
    compiled = {
        "guided_json": lambda: compiler.compile_json_schema(json.dumps(value), any_whitespace=False),
        "guided_regex": lambda: compiler.compile_regex(value),
        "guided_choice": lambda: compiler.compile_regex("|".join(map(re.escape, value))),
    }[kind]()
    found = completed(served, max_tokens=60, extra=grammar)
    assert re.fullmatch(pattern, found.text.strip()) and found.finish_reason == "stop"
    tokens = reference(served, PROMPT, len(found.logprobs.tokens) - 1, xgrammar.contrib.hf.LogitsProcessor(compiled))
    assert served.tokenizer.decode(tokens) == found.text
    drawn = completed(served, max_tokens=60, temperature=1.5, seed=3, extra=grammar)
    assert re.fullmatch(pattern, drawn.text.strip())


def test_a_schema_of_a_chat_and_bad_grammars(served: Any) -> None:
    from openai import BadRequestError

    pytest.importorskip("xgrammar")
    ask = {"model": "fox", "messages": [{"role": "user", "content": "fox?"}], "temperature": 0, "max_tokens": 60}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    answer = served.openai.chat.completions.create(**ask, response_format=form).choices[0]
    assert set(json.loads(answer.message.content)) == {"fox"} and answer.finish_reason == "stop"
    loop, left_out = {"$ref": "#"}, "expected a grammar that xgrammar compiles .*is not supported"
    for bad, message in (
        ({"guided_regex": "(a"}, "expected a grammar that xgrammar compiles"),
        ({"guided_json": {"type": "fox"}}, "expected a grammar that xgrammar compiles"),
        ({"guided_json": {"properties": {"a": {"items": {"type": "integer", "multipleOf": 7}}}}}, left_out),
        ({"guided_json": json.dumps({"type": "object", "required": ["a"]})}, left_out),
        ({"guided_json": loop}, "no token may follow the answer"),
        ({"guided_json": {"properties": {"not": loop}, "required": ["not"]} | {"type": "object"}}, ""),
        ({"guided_regex": r"ab[^\s\S]"}, "no token may follow the answer"),
    ):
        with pytest.raises(BadRequestError, match=message) if message else nullcontext():
            completed(served, extra=bad, max_tokens=20)


def expected_scores(served: Any, tokens: Sequence[int]) -> torch.Tensor:
    """`[len(tokens) - 1, vocabulary]`, the log-probabilities of `transformers`."""
    with torch.inference_mode():
        return served.model(torch.tensor([list(tokens)])).logits[0, :-1].log_softmax(-1)  # type: ignore[no-any-return]


def test_log_probabilities_equal_those_of_transformers(served: Any) -> None:
    long = torch.randint(2, 290, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    for prompt in (PROMPT, long):
        found = completed(served, prompt=prompt, max_tokens=5, echo=True, logprobs=3, extra={"prompt_logprobs": 2})
        names = [served.tokenizer.decode([token]) for token in range(290)]
        whole = prompt + reference(served, prompt, 5)
        expected = expected_scores(served, whole)
        logprobs = found.logprobs
        assert len(logprobs.tokens) == len(whole) and logprobs.token_logprobs[0] is None
        own = expected.gather(1, torch.tensor(whole[1:])[:, None])[:, 0]
        assert torch.allclose(torch.tensor(logprobs.token_logprobs[1:]), own, atol=2e-5)
        for row, token, text, top in zip(
            expected, whole[1:], logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True
        ):
            assert text in (names[token], f"token_id:{token}") and top[text] is not None
            assert torch.allclose(torch.tensor(sorted(top.values())[-3:]), row.topk(3).values.flip(0), atol=2e-5)
        for row, token, entry in zip(expected, prompt[1:], found.prompt_logprobs[1:], strict=False):
            place = entry[str(token)]
            assert abs(place["logprob"] - float(row[token])) < 2e-5
            assert place["rank"] == 1 + int((row > row[token]).sum())
    scored = completed(served, prompt=long, max_tokens=0, echo=True, logprobs=1)
    assert len(scored.logprobs.tokens) == 700 and scored.finish_reason == "length"
    again = completed(served, prompt=long[:-1], max_tokens=0, extra={"prompt_logprobs": 0})
    assert again.text == "" and len(again.prompt_logprobs) == 699
    single = completed(served, prompt=PROMPT[:1], max_tokens=0, echo=True, logprobs=1).logprobs
    assert single.token_logprobs == [None] and single.text_offset == [0]


def test_offsets_of_tokens_are_places_in_the_text(served: Any) -> None:
    """A character may take several tokens."""
    ask = {"model": "fox", "prompt": "the f\u00f6x \U0001f98a", "echo": True, "logprobs": 0, "max_tokens": 30}
    ask |= {"temperature": 1, "seed": 4, "extra_body": {"ignore_eos": True}}
    whole = served.openai.completions.create(**ask).choices[0].logprobs
    streamed = [each.choices[0].logprobs for each in served.openai.completions.create(**ask, stream=True)]
    assert [at for each in streamed if each for at in each.text_offset] == whole.text_offset
    end = whole.text_offset.index(len(ask["prompt"]))
    assert sum("token_id" in token for token in whole.tokens[:end]) == 6
    for token, at in zip(whole.tokens[:end], whole.text_offset, strict=False):
        assert "token_id" in token or ask["prompt"].startswith(token, at)


def test_chats_and_streams_have_log_probabilities(served: Any) -> None:
    ask = {"model": "fox", "messages": [{"role": "user", "content": "fox"}], "temperature": 0, "max_tokens": 6}
    ask |= {"logprobs": True, "top_logprobs": 2, "extra_body": {"ignore_eos": True}}
    whole = served.openai.chat.completions.create(**ask).choices[0].logprobs.content
    assert len(whole) == 6 and all(len(entry.top_logprobs) == 2 for entry in whole)
    assert all(entry.logprob == max(t.logprob for t in entry.top_logprobs) for entry in whole)
    chunks = [c for c in served.openai.chat.completions.create(**ask, stream=True) if c.choices[0].logprobs]
    streamed = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]


def test_several_answers_and_prompts(served: Any) -> None:
    create = served.openai.completions.create
    prompt = torch.randint(2, 290, (300,), generator=torch.Generator().manual_seed(2)).tolist()
    ask = {"model": "fox", "prompt": prompt, "max_tokens": 6, "seed": 5, "extra_body": {"ignore_eos": True}}
    several = create(**ask, n=3)
    texts = [choice.text for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert several.usage.prompt_tokens == 300 and several.usage.completion_tokens == 18
    assert create(**ask).choices[0].text == texts[0], "the first answer is the same alone"
    streamed = ["", "", ""]
    for chunk in create(**ask, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    most = create(**ask, n=3, best_of=3, logprobs=0).choices
    mean = [sum(choice.logprobs.token_logprobs) / 6 for choice in most]
    best = create(**ask, n=1, best_of=3).choices
    assert len(best) == 1 and best[0].text == most[mean.index(max(mean))].text
    prompts = create(**ask | {"prompt": [prompt[:9], prompt[:20]]}, n=2).choices
    assert [choice.text for choice in prompts[2:]] == [
        c.text for c in create(**ask | {"prompt": prompt[:20]}, n=2).choices
    ]


def metrics(served: Any) -> dict[str, float]:
    status, text = served.client.raw("GET", "/metrics", None, {})
    assert status == 200
    lines = [line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#")]
    return {name.removeprefix("megatron_longctx_"): float(value) for name, value in lines}


def test_tools_are_offered_called_and_answered(served: Any) -> None:
    """The grammar makes a random model write a call."""
    from openai import BadRequestError

    pytest.importorskip("xgrammar")
    talk: list[Any] = [{"role": "user", "content": "fox?"}]
    call = '<tool_call>{"name": "look", "arguments": {"at": [0-9]}}</tool_call>'
    ask = {"model": "fox", "tools": [TOOL], "temperature": 0, "max_tokens": 200}
    regex = {"guided_regex": call.replace("{", r"\{").replace("}", r"\}")}
    create = served.openai.chat.completions.create
    first = create(messages=talk, **ask, extra_body=regex)
    (called,) = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls" and first.choices[0].message.content is None
    assert called.function.name == "look" and set(json.loads(called.function.arguments)) == {"at"}
    (streamed,) = [c.choices[0] for c in create(messages=talk, **ask, extra_body=regex, stream=True)
                   if c.choices[0].delta.tool_calls]  # fmt: skip
    assert streamed.delta.tool_calls[0].function.arguments == called.function.arguments
    assert streamed.delta.role == "assistant"
    without = create(messages=talk, **ask | {"tools": []}).usage.prompt_tokens
    assert first.usage.prompt_tokens > without + 20, "the template got the tools"
    talk += [first.choices[0].message.to_dict(), {"role": "tool", "tool_call_id": called.id, "content": "brown"}]
    plain = [talk[0], {"role": "assistant", "content": ""}, talk[2]]
    called.function.arguments = '{"at": ' + 9999 * "["
    with pytest.raises(BadRequestError, match="a JSON object as text"):
        create(messages=[*talk, {"role": "assistant", "tool_calls": [called.to_dict()]}], **ask)
    more, less = (create(messages=each, **ask | {"max_tokens": 1}).usage.prompt_tokens for each in (talk, plain))
    assert more > less + 10, "the template got the call"


def test_operators_see_requests(served: Any) -> None:
    client: Client = served.client
    assert client.job is not None
    assert client.ask("/version")[1] == {"version": "0.1.0"} and client.ask("/health")[1] == {"status": "ok"}
    assert client.ask("/v1/models")[1]["data"][0]["id"] == "fox"
    requests = served.openai.completions.with_raw_response
    answer = requests.create(model="fox", prompt="fox", max_tokens=3, extra_headers={"X-Request-Id": "my-1"})
    assert answer.headers["x-request-id"] == "my-1"
    status, _ = client.ask("/v1/completions", {"prompt": "a", "best": 1})
    assert status == 400
    until(lambda: "request my-1" in client.job.output())  # it is counted and logged after the client has its answer
    until(lambda: any("refused" in name for name in metrics(served)))
    until(lambda: metrics(served)['cache_pages{state="used"}'] == 0)
    after = metrics(served)
    assert after["first_token_seconds_count"] > 0 and after['tokens_total{kind="generated"}'] > 0
    assert after['refused_requests_total{status="400"}'] > 0
    assert sum(value for name, value in after.items() if name.startswith("passes_total")) > 0
    assert after['cache_pages{state="free"}'] > 0
    assert re.search(r"request my-1, 200, [\d.]+ s, prompt \d, cached 0, new [0-3], first", client.job.output())


def test_scores_of_lm_eval_equal_those_of_its_own_model(served: Any) -> None:
    """Multiple choice, perplexity and generation, in batches. Both read the same weights."""
    lm_eval = pytest.importorskip("lm_eval")
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    words = [*TEXTS[0].split(), *TEXTS[1].split(), "to", "be", "or", "not"]
    documents = [
        {"text": " ".join(words[i : i + 6]), "choices": words[i + 6 : i + 9], "answer": i % 3} for i in range(9)
    ]

    def task(name: str, kind: str, **fields: Any) -> Any:
        data = {
            "custom_dataset": lambda **_: {"test": Dataset.from_list(documents)},
            "test_split": "test",
            "doc_to_text": "{{text}}",
        }
        return ConfigurableTask(config={"task": name, "output_type": kind, **data, **fields})

    tasks = [
        task("choice", "multiple_choice", doc_to_choice="choices", doc_to_target="answer"),
        task("rolling", "loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}"),
        task(
            "writing", "generate_until", doc_to_target="{{text}}", generation_kwargs={"until": ["e"], "max_gen_toks": 8}
        ),
    ]
    path = str(served.folder / "published")
    models = [
        HFLM(pretrained=served.model, tokenizer=served.tokenizer, batch_size=1),
        LocalCompletionsAPI(
            base_url=f"http://127.0.0.1:{served.client.port}/v1/completions", model="fox", tokenizer=path,
            tokenizer_backend="huggingface", batch_size=4, max_length=900,
        ),
    ]  # fmt: skip
    none = TaskManager(include_defaults=False)  # the default one reads the files of thousands of tasks
    theirs, ours = (
        lm_eval.simple_evaluate(
            model, tasks=tasks, task_manager=none, bootstrap_iters=0, log_samples=True, verbosity="ERROR"
        )
        for model in models
    )
    for name in ("choice", "rolling", "writing"):
        for key, value in theirs["results"][name].items():
            found = ours["results"][name][key]
            if isinstance(value, float) and not math.isnan(value):  # rounding of fp32, below what the table prints
                assert math.isclose(found, value, rel_tol=1e-5), (name, key)
    texts = [[sample["resps"] for sample in each["samples"]["writing"]] for each in (theirs, ours)]
    assert texts[0] == texts[1] and len({str(text) for text in texts[0]}) > 3


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_load_client_reports_on_streams(served: Any, tmp_path: Path, endpoint: str) -> None:
    """NVIDIA's `aiperf`, if it is on the path: it needs an environment of its own."""
    if (aiperf := shutil.which("aiperf")) is None:
        pytest.skip("aiperf is not installed: pip install aiperf, in an environment of its own")
    words = [
        f"--url=http://127.0.0.1:{served.client.port}",
        f"--endpoint-type={endpoint}",
        "--streaming",
        "--model=fox",
    ]
    words += [f"--tokenizer={served.folder / 'published'}", "--use-server-token-count", "--ui=none"]
    words += ["--concurrency=4", "--request-count=12", "--isl=100", "--isl-stddev=30", "--osl=8"]
    words += ["--extra-inputs=ignore_eos:true", "--extra-inputs=temperature:0", f"--artifact-dir={tmp_path}"]
    done = subprocess.run([aiperf, "profile", *words], capture_output=True, text=True, timeout=PATIENCE_S)
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 12 and not report["error_summary"], done.stdout + done.stderr
    assert report["usage_completion_tokens"]["min"] == report["usage_completion_tokens"]["max"] == 8
    assert 0 < report["time_to_first_token"]["p50"] <= report["request_latency"]["p99"]
    assert report["inter_token_latency"]["count"] == 12


LONG = torch.randint(2, 290, (300,), generator=torch.Generator().manual_seed(4)).tolist()


def sampled(
    rank: int, run: str, sizes: dict[str, int], samplings: list[Sampling]
) -> tuple[list[list[int]], list[float], int]:
    """As this rank of a group: the tokens after PROMPT, the log-probabilities of LONG, and the most rows of logits.

    Every answer is computed with and without a cached prefix, and with drafts."""
    config = load_config(Path(run, RESOLVED))
    settings = {f"parallelism.{axis}_parallel_size": size for axis, size in sizes.items()}
    small = {"inference.cache_tokens": 600, "inference.page_tokens": 4, "inference.speculate": 5}
    config = inference_config(changed(config, settings | small))
    engine, tokenizer = build_engine(config, groups.from_config(config.parallelism), Path(run, "checkpoints"))
    engine.grammars = Grammars(tokenizer)
    scheduler = Scheduler(engine, prefill_chunk=100)
    answers: dict[int, list[int]] = {}
    cached = []
    for number, sampling in enumerate(2 * samplings):
        scheduler.submit(Request(number, tuple(PROMPT), sampling))
        while scheduler.busy:
            for event in scheduler.advance():
                answers.setdefault(number, []).extend([] if event.token is None else [event.token])
        cached.append(event.cached_tokens)
    assert cached == [0] + [(len(PROMPT) - 1) // 4 * 4] * (2 * len(samplings) - 1)
    found = list(answers.values())
    events, rows, head = [], [0], inference.CachedGPT._head

    def counted(model: inference.CachedGPT, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return head(model, hidden)

    with mock.patch.object(inference, "_HEAD_ROWS", 16), mock.patch.object(inference.CachedGPT, "_head", counted):
        scheduler.submit(Request(99, tuple(LONG), Sampling(max_new_tokens=0, prompt_logprobs=0)))
        while scheduler.busy:
            events += scheduler.advance()
        scheduler.close()
    engine.release()
    groups.destroy()
    return found, [score.logprob for score in events[-1].prompt_scores or ()], max(rows)


@pytest.mark.parametrize("sizes", [{}, {"context": 3}, {"tensor": 2, "context": 2}], ids=str)
def test_any_number_of_ranks_draws_the_same_tokens(served: Any, sizes: dict[str, int]) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    xgrammar = pytest.importorskip("xgrammar")
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(served.tokenizer, vocab_size=290))
    text = xgrammar.contrib.hf.LogitsProcessor(compiler.compile_regex("[ab]{20}"))
    samplings = [
        Sampling(max_new_tokens=16, repetition_penalty=1.4),
        Sampling(max_new_tokens=10, grammar=json.dumps({"regex": "[ab]{20}"}), stop=(1,)),
        Sampling(max_new_tokens=24),
    ]
    expected = [
        reference(served, PROMPT, 16, RepetitionPenaltyLogitsProcessor(1.4)),
        reference(served, PROMPT, 10, text),
        reference(served, PROMPT, 24),
    ]
    ranks = run_distributed(sampled, math.prod(sizes.values()), str(served.folder / "run"), sizes, samplings)
    own = expected_scores(served, LONG).gather(1, torch.tensor(LONG[1:])[:, None])[:, 0]
    for found, logprobs, rows in ranks:
        assert found == 2 * expected and torch.allclose(torch.tensor(logprobs), own, atol=2e-5) and rows == 16
