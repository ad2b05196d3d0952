"""The choice of a cache mode for every batch: the one with the smaller messages."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ..config import check_value
from ..core.plans import Kind, Workload
from ..core.plans.cache_modes import CACHE_MODES
from .batch import Batch

logger = logging.getLogger(__name__)


class Chooser:
    """Chooses a mode for every batch, and logs why for prompts on several ranks.

    Args:
        workload: the heads of one rank.
        mode: the mode for every batch, or `auto` for that with the smaller messages.

    Raises:
        ValueError: the mode is unknown.
    """

    def __init__(self, workload: Workload, mode: str = "auto") -> None:
        check_value("inference.mode", mode)
        self._threshold, self.mode = kv_per_q(workload), mode

    @property
    def candidates(self) -> tuple[str, ...]:
        """The modes that batches may be computed in."""
        return tuple(CACHE_MODES) if self.mode == "auto" else (self.mode,)

    @contextmanager
    def forcing(self, mode: str) -> Iterator[None]:
        """Use this mode for every batch inside the context."""
        before, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = before

    def choose(self, batch: Batch) -> str:
        """Return the mode for `batch`."""
        single, miss = all(chunk.new == 1 for chunk in batch.chunks), batch.new / (batch.new + batch.cached)
        if self.mode != "auto" or batch.n == 1:
            mode, why = ("pass_kv" if self.mode == "auto" else self.mode), f"inference.mode={self.mode}"
        else:
            # With single tokens as queries, only the hops can be saved.
            mode = "pass_kv" if miss >= self._threshold else "one_hop" if single else "pass_q"
            size = f"keys and values {self._threshold:.3g} times the size of a query"
            why = f"bytes: {miss:.3g} of all tokens are new, {size}"
        if batch.n > 1 and not single:
            what = "attention over the cache: %d new and %d cached tokens of %d sequences on %d ranks: %s by %s"
            logger.info(what, batch.new, batch.cached, len(batch.chunks), batch.n, mode, why)
        return mode


def kv_per_q(workload: Workload) -> float:
    """Return the size of a token's keys and values relative to its query."""
    return workload.token_bytes(Kind.KV) / workload.token_bytes(Kind.Q)
