"""`megatron-longctx generate` as a user starts it: only text on standard output, the same at any parallel sizes."""

import os
import pty
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_longctx.cli import cli
from megatron_longctx.config import Config
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.scheduler import RequestLimits
from megatron_longctx.mcore.losses import losses_config
from megatron_longctx.mcore.tokenizer import build_tokenizer
from megatron_longctx.models.chat import Chat
from megatron_longctx.serving import generate as verb
from megatron_longctx.serving import inference_job
from megatron_longctx.training import forks
from tests.shared.jobs import CLI, clean_environment, finished

SUMMARY = r"(\d+) tokens, (\d+) of them cached before this turn; first token after [\d.]+ s; [\d.]+ ms per token; cache"

TRAINED = "inference.max_model_len=null"  # the length in training, 96


def run_of(config: Config) -> str:
    return f"checkpoint={Path(config.run.root, config.run.name)}"


def generate(folder: Path, words: Sequence[str], typed: str | bytes = b"", stdin: str | None = None) -> tuple[str, str]:
    """Run the verb, which has to succeed; return standard output and error. stdin: a terminal, instead of `typed`."""
    here = Path(tempfile.mkdtemp(dir=folder))
    (here / "in").write_bytes(typed if isinstance(typed, bytes) else typed.encode())
    environment = clean_environment(CUDA_VISIBLE_DEVICES="")
    job = finished(here, [*CLI, "generate", *words], environment, stdin=stdin or str(here / "in"), quick=True)
    assert job.process.returncode == 0, job.output()
    return job.out.read_text(), job.err.read_text()


def test_only_the_text_is_on_standard_output_and_the_same_at_any_sizes(trained: Config, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("abc de fg, ü")
    common = [run_of(trained), f"prompt_file={tmp_path}/prompt.txt", "inference.max_new_tokens=12"]
    alone, stderr = generate(tmp_path, common)
    assert (
        re.search(SUMMARY + r" \d+ of \d+ pages, 0\.000 GiB", stderr) and stderr.count("cached before this turn") == 1
    )
    assert alone.endswith("\n") and len(alone.encode()) >= 6 and "cache" not in alone
    sharded, stderr = generate(tmp_path, [*common, "parallelism.context_parallel_size=2", "inference.mode=pass_q"])
    assert sharded == alone
    assert "13 new and 0 cached tokens of 1 sequences on 2 ranks: pass_q by inference.mode=pass_q" in stderr


def test_other_ranks_are_forks_of_the_command(trained: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, start_method: str, **__: object) -> None:
        raise AssertionError(f"ranks were started by {start_method}")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(inference_job, "RankProcesses", started)
    for obstacle, how in ((None, "fork"), ("CUDA is initialized in the launcher", "spawn")):
        monkeypatch.setattr(forks, "obstacle", lambda obstacle=obstacle: obstacle)
        with pytest.raises(AssertionError, match=f"ranks were started by {how}"):
            cli.main(["generate", run_of(trained), "prompt=x", "parallelism=cp2"])


SHORT = ("inference.max_new_tokens=3", "inference.page_tokens=1")  # pages that short turns fill


def test_a_chat_computes_only_what_is_new(trained: Config, tmp_path: Path) -> None:
    words = [run_of(trained), "parallelism=cp2", *SHORT, "inference.temperature=0.5", "--chat"]
    out, stderr = generate(tmp_path, words, "abc\nde\n")
    # Three tokens per answer: the last is computed with the next turn, and with the end of its line.
    assert [(int(a), int(b)) for a, b in re.findall(SUMMARY, stderr)] == [(7, 0), (14, 6)]
    assert out.count("\n") >= 2


def test_a_chat_with_a_template_computes_only_what_is_not_cached(trained: Config, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    words = [run_of(trained), *SHORT, f"inference.chat_template={template}", "--chat"]
    template.write_text("{% for m in messages %}{{ m.content }}.{% endfor %}")
    _, stderr = generate(tmp_path, ["parallelism=cp2", *words], "abcdefgh\nabc\n")
    assert [(int(a), int(b)) for a, b in re.findall(SUMMARY, stderr)] == [(9 + 3, 0), (9 + 3 + 1 + 4 + 3, 9 + 2)]
    # This template later puts a bracket where the answer begins, so all from there on is computed again.
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    out, stderr = generate(tmp_path, ["parallelism=single", *words], "abcdefgh\nabc\n")
    assert [(int(a), int(b)) for a, b in re.findall(SUMMARY, stderr)] == [(10 + 3, 0), (10 + 5 + 5 + 3, 10)]
    first, second = out.splitlines()
    prompt = f"prompt=[abcdefgh][{first}][abc]"
    again, _ = generate(tmp_path, [run_of(trained), "parallelism=single", prompt, *SHORT])
    assert again == second + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prompt=a"], "checkpoint=: expected RUN or checkpoint=RUN"),
        (["checkpoint=nowhere", "prompt=a"], "expected a run's configuration there"),
        ([f"checkpoint={__file__}", "prompt=a"], "expected a run's configuration there"),
        ([], "expected either prompt=TEXT or prompt_file=FILE"),
        (["prompt=a", "prompt_file=b"], "expected either prompt=TEXT or prompt_file=FILE"),
        (["prompt="], "expected some text"),
        (["prompt=a", "--chat"], "expected turns on standard input"),
        (["prompt=a", "inference.top_p=3"], "inference.top_p=3.0: expected more than 0 and at most 1"),
        (["prompt=a", "inference.mode=ring"], "inference.mode=ring: expected one of auto, one_hop, pass_kv, pass_q"),
        (["prompt=a", "inference.page_tokens=x"], "inference.page_tokens=x: expected an integer"),
        (["prompt=a", "inference.pages=3"], "Nearest: inference.page_tokens"),
        (["prompt=a", "model.num_layers=3"], "num_layers: checkpoint 2, model 3"),
        (["prompt=a", "experiment=demo"], "expected settings of a run that exists"),
        (["inference.chat_template=nowhere", "--chat"], "nowhere: expected a file with a Jinja template"),
        (["prompt=a", "iteration=last"], "iteration=last: expected a number"),
        (["prompt=a", "iteration=" + "9" * 5000], "characters): expected a number"),
        (["prompt=a", "checkpoint="], "checkpoint=: expected RUN or checkpoint=RUN"),
        (["prompt=a", "inference.cache_tokens=10000000000"], "inference.cache_tokens=10000000000: expected at most "),
        (["prompt=a", "inference.max_new_tokens=1000000000"], "expected at most 100000 tokens"),
        (["prompt=abc", TRAINED], "and inference.max_new_tokens=131: expected at most 96 tokens"),
        (["prompt=a", "parallelism.cluster=tcp"], "parallelism.cluster=tcp: expected one of parallelism.context_"),
        (["prompt=a", "parallelism.tensor_parallel_size=3"], "=3: expected one of 1, 2, 4 with 4 query heads and 2"),
        (["prompt=a", "parallelism.schedule=ring"], "parallelism.schedule=ring: expected one of parallelism.context_"),
        (["prompt=a", "parallelism.pipeline_parallel_size=2"], "expected 1 for inference"),
        (["prompt=a", "attention.transport=p2p"], "expected inference.transport, which inference"),
        (
            ["prompt=a", "reduction.output_projection=int8", "reduction.transport=peer"],
            "expected auto or collective on",
        ),
        (["prompt=a", "optim.lr=1"], "optim.lr=1: expected no value here: only training reads it"),
        (["prompt=a", "inference.chat_template=here"], "inference.chat_template=here: expected --chat beside it"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    trained: Config, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    where = [] if any(word.startswith("checkpoint") for word in words) or words == ["prompt=a"] else [run_of(trained)]
    assert cli.main(["generate", *where, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if line.startswith("megatron-longctx generate: ")]
    assert message in line


def test_a_prompt_that_is_not_text_is_refused(
    trained: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt").write_bytes(b"caf\xe9")
    assert cli.main(["generate", run_of(trained), f"prompt_file={tmp_path}/prompt"]) == 2
    assert f"prompt_file={tmp_path}/prompt: expected UTF-8 text" in capsys.readouterr().err
    assert cli.main(["generate", run_of(trained), "prompt=caf\udce9"]) == 2  # what Python makes of that byte
    assert "prompt='caf\\udce9': expected UTF-8 text" in capsys.readouterr().err


def test_a_turn_that_is_not_text_does_not_end_a_chat(trained: Config, tmp_path: Path) -> None:
    words = [run_of(trained), "parallelism=cp2", "inference.max_new_tokens=3", "--chat"]
    _, stderr = generate(tmp_path, words, b"abc\n\xff\nde\n")
    assert [int(count) for count, _ in re.findall(SUMMARY, stderr)] == [4 + 3, 7 + 1 + 4 + 3, 15 + 1 + 3 + 3]


@pytest.mark.parametrize("template", [False, True])
def test_a_turn_that_does_not_fit_does_not_end_a_conversation_at_a_terminal(
    trained: Config, tmp_path: Path, template: bool
) -> None:
    words = [run_of(trained), "parallelism=cp2", "inference.max_new_tokens=3", "inference.cache_tokens=64"]
    words += ["inference.page_tokens=16", "--chat"]
    if template:
        (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}.{% endfor %}")
        words.insert(0, f"inference.chat_template={tmp_path}/chat.jinja")
    here, terminal = pty.openpty()  # the cache has room for 96 tokens: 3 pages per rank
    # A turn that does not fit, one that does though its answer does not, and one that both do.
    os.write(here, b"abc\n" + b"x" * 100 + b"\n" + b"y" * 87 + b"\nde\n\x04")
    _, stderr = generate(tmp_path, words, stdin=os.ttyname(terminal))
    os.close(here)
    os.close(terminal)
    assert stderr.count("The conversation is as before.") == 2
    first = 4 + 3  # "abc" with the end of a line, or with a dot; and the answer
    assert [int(count) for count, _ in re.findall(SUMMARY, stderr)] == [first, first + 1 + 3 + 3]


def test_sizes_need_not_be_those_of_training(trained: Config) -> None:
    run = {"checkpoint": run_of(trained).removeprefix("checkpoint=")}
    settings = ["data.seq_length=97", "parallelism.tensor_parallel_size=4"]  # odd, and more ranks than KV heads
    assert inference_job.build_job(run, settings).world_size == 8
    assert inference_job.build_job(run, settings, adapted=losses_config).world_size == 8


def test_a_turn_beyond_the_models_length_is_refused_before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "on_rank_0", lambda work: work())
    limits = RequestLimits(10**6, 10, 512)
    scheduler: Any = SimpleNamespace(request_limits=limits, submit=lambda request: pytest.fail("computed"))
    with_template: Any = SimpleNamespace(template="{{ messages }}", text=lambda messages: "abcdefg", stop_texts=())
    for chat in (Chat(), with_template):
        conversation = verb._Conversation(scheduler, build_tokenizer("byte-level"), chat, Sampling(max_new_tokens=4))
        with pytest.raises(ValueError, match=r"inference.max_new_tokens=11: expected at most 10 tokens"):
            conversation.answer("abcdefg")
        assert not conversation.messages
