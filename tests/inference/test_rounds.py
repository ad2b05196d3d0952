"""What the ranks of a server exchange, and when."""

import pickle
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_longctx.config import Config
from megatron_longctx.inference.pace import Pace
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.scheduler import Event, Scheduler
from megatron_longctx.serving.http_api.inbox import Inbox
from megatron_longctx.serving.rounds import Rounds
from megatron_longctx.testing.distributed import run_distributed
from tests.inference.conversations import engine_of, parallel
from tests.shared.training import tiny_config

TOKENS = 6


def rounds_of_one_request(rank: int, config: Config) -> list[str]:
    """Serve one request and return what happens in which order: < takes news, t notes the time of a round, s launches
    a step, w begins to wait for its tokens, and a digit is the number of events that are delivered."""
    done: list[str] = []

    def note(where: Any, name: str, mark: Callable[..., str]) -> None:
        real = getattr(where, name)

        def call(*args: Any, **words: Any) -> Any:
            done.append(mark(*args))
            return real(*args, **words)

        setattr(where, name, call)

    def delivered(events: Sequence[Event]) -> str:
        if any(event.finish_reason for event in events):
            inbox.ask_to_stop()
        return str(len(events))

    ours, theirs = socket.socketpair()
    inbox = Inbox(ours, Inbox.new_shared())
    with engine_of(config) as engine, ours, theirs:
        scheduler = Scheduler(engine, pace=Pace.timed(config.model, 2, 0.5))
        rounds = Rounds(scheduler, inbox if rank == 0 else None)
        note(engine.model.attention, "begin_replicated", lambda *_: "s")
        note(scheduler, "observe", lambda seconds: "t" if seconds > 0 else "?")
        note(rounds, "_overlap", lambda: "w")
        note(inbox, "take", lambda: "<")
        note(inbox, "deliver", delivered)
        theirs.send(pickle.dumps([(0, range(60), Sampling(TOKENS), 0, 0)]))
        inbox.open(scheduler.request_limits)
        rounds.run()
        return done


def test_news_and_events_pass_while_single_tokens_are_computed(tmp_path: Path) -> None:
    config = parallel(tiny_config(tmp_path, "rounds"), 2, decode="replicated", page_tokens=1)
    first, other = ("".join(found) for found in run_distributed(rounds_of_one_request, 2, config))
    # The prompt's round draws the first token, and its news are exchanged at its end; those of later rounds while
    # their tokens are computed. The times of these rounds come one round later. The last event stops the server.
    assert first == "<sw1" + "<tsw<1" + "sw<1" + (TOKENS - 3) * "tsw<1" + "t0<", first
    assert other == first.translate({ord(c): None for c in "<01"})
