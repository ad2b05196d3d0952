"""What an engine computes before its first request, so that no request waits for a compiler."""

from itertools import pairwise, product

import torch

from ..core.kernels import Partial, merge_partials
from ..core.plans.recording import MAX_PARTIALS
from .cached_attention import CachedAttention
from .engine import LongContextEngine
from .paged import compile_decode
from .sampling import Sampling

_LENGTHS = (67, 130)
"""Two lengths, because code for any length is compiled at the second one that it sees."""


def warm_up(engine: LongContextEngine, sequences: int = 1) -> None:
    """Compile kernels, capture graphs and connect ranks with a few tokens in every mode, which are dropped again.
    sequences: the most that will be decoded together."""
    manager, decoder, chooser = engine.cache_manager, engine._decoder, engine._chooser
    compile_kernels(engine.model.attention, manager.page_tokens)
    pages = min(pool.available for group in manager.groups for pool in group.pools)
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
