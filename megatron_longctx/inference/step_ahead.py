"""Decode whose next step is launched before the host has the tokens of the step before.

Likeliest tokens go from step to step on the device, and the host plans, draws and delivers while GPUs compute. A token
that ends an answer has then been computed for nothing; what the cache holds is the same.
"""

from collections.abc import Mapping, Sequence

from .engine import Drawn, LongContextEngine
from .session import Generation, RunningToken, Session


def step_ahead(engine: LongContextEngine, generations: Sequence[Generation]) -> Drawn:
    """Run `LongContextEngine.step`; if all generations take the likeliest tokens, launch what follows the running step,
    then wait for the tokens of that step. A generation may then get no token in this call."""
    few = len(generations) <= engine._decoder.max_launched and not engine.settings.exact_reuse
    if not few or not all(each.is_plain and each.session.scores is None for each in generations):
        return engine.step(generations)
    found: Drawn = {}
    rows = {each: _running_row(engine, each.session) for each in generations}
    # The others wait for the token that they drew last, or for the first one after a prompt.
    if fresh := [each for each, row in rows.items() if row is None and not each.session.awaits_last]:
        engine._compute_pending([each.session for each in fresh])
        engine._draw(fresh, found)
    texts: dict[Session, int] = {}
    for each, row in rows.items():
        if row is None and each.finish_reason is None:
            texts[each.session] = each.session.tokens[-1]
        elif row is not None and not each.ends_with_next(engine._max_tokens):
            texts[each.session] = -1 - row
    launched = _launch(engine, texts)
    engine._draw([each for each, row in rows.items() if row is not None], found)
    for session, token in launched.items():
        session.next_token = token
        if session.cached_tokens > len(session.tokens):  # its token was not finite
            engine._cut(session, len(session.tokens))
        engine.cache_manager.name_pages(session.number, session.tokens, None)
    return found


def _running_row(engine: LongContextEngine, session: Session) -> int | None:
    """Return the row of the running step that computes a session's next token; None if no such step runs."""
    token = session.next_token
    if not isinstance(token, RunningToken) or token.ids is not engine._decoder.running:
        return None
    return token.row if session.cached_tokens == len(session.tokens) else None


def _launch(engine: LongContextEngine, texts: Mapping[Session, int]) -> dict[Session, RunningToken]:
    if not texts:
        return {}
    chunks = engine._place(dict.fromkeys(texts, 1))
    try:
        launched = engine._decoder.launch(chunks, list(texts.values()))
    except BaseException:
        engine.cache_manager.undo(chunks)
        raise
    engine.mode_counts["replicated"] += 1
    return dict(zip(texts, launched, strict=True))
