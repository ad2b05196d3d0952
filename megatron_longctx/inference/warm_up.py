"""What an engine computes before its first request, so that no request waits for a compiler."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import pairwise, product

import torch
import torch.distributed as dist

from ..core.comm import gather_objects
from ..core.comm.device import mean_seconds
from ..core.kernels import Partial, merge_partials
from ..core.plans.recording import MAX_PARTIALS
from .cache_manager import CacheFull
from .cached_attention import CachedAttention
from .engine import LongContextEngine
from .paged import compile_decode
from .sampling import Sampling

logger = logging.getLogger(__name__)

_LENGTHS = (67, 130)
"""Two lengths, because code for any length is compiled at the second one that it sees."""


def warm_up(engine: LongContextEngine, sequences: int = 1) -> None:
    """Compile kernels, capture graphs and connect ranks with a few tokens in every mode, which are dropped again; and
    measure which prompts are replicated.

    sequences: the most that will be decoded together."""
    manager, decoder, chooser = engine.cache_manager, engine._decoder, engine._chooser
    compile_kernels(engine.model.attention, manager.page_tokens)
    pages = min(pool.available for group in manager.groups for pool in group.pools)
    most = int(min(engine._max_tokens, pages * manager.page_tokens * manager.n))
    plan_s = math.inf if decoder.has_graphs and engine.replicates(2) else None
    for mode in chooser.candidates if manager.n > 1 else ("pass_kv",):  # each mode connects other ranks
        with chooser.forcing(mode):
            for length in _LENGTHS:
                if length < most:
                    with engine._appended([[0] * length]) as (session,):
                        generation = engine.start(session, Sampling(max_new_tokens=2))
                        for _ in range(2):
                            engine.step([generation])
                    if plan_s is not None:
                        plan_s = min(plan_s, _seconds(engine, partial(_append, engine, [length])))
            if sum(_LENGTHS) <= engine._max_tokens:
                with suppress(CacheFull):  # two sequences may not fit
                    _append(engine, _LENGTHS, _LENGTHS[::-1])  # attention to several has kernels of its own
    if engine.replicates(2):
        _run_prompt_sizes(engine, most, None if plan_s == math.inf else plan_s)  # no plan of such a length fits
    if not engine.settings.exact_reuse:  # single tokens of a prompt are computed otherwise; each takes a page
        for size in decoder.batch_sizes(sequences):
            if size <= pages:
                _append(engine, [1] * size)
    draft = [0] * engine.settings.speculate
    for size in decoder.drafted_sizes(sequences):
        if size * (1 + len(draft) // manager.page_tokens) <= pages and 3 + len(draft) <= most:
            with engine._appended([[0]] * size) as sessions:
                for session in sessions:
                    session.tokens += [0]
                engine._verify(dict.fromkeys(sessions, draft))
    manager.drop_cached()


def _append(engine: LongContextEngine, *counts: Sequence[int]) -> None:
    """Compute batches of so many tokens of each of some sequences, one batch after the other."""
    with engine._appended([[0] * count for count in counts[0]]) as sessions:
        for more in counts[1:]:
            engine.append({session: [0] * count for session, count in zip(sessions, more, strict=True)})


def _run_prompt_sizes(engine: LongContextEngine, most: int, plan_s: float | None) -> None:
    """Run steps of every size for prompts of up to `most` tokens.

    Args:
        plan_s: the seconds that a short prompt takes by plans: the sizes end where a step takes longer, and the decoder
            takes prompts of up to the size before. This bound is safe, because plans never take less time for a longer
            prompt. None to measure nothing.
    """
    decoder, step_s = engine._decoder, 0.0
    for before, size in pairwise((1, *decoder.prompt_sizes)):
        if before >= most:
            break
        run = partial(_replicate, engine, min(size, most))
        run()
        if plan_s is not None:
            seconds = _seconds(engine, run)
            if before > 1 and seconds > plan_s:
                break
            decoder.max_prompt, step_s = size, seconds
    if plan_s is not None and step_s:
        words = "prompts of up to %d tokens are replicated: %.1f ms; by plans a short one takes %.1f ms"
        logger.info(words, decoder.max_prompt, 1e3 * step_s, 1e3 * plan_s)


def _replicate(engine: LongContextEngine, tokens: int) -> None:
    """Compute a prompt in one replicated step, whatever the limit and `inference.prefill_chunk` are."""
    with closing(engine.open()) as session:
        engine._decoder(engine._place({session: tokens}), [[0] * tokens])


def _seconds(engine: LongContextEngine, work: Callable[[], object]) -> float:
    """Return the seconds that work takes on the slowest of all ranks, the least of two times. Collective."""
    least = min(mean_seconds(work, engine.model.attention.device, 1) for _ in range(2))
    return max(gather_objects(dist.group.WORLD, least))


def compile_kernels(attention: CachedAttention, page_tokens: int) -> None:
    """Compile our own kernels for prompts and for decode over pages of `page_tokens`; CPUs have none."""
    shape, device = attention.shape, attention.device
    if device.type == "cuda":
        compile_merges(shape.num_heads, shape.head_dim, shape.dtype, device)
        q = torch.empty(0, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device)
        windows = {window is not None for window in shape.distinct_windows}
        compile_decode(q, attention._storage[0][:, :, 0], page_tokens, windows)
        if attention._merge is not None:
            attention._merge.compile(shape.num_heads // attention._parts, shape.head_dim, shape.dtype, device)


def compile_merges(num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the merges of prompts: every number of partial outputs, in every combination of precisions.

    Partials are kernels' results in `dtype`; the first may be an earlier merge, in fp32. The result is in `dtype`, or
    in fp32 if it will be merged again. The number of partials depends on how a prompt's tokens are distributed over the
    ranks. Without this, the first prompts of some lengths would each wait for Triton to compile another variant.
    """
    precisions = dict.fromkeys((dtype, torch.float32))
    for into, first, count in product(precisions, precisions, range(1, MAX_PARTIALS + 1)):
        values = [torch.zeros(2, 1, num_heads, head_dim, dtype=each, device=device) for each in (first, dtype, into)]
        lse = torch.zeros(2, 1, num_heads, dtype=torch.float32, device=device)
        parts = [Partial(0, 0, values[min(i, 1)], lse) for i in range(count)]
        merge_partials(parts, values[2], torch.empty_like(lse))
