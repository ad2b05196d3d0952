"""`megatron-longctx generate`: text from a run's checkpoint. Only the text goes to standard output."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..comm import from_rank_0, on_rank_0
from ..config import Config
from ..errors import refuse
from ..inference.engine import LongContextEngine, Session
from ..inference.sampling import Sampling
from ..mcore.tokenizer import bos_tokens, build_tokenizer, text_of
from ..models.chat import Chat, Message, chat_of
from .inference_job import InferenceJob, job_of, refuse_unread, run, split_words
from .text_stream import TextStream


def generate(words: Sequence[str], chat: bool = False) -> None:
    """Run the verb.

    Args:
        words: `checkpoint=RUN`, `prompt=TEXT` or `prompt_file=FILE`, `iteration=N`, and settings over the run's.
        chat: read turns from standard input instead of a prompt.

    Raises:
        ValueError: words, a checkpoint, a chat template or sizes that cannot be used; a prompt that does not fit.
        JobFailed: another rank ended.
    """
    own, settings = split_words(words, ("checkpoint", "prompt", "prompt_file", "iteration"))
    job = job_of(own, settings)
    refuse_unread(settings)
    prompt = _prompt(own, chat)
    tokenizer = build_tokenizer(job.config.data.tokenizer, job.config.data.tokenizer_path)
    length = 0 if prompt is None else len(bos_tokens(tokenizer)) + len(tokenizer.tokenize(prompt))
    if chat:
        chat_of(job.config.inference.chat_template, tokenizer)  # refused before any rank starts
    run(replace(job, config=_with_cache(job.config, length), options=prompt), _converse)


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
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # what the system makes of other bytes
        raise refuse("prompt", ascii(prompt[:100]), "UTF-8 text", "Convert it, or put it into a file.")
    if not prompt:
        raise refuse("prompt", "", "some text", "Give the model something to go on from.")
    return prompt


def _with_cache(config: Config, prompt_tokens: int) -> Config:
    """By default a cache of the trained length, or of the prompt where that is longer."""
    inference = config.inference
    if inference.cache_tokens is not None:
        return config
    tokens = max(config.data.seq_length, prompt_tokens) + inference.max_new_tokens
    return replace(config, inference=replace(inference, cache_tokens=tokens))


def _converse(job: InferenceJob, engine: LongContextEngine, tokenizer: Any) -> None:
    chat = chat_of(job.config.inference.chat_template, tokenizer) if job.options is None else Chat()
    talk = _Talk(engine, tokenizer, chat, _sampling(job.config, (tokenizer.eod, *chat.stop_tokens)))
    for text, at_terminal in _turns(job.options):
        try:
            talk.take(text)
        except ValueError as error:  # of all ranks alike
            if not at_terminal:
                raise
            if dist.get_rank() == 0:
                print(f"megatron-longctx generate: {error} The conversation is as before.", file=sys.stderr, flush=True)


@dataclass
class _Talk:
    """One conversation: turns as the chat's template lays them out, or one after the other without one."""

    engine: LongContextEngine
    tokenizer: Any
    chat: Chat
    sampling: Sampling
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._session = self.engine.open()

    def take(self, text: str) -> None:
        """Go on from `text`; rank 0 writes what comes, and what it took.

        Raises:
            ValueError: a turn or an answer that does not fit; the conversation is as it was before.
        """
        messages, tokens, cached = list(self.messages), list(self._session.tokens), self._session.cached_tokens
        try:
            self._take(text)
        except ValueError:
            self.messages = messages
            if self._session.tokens != tokens:
                self._session.close()
                self._session = self.engine.open()
                if cached:
                    self._session.append(tokens[:cached])
                self._session.tokens += tokens[cached:]  # given out last, and not computed: there may be no room for it
            raise

    def _take(self, text: str) -> None:
        begin = time.perf_counter()
        if self.chat.template is None:
            begin_of_text = [] if self.messages or self._session.tokens else bos_tokens(self.tokenizer)
            self._session.append([*begin_of_text, *self.tokenizer.tokenize(self._ended_answer() + text)])
        else:
            self._extend([*self.messages, {"role": "user", "content": text.rstrip("\n")}])
        said, times = self._answer()
        self.messages.append({"role": "assistant", "content": said})
        if dist.get_rank() == 0:
            print(_summary(self.engine, self._session, begin, times), file=sys.stderr, flush=True)

    def _ended_answer(self) -> str:
        """What ends the answer before this turn, as `Chat.text` lays it out: a line's end in place of a stop token."""
        tokens = self._session.tokens
        if len(tokens) > self._session.cached_tokens and tokens[-1] in self.sampling.stop:
            del tokens[-1]  # given out last, and not computed
        return "\n" if self.messages else ""

    def _extend(self, messages: list[Message]) -> None:
        """Compute of the conversation what is not cached; all of it where it no longer begins with that."""
        self.messages = messages
        # On rank 0: a template may ask for the time.
        tokens = on_rank_0(lambda: list(self.tokenizer.tokenize(self.chat.text(messages))))
        cached = self._session.tokens[: self._session.cached_tokens]
        if len(tokens) > len(cached) and tokens[: len(cached)] == cached:
            del self._session.tokens[len(cached) :]  # given out last, and not computed
        else:
            self._session.close()
            self._session = self.engine.open()
        self._session.append(tokens[self._session.cached_tokens :])

    def _answer(self) -> tuple[str, list[float]]:
        """The text, and when each of its tokens came."""
        writes = dist.get_rank() == 0
        stream = TextStream(lambda ids: text_of(self.tokenizer, ids), self.chat.stop_texts)
        said, times = "", []
        for token in self._session.stream(self.sampling):
            times.append(time.perf_counter())
            new = stream.feed(token)
            said += new
            if writes:
                print(new, end="", flush=True)
            if stream.stopped:
                break
        rest = stream.finish()
        if writes:
            print(rest, flush=True)
        return said + rest, times


def _sampling(config: Config, stop: tuple[int, ...]) -> Sampling:
    settings = config.inference
    return Sampling(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=settings.seed,
        stop=stop,
    )


def _turns(prompt: str | None) -> Iterator[tuple[str, bool]]:
    """The prompt; in a chat, lines of rank 0's standard input, told to every rank, with U+FFFD for what is none. Also
    whether they are typed at a terminal, by somebody who can go on when one is refused."""
    if prompt is not None:
        yield prompt, False
        return
    if dist.get_rank() == 0 and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # not the end of a conversation
    while True:
        line: Any = None
        if dist.get_rank() == 0:
            at_terminal = sys.stdin.isatty()
            if at_terminal:
                print("> ", end="", file=sys.stderr, flush=True)
            line = [sys.stdin.readline(), at_terminal]
        text, at_terminal = from_rank_0(line)
        if not text:
            return
        yield text, at_terminal


def _summary(engine: LongContextEngine, session: Session, begin: float, times: Sequence[float]) -> str:
    """What a turn took, and what the cache holds."""
    manager = engine.cache_manager
    said = [f"{len(session.tokens)} tokens, {session.reused_tokens} of them cached before this turn"]
    if times:
        said.append(f"first token after {times[0] - begin:.3f} s")
    if len(times) > 1:
        said.append(f"{(times[-1] - times[0]) / (len(times) - 1) * 1e3:.1f} ms per token")
    pages = manager.pages_per_rank * manager.n
    said.append(f"cache {manager.used_pages()} of {pages} pages, {engine.cache_gib:.3f} GiB")
    return "; ".join(said)
