"""A chat template (Jinja) in a process of its own, where its time, memory and output are bounded.

Templates come with tokenizers from anywhere. Jinja's sandbox keeps them from files and modules, but not from loops of
10^10 steps, `2 ** 10 ** 10` or text that doubles: only a process can be ended in the middle of such. It starts once, in
some 0.1 s, and knows nothing but Jinja: this file is its script.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MOST_MEMORY = 2 * 2**30
_MOST_ADDED, _MOST_GROWTH = 2**20, 8  # characters of a text: so many, and so many for each of the messages'
_MOST_SAID = 500  # characters of what a template says when it refuses


class NotATemplate(ValueError):
    """The message says what is wrong, and in which line."""


class ChatTemplate:
    """A template that has been read, with its process.

    Args:
        source: of the template.
        cpu_s: most processor time of one text; not of the clock's, so that a busy machine refuses nothing.

    Raises:
        NotATemplate: it is not Jinja.
    """

    def __init__(self, source: str, cpu_s: float) -> None:
        self._first = {"source": source, "cpu_s": cpu_s}
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[str]] = []  # one, or none after it went beyond its bounds
        weakref.finalize(self, _end, self._running)
        answer = self._begin()
        if "failed" in answer:
            raise NotATemplate(answer["failed"])

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of the template with these variables, which JSON can hold.

        Raises:
            ValueError: the template refuses them, fails on them, or goes beyond its bounds.
        """
        with self._lock:
            if not self._running:
                self._begin()
            answer = self._ask(variables)
        if "failed" in answer:
            raise ValueError(answer["failed"])
        return answer["text"]

    def _begin(self) -> dict[str, str]:
        self._running.append(_start())
        return self._ask(self._first)

    def _ask(self, request: Mapping[str, Any]) -> dict[str, str]:
        process = self._running[0]
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer.endswith("\n"):
            return json.loads(answer)  # type: ignore[no-any-return]
        _end(self._running)
        bounds = f"{self._first['cpu_s']:g} s of processor time or {_MOST_MEMORY // 2**20} MiB of memory"
        return {"failed": f"the chat template takes more than {bounds}"}


def _start() -> subprocess.Popen[str]:
    """In a session of its own: a terminal's Ctrl-C is not for it. It ends with its standard input."""
    return subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def _end(running: list[subprocess.Popen[str]]) -> None:
    while running:
        process = running.pop()
        process.kill()
        process.communicate()


class _Generation(Extension):
    """`{% generation %}`: marks for training what the model has said; here it is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates of Hugging Face's tokenizers are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """As text for a model: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _read(source: str) -> tuple[Template | None, dict[str, str]]:
    try:
        return _environment().from_string(source), {}
    except TemplateSyntaxError as error:
        return None, {"failed": f"line {error.lineno}: {error.message}"[:_MOST_SAID]}
    except Exception as error:  # of Jinja, or of Python on what Jinja makes of it
        return None, {"failed": f"{type(error).__name__}: {error}"[:_MOST_SAID]}


def _rendered(template: Template, variables: Mapping[str, Any], most: int) -> dict[str, str]:
    try:
        text = template.render(variables)
    except TemplateError as error:
        return {"failed": f"refused by the chat template: {error.message}"[:_MOST_SAID]}
    except Exception as error:  # a template computes: it may divide by zero
        return {"failed": f"the chat template fails on them ({type(error).__name__}: {error})"[:_MOST_SAID]}
    if len(text) > most:
        return {"failed": f"the chat template makes {len(text):,} characters of them, more than {most:,}"}
    return {"text": text}


def _work() -> None:
    """The process: requests from standard input, answers to standard output, a line of JSON each."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    first = json.loads(sys.stdin.readline())
    template: Template | None = None
    request, line = first, ""
    while True:
        signal.setitimer(signal.ITIMER_PROF, first["cpu_s"])  # whose signal ends a process, whatever it is at
        if template is None:
            template, answer = _read(first["source"])
        else:
            answer = _rendered(template, request, _MOST_ADDED + _MOST_GROWTH * len(line))
        print(json.dumps(answer), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if not (line := sys.stdin.readline()) or template is None:
            return
        request = json.loads(line)


if __name__ == "__main__":
    _work()
