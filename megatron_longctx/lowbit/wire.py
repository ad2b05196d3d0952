"""How values that are summed travel."""

from __future__ import annotations

from dataclasses import dataclass

from .quantize import QuantFormat

_RAW_GROUP = 128


@dataclass(frozen=True)
class Wire:
    """How values travel: quantized (form), or as they are (None) in x's dtype."""

    form: QuantFormat | None
    itemsize: int

    @property
    def group_size(self) -> int:
        return self.form.group_size if self.form else _RAW_GROUP

    @property
    def group_bytes(self) -> int:
        """Of a group, in a message of many."""
        return self.message_bytes(16 * self.group_size) // 16

    def groups(self, chunk: int) -> int:
        return -(-chunk // self.group_size)

    def value_bytes(self, chunk: int) -> int:
        return self.form.value_bytes(chunk) if self.form else self.groups(chunk) * _RAW_GROUP * self.itemsize

    def message_bytes(self, chunk: int) -> int:
        return self.form.message_bytes(chunk) if self.form else self.value_bytes(chunk)


@dataclass(frozen=True)
class Piece:
    """What one call reduces: `chunk` elements of every rank's part of x, the parts `stride` elements apart."""

    chunk: int
    stride: int
    scatter: bool = False
