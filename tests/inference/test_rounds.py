"""What the ranks of a server exchange, and when."""

import pickle
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_longctx.config import Config
from megatron_longctx.inference.pace import Pace
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.scheduler import Event, Scheduler
from megatron_longctx.serving.http_api.inbox import Inbox
from megatron_longctx.serving.rounds import Rounds
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import engine_of, parallel
from tests.inference.http_server import until
from tests.shared.training import tiny_config

TOKENS = 6


def rounds_of_two_requests(rank: int, config: Config) -> list[str]:
    """Serve a request, and one that comes when it has two tokens. Return what happens in which order: < takes news, p
    and t note the time of a round with and without prompts, s launches a step, w begins to wait for its tokens, y waits
    for all kernels, and a digit is the number of events that are delivered."""
    done: list[str] = []

    def note(where: Any, name: str, mark: Callable[..., str]) -> None:
        real = getattr(where, name)

        def call(*args: Any, **words: Any) -> Any:
            done.append(mark(*args))
            return real(*args, **words)

        setattr(where, name, call)

    def delivered(events: Sequence[Event]) -> str:
        ended.extend(event for event in events if event.finish_reason)
        if len(ended) == 2:
            inbox.ask_to_stop()
        if "".join(done).count("1") == 1:
            theirs.send(pickle.dumps([(1, range(60, 120), Sampling(TOKENS), 0, 0)]))
            until(lambda: not inbox._arrived.empty())
        return str(len(events))

    ended: list[Event] = []
    ours, theirs = socket.socketpair()
    inbox = Inbox(ours, Inbox.new_shared())
    waits = mock.patch("megatron_longctx.inference.engine.synchronize", side_effect=lambda _: done.append("y"))
    with engine_of(config) as engine, ours, theirs, waits:
        pace = mock.Mock(wraps=Pace(2048), room=2048, owes_decode=False)  # no time changes what it does
        scheduler = Scheduler(engine, pace=pace)
        rounds = Rounds(scheduler, inbox if rank == 0 else None)
        note(engine.model.attention, "begin_replicated", lambda *_: "s")
        pace.observe.side_effect = lambda seconds, work: done.append("?" if seconds <= 0 else "p" if work else "t")
        note(rounds, "_overlap", lambda: "w")
        note(inbox, "take", lambda: "<")
        note(inbox, "deliver", delivered)
        theirs.send(pickle.dumps([(0, range(60), Sampling(TOKENS), 0, 0)]))
        inbox.open(scheduler.request_limits)
        rounds.run()
        return done


def test_news_and_events_pass_while_single_tokens_are_computed(tmp_path: Path) -> None:
    config = parallel(tiny_config(tmp_path, "rounds"), 2, decode="replicated", page_tokens=1)
    first, other = ("".join(found) for found in run_distributed(rounds_of_two_requests, 2, config))
    # Prompts end with all kernels; the step that runs ahead is not waited for.
    # The prompt's round draws the first token and launches the step for the next. Its news are exchanged meanwhile, and
    # its time is sent; the times of rounds without prompts come one round later: that of the round before the second
    # prompt's together with the prompt's, in this order. The last token needs no step after it, and its event stops the
    # server.
    assert first == "<sysw<1psw<1sw<1" + "tsysw<2tpsw<2" + "sw<2" + 2 * "tsw<1" + "t1<", first
    assert other == first.translate({ord(c): None for c in "<012"})
