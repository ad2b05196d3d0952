"""The work of an attention layer: the bytes of its blocks, and its FLOPs."""

from dataclasses import dataclass
from functools import cached_property

from ..errors import refuse
from .kernel_calls import PLAINEST, KernelSupport
from .plan import ALL_HEADS, FIELDS, Heads, Kind


@dataclass(frozen=True)
class Workload:
    """One attention layer on a rank of the context-parallel group."""

    num_heads: int  # on one rank, so divided by the tensor-parallel size
    num_kv_heads: int
    head_dim: int  # of queries and keys
    batch: int = 1
    element_bytes: int = 2  # of q, k, v, out and their gradients
    v_head_dim: int | None = None  # of values and outputs; None: head_dim
    kv_row_bytes: int | None = None  # a token's key and value of one head as they travel; None: their elements'

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "batch", "element_bytes"):
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "1 or more", f"Correct {name}.")

    @property
    def accumulator_bytes(self) -> int:
        """The bytes of an element of an accumulator, and of a log-sum-exp."""
        return max(4, self.element_bytes)

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    def head_range(self, kind: Kind, heads: Heads) -> range:
        """Return the heads of a part. If there are more parts than heads, neighbouring parts share one."""
        found = self._head_ranges.get((kind, heads))
        if found is None:
            count = self.num_kv_heads if kind in (Kind.KV, Kind.DKV) else self.num_heads
            if heads.parts <= count:
                size, first = count // heads.parts, count // heads.parts * heads.part
            else:
                size, first = 1, count * heads.part // heads.parts
            found = self._head_ranges[kind, heads] = range(first, first + size)
        return found

    @cached_property
    def _head_ranges(self) -> dict[tuple[Kind, Heads], range]:
        return {}

    def field_bytes(self, kind: Kind, heads: Heads = ALL_HEADS) -> tuple[int, ...]:
        """Return the bytes of one token of a block on the wire or in a buffer, one number per field (`plan.FIELDS`)."""
        count = len(self.head_range(kind, heads)) * self.batch
        return tuple(count * self._row_bytes[field] for field in FIELDS[kind])

    @cached_property
    def _row_bytes(self) -> dict[str, int]:
        """The bytes of one head of a token, keyed by field."""
        plain = {field: channels * self.element_bytes for field, channels in self._channels.items()}
        kv = plain["dkv"] if self.kv_row_bytes is None else self.kv_row_bytes
        return {**plain, "kv": kv, "lse": self.accumulator_bytes}

    @cached_property
    def _channels(self) -> dict[str, int]:
        """The elements of one head of a token, keyed by field, without the log-sum-exp."""
        d, e = self.head_dim, self.value_dim
        return {"q": d, "out": e, "kv": d + e, "dkv": d + e}

    def elements(self, kind: Kind, heads: Heads = ALL_HEADS) -> int:
        """Return the elements of one token of a block, without the log-sum-exp."""
        count = len(self.head_range(kind, heads)) * self.batch
        return count * sum(self._channels.get(field, 0) for field in FIELDS[kind])

    def token_bytes(self, kind: Kind, heads: Heads = ALL_HEADS) -> int:
        """Return the bytes of one token of a block on the wire or in a buffer."""
        found = self._token_bytes.get((kind, heads))
        if found is None:
            found = self._token_bytes[kind, heads] = sum(self.field_bytes(kind, heads))
        return found

    @cached_property
    def _token_bytes(self) -> dict[tuple[Kind, Heads], int]:
        return {}


@dataclass(frozen=True)
class Target:
    """The workload, kernel and transport that a plan is recorded for."""

    workload: Workload
    takes: KernelSupport = PLAINEST
    over_peers: bool = False
    """Whether ranks read each other's memory. Otherwise messages are sent point to point."""
    joined: bool = False
    """Whether the keys of a call are always gathered unless contiguous, so that results do not depend, bit for bit, on
    the place of keys in a cache."""
