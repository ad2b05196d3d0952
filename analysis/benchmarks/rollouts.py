"""Sequences with shared beginnings, as trees, and those that are measured."""

from __future__ import annotations

import random
from typing import NamedTuple


class Rollouts(NamedTuple):
    """Sequences with shared beginnings, as the nodes of a tree.

    lengths: tokens of each node. parents: for each, the number of an earlier one, or -1.
    """

    name: str
    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    def path(self, node: int) -> list[int]:
        """Return a node and its ancestors, the root first."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    @property
    def leaves(self) -> list[int]:
        inner = {*self.parents}
        return [node for node in range(len(self.lengths)) if node not in inner]

    @property
    def apart(self) -> tuple[int, ...]:
        """The lengths of the rollouts, each with its own copy of all it begins with."""
        return tuple(sum(self.lengths[node] for node in self.path(leaf)) for leaf in self.leaves)

    def depth_first(self) -> Rollouts:
        """Return the same nodes, each followed by its largest child, as `models.trees.merged` orders them."""
        below = list(self.lengths)
        for node in reversed(range(len(below))):
            if self.parents[node] >= 0:
                below[self.parents[node]] += below[node]
        order: list[int] = []
        todo = [node for node, parent in enumerate(self.parents) if parent < 0][::-1]
        while todo:
            order.append(todo.pop())
            children = [node for node, parent in enumerate(self.parents) if parent == order[-1]]
            todo += sorted(children, key=below.__getitem__)
        places = {node: place for place, node in enumerate(order)} | {-1: -1}
        lengths = tuple(self.lengths[node] for node in order)
        return self._replace(lengths=lengths, parents=tuple(places[self.parents[node]] for node in order))

    def divided(self, by: int) -> Rollouts:
        return self._replace(lengths=tuple(max(2, length // by) for length in self.lengths))


def prompt(tokens: int, responses: int, each: int) -> Rollouts:
    """Return one prompt with responses of equal lengths."""
    name = f"{tokens // 1024}K + {responses} x {each}"
    return Rollouts(name, (tokens, *[each] * responses), (-1, *[0] * responses))


def agents(seed: int = 1798) -> Rollouts:
    """Return an agents' tree of 49 nodes of 200 to 1,500 tokens, which branch at any of the last 8, as created.

    This seed gives 23 leaves, and 3.95 times the tokens and 2.55 times the pairs apart.
    """
    draw = random.Random(seed)
    lengths = tuple(draw.randint(200, 1500) for _ in range(49))
    parents = (-1, *(draw.randrange(max(0, node - 8), node) for node in range(1, 49)))
    return Rollouts("agents, 49 nodes", lengths, parents)


def trees() -> list[Rollouts]:
    """Return the trees that are measured, in depth-first order."""
    return [prompt(16384, 16, 1024), prompt(32768, 32, 512), agents().depth_first()]
