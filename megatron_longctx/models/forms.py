"""How one parameter of Megatron's is made of published tensors, and these of it: to the bit, both ways.

A form is an object with `join` and `split`, each the other's inverse. Both also take tensors of the meta device, by
which shapes are known without values. Weights have their rows in the first dimension, and so have biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .family import Dims


class Form(Protocol):
    def join(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        """The parameter of `parts`, in the order of `Weight.theirs`."""
        ...

    def split(self, whole: Tensor, dims: Dims) -> Sequence[Tensor]:
        """The parts of the parameter."""
        ...


class Plain:
    """The same tensor."""

    def join(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        return parts[0]

    def split(self, whole: Tensor, dims: Dims) -> Sequence[Tensor]:
        return (whole,)


class Rows:
    """Parts one above the other, of equally many rows: gate and up of a gated MLP, in this order."""

    def __init__(self, count: int) -> None:
        self._count = count

    def join(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        return torch.cat(list(parts))

    def split(self, whole: Tensor, dims: Dims) -> Sequence[Tensor]:
        return whole.chunk(self._count)


class Qkv:
    """Queries, keys and values. Megatron's rows go by KV heads: the queries of each, its key, its value."""

    def join(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        return torch.cat([_by_kv_heads(part, dims) for part in parts], dim=1).flatten(0, 1)

    def split(self, whole: Tensor, dims: Dims) -> Sequence[Tensor]:
        sizes = [dims.sizes[rows] // dims.model.num_kv_heads for rows in ("query", "key_value", "key_value")]
        return [part.flatten(0, 1) for part in torch.split(_by_kv_heads(whole, dims), sizes, dim=1)]


class Vocabulary:
    """A row for every token; below them zeros, up to the rows that this project's model has."""

    def join(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        missing = dims.sizes["padded_vocab"] - dims.vocab
        return torch.cat([parts[0], parts[0].new_zeros(missing, *parts[0].shape[1:])]) if missing else parts[0]

    def split(self, whole: Tensor, dims: Dims) -> Sequence[Tensor]:
        return (whole[: dims.vocab],)


class PerExpert:
    """Of every expert the same parts, those of one after those of another. The parameter has all: `[E, ...]`.

    Args:
        form: of one expert.
        count: of its parts.
    """

    def __init__(self, form: Form, count: int) -> None:
        self._form, self._count = form, count

    def join(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        firsts = range(0, len(parts), self._count)
        return torch.stack([self._form.join(parts[first : first + self._count], dims) for first in firsts])

    def split(self, whole: Tensor, dims: Dims) -> Sequence[Tensor]:
        return [part for one in whole for part in self._form.split(one, dims)]


class Columns:
    """All experts in one tensor: of weights `[E, in, out]`, of biases `[E, out]`.

    Args:
        alternate: along `out`, a column of the gate and one of what it gates take turns.
    """

    def __init__(self, alternate: bool = False) -> None:
        self._alternate = alternate

    def join(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        found = parts[0]
        if self._alternate:
            found = torch.cat([found[..., ::2], found[..., 1::2]], dim=-1)
        return _transposed(found)

    def split(self, whole: Tensor, dims: Dims) -> Sequence[Tensor]:
        found = _transposed(whole)
        if self._alternate:
            found = torch.stack(found.chunk(2, dim=-1), dim=-1).flatten(-2)
        return (found,)


def _transposed(found: Tensor) -> Tensor:
    return found.transpose(1, 2).contiguous() if found.ndim == 3 else found


def _by_kv_heads(rows: Tensor, dims: Dims) -> Tensor:
    return rows.view(dims.model.num_kv_heads, -1, *rows.shape[1:])


PLAIN, QKV, GATE_UP, VOCAB = Plain(), Qkv(), Rows(2), Vocabulary()
EXPERTS, EXPERTS_GATE_UP = PerExpert(PLAIN, 1), PerExpert(GATE_UP, 2)
EXPERT_COLUMNS, EXPERT_PAIRS = Columns(), Columns(alternate=True)
