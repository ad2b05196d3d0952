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

from ..config import Config
from ..config.cluster import GIB
from ..core.comm import on_rank_0
from ..core.errors import refuse
from ..inference.engine import LongContextEngine
from ..inference.sampling import Sampling
from ..inference.session import Session, check_length
from ..mcore.tokenizer import bos_tokens, build_tokenizer, detokenize
from ..models.chat import Chat, ChatMessage, load_chat
from ..training.broadcast import broadcast_json
from .inference_job import InferenceJob, build_job, check_memory, open_engine, refuse_unread, split_arguments, start
from .text_stream import TextStream

_TOGETHER = "tokens of the prompt and inference.max_new_tokens"


def generate(words: Sequence[str], chat: bool = False) -> None:
    """Run the verb.

    Args:
        words: `checkpoint=RUN`, `prompt=TEXT` or `prompt_file=FILE`, `iteration=N`, and settings that override the
            run's.
        chat: read turns from standard input instead of a prompt.

    Raises:
        ValueError: words, the checkpoint, the chat template or sizes cannot be used, or the prompt does not fit.
        JobFailed: another rank ended.
    """
    own, settings = split_arguments(words, ("checkpoint", "prompt", "prompt_file", "iteration"))
    job = build_job(own, settings)
    refuse_unread(settings)
    prompt = _prompt(own, chat)
    tokenizer = build_tokenizer(job.config.data.tokenizer, job.config.data.tokenizer_path)
    length = 0 if prompt is None else len(bos_tokens(tokenizer)) + len(tokenizer.tokenize(prompt))
    if chat:
        load_chat(job.config.inference.chat_template, tokenizer)  # refuse a bad template before any rank starts
    inference = job.config.inference
    check_length(_TOGETHER, length + inference.max_new_tokens, inference.max_model_len)
    job = replace(job, config=_with_cache(job.config, length), options=prompt)
    check_memory(job)
    start(job, _converse)


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
        conversation = _Conversation(engine, tokenizer, chat, sampling)
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

    engine: LongContextEngine
    tokenizer: Any
    chat: Chat
    sampling: Sampling
    messages: list[ChatMessage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._session = self.engine.open()

    def answer(self, text: str) -> None:
        """Answer a turn; rank 0 prints the answer and a summary.

        Raises:
            ValueError: the turn or its answer does not fit; the conversation is as before.
        """
        messages, tokens, cached = list(self.messages), list(self._session.tokens), self._session.cached_tokens
        try:
            self._answer(text)
        except ValueError:
            self.messages = messages
            if self._session.tokens != tokens:
                self._session.close()
                self._session = self.engine.open()
                if cached:
                    self._session.append(tokens[:cached])
                self._session.tokens += tokens[cached:]  # generated last and not computed; they may not fit
            raise

    def _answer(self, text: str) -> None:
        begin = time.perf_counter()
        if self.chat.template is None:
            begin_of_text = [] if self.messages or self._session.tokens else bos_tokens(self.tokenizer)
            new = [*begin_of_text, *self.tokenizer.tokenize(self._end_of_answer() + text)]
            self._check_length(len(self._session.tokens) + len(new))
            self._session.append(new)
        else:
            self._extend([*self.messages, {"role": "user", "content": text.rstrip("\n")}])
        answer, times = self._generate()
        self.messages.append({"role": "assistant", "content": answer})
        if dist.get_rank() == 0:
            print(_summary(self.engine, self._session, begin, times), file=sys.stderr, flush=True)

    def _end_of_answer(self) -> str:
        """Return the end of the answer before this turn as in `Chat.text`: a newline in place of a stop token."""
        tokens = self._session.tokens
        if len(tokens) > self._session.cached_tokens and tokens[-1] in self.sampling.stop:
            del tokens[-1]  # generated last and not computed
        return "\n" if self.messages else ""

    def _extend(self, messages: list[ChatMessage]) -> None:
        """Compute the tokens of the conversation that are not cached; all of them if its bos_tokens has changed."""
        self.messages = messages
        # On rank 0, because a template may ask for the time.
        tokens = on_rank_0(lambda: list(self.tokenizer.tokenize(self.chat.text(messages))))
        self._check_length(len(tokens))
        cached = self._session.tokens[: self._session.cached_tokens]
        if len(tokens) > len(cached) and tokens[: len(cached)] == cached:
            del self._session.tokens[len(cached) :]  # generated last and not computed
        else:
            self._session.close()
            self._session = self.engine.open()
        self._session.append(tokens[self._session.cached_tokens :])

    def _check_length(self, tokens: int) -> None:
        check_length(_TOGETHER, tokens + self.sampling.max_new_tokens, self.engine.model.max_positions)

    def _generate(self) -> tuple[str, list[float]]:
        """Generate and print an answer; return its text and the time of each token."""
        prints = dist.get_rank() == 0
        stream = TextStream(lambda ids: detokenize(self.tokenizer, ids), self.chat.stop_texts)
        answer, times = "", []
        for token in self._session.stream(self.sampling):
            times.append(time.perf_counter())
            new = stream.feed(token)
            answer += new
            if prints:
                print(new, end="", flush=True)
            if stream.stopped:
                break
        rest = stream.finish()
        if prints:
            print(rest, flush=True)
        return answer + rest, times


def _turns(prompt: str | None) -> Iterator[tuple[str, bool]]:
    """Yield the turns on every rank, and whether they are typed at a terminal, by someone who can retry a refused one.

    These are the prompt, or in a chat the lines of rank 0's standard input, with U+FFFD for bytes that are not text.
    """
    if prompt is not None:
        yield prompt, False
        return
    if dist.get_rank() == 0 and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # such bytes do not end a conversation
    while True:
        line: Any = None
        if dist.get_rank() == 0:
            at_terminal = sys.stdin.isatty()
            if at_terminal:
                print("> ", end="", file=sys.stderr, flush=True)
            line = [sys.stdin.readline(), at_terminal]
        text, at_terminal = broadcast_json(line)
        if not text:
            return
        yield text, at_terminal


def _summary(engine: LongContextEngine, session: Session, begin: float, times: Sequence[float]) -> str:
    """Return the tokens and times of a turn, and the use of the cache."""
    manager = engine.cache_manager
    parts = [f"{len(session.tokens)} tokens, {session.reused_tokens} of them cached before this turn"]
    if times:
        parts.append(f"first token after {times[0] - begin:.3f} s")
    if len(times) > 1:
        parts.append(f"{(times[-1] - times[0]) / (len(times) - 1) * 1e3:.1f} ms per token")
    used, pages = manager.used_pages(), manager.pages_per_rank * manager.n
    gib = used * manager.page_tokens * engine.model.attention.shape.token_bytes / GIB
    parts.append(f"cache {used} of {pages} pages, {gib:.3f} GiB")
    return "; ".join(parts)
