"""What an engine computes before its first request, so that no request waits for a compiler."""

from __future__ import annotations

from itertools import pairwise

from .engine import LongContextEngine
from .sampling import Sampling

_LENGTHS = (67, 130)
"""Two lengths, because code for any length is compiled at the second one that it sees."""


def warm_up(engine: LongContextEngine, sequences: int = 1) -> None:
    """Compile kernels, capture graphs and connect ranks with a few tokens in every mode, which are dropped again.
    sequences: the most that will be decoded together."""
    manager, decoder, chooser = engine.cache_manager, engine._decoder, engine._chooser
    engine.model.attention.compile_kernels(manager.page_tokens)
    pages = min(map(manager.free_pages, range(manager.n)))
    most = int(min(engine._max_tokens, pages * manager.page_tokens * manager.n))
    for mode in chooser.candidates if manager.n > 1 else ("pass_kv",):  # each mode connects other ranks
        with chooser.forcing(mode):
            for length in _LENGTHS:
                if length < most:
                    with engine._appended([[0] * length]) as (session,):
                        generation = engine.start(session, Sampling(max_new_tokens=2))
                        for _ in range(2):
                            engine.step([generation])
    batches: list[list[list[int]]] = []
    if engine.replicates(2):  # every size of step for prompts
        sizes = pairwise((1, *decoder.prompt_sizes))
        batches += [[[0] * min(size, most)] for before, size in sizes if before < most]
    if not engine.settings.exact_reuse:  # single tokens of a prompt are computed otherwise; each takes a page
        batches += [[[0]] * size for size in decoder.batch_sizes(sequences) if size <= pages]
    for prompts in batches:
        with engine._appended(prompts):
            pass
    draft = [0] * engine.settings.speculate
    for size in decoder.drafted_sizes(sequences):
        if size * (1 + len(draft) // manager.page_tokens) <= pages and 3 + len(draft) <= most:
            with engine._appended([[0]] * size) as sessions:
                for session in sessions:
                    session.tokens += [0]
                engine._verify(dict.fromkeys(sessions, draft))
    manager.drop_cached()
