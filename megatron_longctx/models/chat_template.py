"""A chat template (Jinja) in a separate process, where its time, memory and output are bounded.

Templates come with tokenizers from untrusted sources. Jinja's sandbox keeps them away from files and modules, but does
not stop loops of 10^10 steps, `2 ** 10 ** 10` or text that doubles: only a process can be ended at any time. It starts
once, in about 0.1 s, and imports only Jinja: this file is its script.
"""

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

_MAX_MEMORY = 2 * 2**30
_MAX_ADDED, _MAX_GROWTH = 2**20, 8  # characters of a text: a constant, and a factor for the messages' characters
_MAX_ERROR = 500  # characters of a template's error


class InvalidTemplate(ValueError):
    """A template that is not Jinja. The message names the line and the reason."""


class ChatTemplate:
    """A parsed template in its process. Raises InvalidTemplate: the source is not Jinja.

    A text may take `cpu_s` seconds of processor time. A limit of elapsed time would refuse texts on a busy machine.
    """

    def __init__(self, source: str, cpu_s: float) -> None:
        self.source = source
        self._first = {"source": source, "cpu_s": cpu_s}
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[str]] = []  # one, or none after it exceeded its bounds
        weakref.finalize(self, _end, self._running)
        answer = self._start()
        if "failed" in answer:
            raise InvalidTemplate(answer["failed"])

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the template's text with these variables, which must be serializable as JSON.

        Raises ValueError: the template refuses the variables, fails on them, or exceeds its bounds.
        """
        with self._lock:
            if not self._running:
                self._start()
            answer = self._request(variables)
        if "failed" in answer:
            raise ValueError(answer["failed"])
        return answer["text"]

    def _start(self) -> dict[str, str]:
        """Start the process, which ends with its standard input, and let it parse the template."""
        process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # so that a terminal's Ctrl-C does not end it
        )
        self._running.append(process)
        return self._request(self._first)

    def _request(self, request: Mapping[str, Any]) -> dict[str, str]:
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
        bounds = f"{self._first['cpu_s']:g} s of processor time or {_MAX_MEMORY // 2**20} MiB of memory"
        return {"failed": f"the chat template takes more than {bounds}"}


def _end(running: list[subprocess.Popen[str]]) -> None:
    while running:
        process = running.pop()
        process.kill()
        process.communicate()


class _Generation(Extension):
    """`{% generation %}`, which marks replies for training; its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that templates of Hugging Face's tokenizers expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON for a model, without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _parse(source: str) -> tuple[Template | None, dict[str, str]]:
    try:
        return _environment().from_string(source), {}
    except TemplateSyntaxError as error:
        return None, {"failed": f"line {error.lineno}: {error.message}"[:_MAX_ERROR]}
    except Exception as error:  # of Jinja, or of Python's compiler
        return None, {"failed": f"{type(error).__name__}: {error}"[:_MAX_ERROR]}


def _render(template: Template, variables: Mapping[str, Any], max_characters: int) -> dict[str, str]:
    try:
        text = template.render(variables)
    except TemplateError as error:
        return {"failed": f"refused by the chat template: {error.message}"[:_MAX_ERROR]}
    except Exception as error:  # a template computes: it may divide by zero
        return {"failed": f"the chat template fails on them ({type(error).__name__}: {error})"[:_MAX_ERROR]}
    if len(text) > max_characters:
        return {"failed": f"the chat template makes {len(text):,} characters of them, more than {max_characters:,}"}
    return {"text": text}


def _serve() -> None:
    """Run the process: requests from standard input, answers to standard output, one line of JSON each."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    first = json.loads(sys.stdin.readline())
    template: Template | None = None
    request, line = first, ""
    while True:
        signal.setitimer(signal.ITIMER_PROF, first["cpu_s"])  # its signal ends the process
        if template is None:
            template, answer = _parse(first["source"])
        else:
            answer = _render(template, request, _MAX_ADDED + _MAX_GROWTH * len(line))
        print(json.dumps(answer), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if not (line := sys.stdin.readline()) or template is None:
            return
        request = json.loads(line)


if __name__ == "__main__":
    _serve()
