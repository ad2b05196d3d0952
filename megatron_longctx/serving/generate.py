"""`megatron-longctx generate`: text from a run's checkpoint. Only the text goes to standard output."""

import io
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..config import Config
from ..config.cluster import GIB
from ..core.comm import on_rank_0
from ..core.errors import refuse
from ..inference.engine import LongContextEngine
from ..inference.sampling import Sampling, not_finite
from ..inference.scheduler import Request, Scheduler
from ..inference.session import check_length
from ..mcore.tokenizer import bos_tokens, build_tokenizer, decoder
from ..models.chat import Chat, ChatMessage, load_chat
from ..training import forks
from ..training.ranks import broadcast_json
from .inference_job import InferenceJob, build_job, check_memory, open_engine, refuse_unread, split_arguments, start
from .text_stream import TextStream

_TOGETHER = "tokens of the prompt and inference.max_new_tokens"


def generate(words: Sequence[str], chat: bool = False) -> None:
    """Run the verb: `checkpoint=RUN`, `prompt=TEXT` or `prompt_file=FILE`, `iteration=N`, and settings over the run's.

    With `chat`, read turns from standard input instead of a prompt. Refuse what cannot be used, and a prompt that does
    not fit. Raises JobFailed: another rank ended.
    """
    start(forks.checked(_job_of, words, chat), _converse)


def _job_of(words: Sequence[str], chat: bool) -> InferenceJob:
    own, settings = split_arguments(words, ("checkpoint", "prompt", "prompt_file", "iteration"))
    job = build_job(own, settings)
    refuse_unread(settings)
    if not chat and (file := dict(word.split("=", 1) for word in settings).get("inference.chat_template")):
        raise refuse("inference.chat_template", file, "--chat beside it: a prompt is continued as it is", "Add one.")
    prompt = _prompt(own, chat)
    tokenizer = build_tokenizer(job.config.data.tokenizer, job.config.data.tokenizer_path)
    length = 0 if prompt is None else len(bos_tokens(tokenizer)) + len(tokenizer.tokenize(prompt))
    if chat:
        load_chat(job.config.inference.chat_template, tokenizer)  # refuse a bad template before any rank starts
    inference = job.config.inference
    check_length(_TOGETHER, length + inference.max_new_tokens, inference.max_model_len)
    job = replace(job, config=_with_cache(job.config, length), options=prompt)
    check_memory(job)
    return job


def _prompt(own: dict[str, str], chat: bool) -> str | None:
    if chat:
        if "prompt" in own or "prompt_file" in own:
            raise refuse("--chat", "with a prompt", "turns on standard input", "Leave prompt and prompt_file out.")
        return None
    if ("prompt" in own) == ("prompt_file" in own):
        expected = "either prompt=TEXT or prompt_file=FILE"
        raise refuse("prompt", own.get("prompt", ""), expected, "Give one of them, or --chat.")
    try:
        prompt = own["prompt"] if "prompt" in own else Path(own["prompt_file"]).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise refuse("prompt_file", own["prompt_file"], f"UTF-8 text ({error.reason})", "Convert the file.") from None
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # Python's form of bytes that are not UTF-8
        raise refuse("prompt", ascii(prompt[:100]), "UTF-8 text", "Convert it, or put it into a file.")
    if not prompt:
        raise refuse("prompt", "", "some text", "Give the model something to go on from.")
    return prompt


def _with_cache(config: Config, prompt_tokens: int) -> Config:
    """Set the default size of the cache: for the trained length, or for the prompt if that is longer."""
    inference = config.inference
    if inference.cache_tokens is not None:
        return config
    tokens = max(config.data.seq_length, prompt_tokens) + inference.max_new_tokens
    return replace(config, inference=replace(inference, cache_tokens=tokens))


def _converse(job: InferenceJob, groups: Any) -> None:
    settings = job.config.inference
    drawing = settings.max_new_tokens, settings.temperature, settings.top_k, settings.top_p, settings.seed
    with open_engine(job, groups) as (engine, tokenizer):
        chat = load_chat(settings.chat_template, tokenizer) if job.options is None else Chat()
        sampling = Sampling(*drawing, stop=(tokenizer.eod, *chat.stop_tokens))
        # The engine cuts prompts into chunks; the scheduler need not, because there is no other request.
        scheduler = Scheduler(engine, max_active=1, prefill_chunk=sys.maxsize)
        conversation = _Conversation(scheduler, tokenizer, chat, sampling)
        for text, at_terminal in _turns(job.options):
            try:
                conversation.answer(text)
            except ValueError as error:  # on all ranks alike
                if not at_terminal:
                    raise
                if dist.get_rank() == 0:
                    print(f"megatron-longctx generate: {error} The conversation is as before.", file=sys.stderr)


@dataclass
class _Conversation:
    """One conversation, formatted by the chat's template; without a template, turns simply follow each other."""

    scheduler: Scheduler
    tokenizer: Any
    chat: Chat
    sampling: Sampling
    messages: list[ChatMessage] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of all turns and answers

    def answer(self, text: str) -> None:
        """Answer a turn; rank 0 prints the answer and a summary.

        Raises ValueError: the turn or its answer does not fit; the conversation is as before.
        """
        begin = time.perf_counter()
        messages = [*self.messages, {"role": "user", "content": text.rstrip("\n")}]
        if self.chat.template is None:
            # An answer ends as in `Chat.text`: with a newline in place of a stop token.
            new = self.tokenizer.tokenize("\n" * bool(self.messages) + text)
            prompt = [*(self.tokens or bos_tokens(self.tokenizer)), *new]
        else:
            # On rank 0, because a template may ask for the time.
            prompt = on_rank_0(lambda: list(self.tokenizer.tokenize(self.chat.text(messages))))
        self.scheduler.request_limits.check(prompt, self.sampling, _TOGETHER)
        answer, self.tokens, cached, times = self._generate(prompt)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        if dist.get_rank() == 0:
            summary = _summary(self.scheduler.engine, len(self.tokens), cached, begin, times)
            print(summary, file=sys.stderr, flush=True)

    def _generate(self, prompt: list[int]) -> tuple[str, list[int], int, list[float]]:
        """Generate and print an answer. Return it, all tokens, how many of the prompt were cached, and the time of each
        new one."""
        prints = dist.get_rank() == 0
        stream = TextStream(decoder(self.tokenizer), self.chat.stop_texts)
        answer, tokens, cached, times = "", list(prompt), 0, []
        self.scheduler.submit(Request(0, tuple(prompt), self.sampling))
        while self.scheduler.busy:
            for event in self.scheduler.advance():
                if event.finish_reason == "error":
                    raise not_finite()
                cached = max(cached, event.cached_tokens)
                if event.token is None or stream.stopped:  # a stop token, or drafted tokens after a stop text
                    continue
                times.append(time.perf_counter())
                tokens.append(event.token)
                new = stream.feed(event.token)
                answer += new
                if prints:
                    print(new, end="", flush=True)
                if stream.stopped:
                    self.scheduler.cancel(event.number)
        rest = stream.finish()
        if prints:
            print(rest, flush=True)
        return answer + rest, tokens, cached, times


def _turns(prompt: str | None) -> Iterator[tuple[str, bool]]:
    """Yield the turns on every rank, and whether they are typed at a terminal, by someone who can retry a refused one.

    These are the prompt, or in a chat the lines of rank 0's standard input, with U+FFFD for bytes that are not text.
    """
    if prompt is not None:
        yield prompt, False
        return
    if dist.get_rank() == 0 and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # such bytes do not end a conversation

    def read() -> tuple[str, bool]:
        if at_terminal := sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline(), at_terminal

    while (turn := broadcast_json(read() if dist.get_rank() == 0 else None))[0]:
        yield turn[0], turn[1]


def _summary(engine: LongContextEngine, tokens: int, cached: int, begin: float, times: Sequence[float]) -> str:
    """Return the tokens and times of a turn, and the use of the cache."""
    manager = engine.cache_manager
    parts = [f"{tokens} tokens, {cached} of them cached before this turn"]
    if times:
        parts.append(f"first token after {times[0] - begin:.3f} s")
    if len(times) > 1:
        parts.append(f"{(times[-1] - times[0]) / (len(times) - 1) * 1e3:.1f} ms per token")
    used, pages = manager.used_pages() + manager.groups[0].cached, manager.pages_per_rank * manager.n
    sizes = zip(engine.model.attention.shape.group_bytes, manager.groups, strict=False)
    gib = sum(size * (group.used + group.cached) for size, group in sizes) * manager.page_tokens / GIB
    parts.append(f"cache {used} of {pages} pages, {gib:.3f} GiB")
    return "; ".join(parts)
