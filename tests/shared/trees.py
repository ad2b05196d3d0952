"""The tokens before a node of a tree of shared prefixes, by definition."""

from collections.abc import Sequence


def path(parents: Sequence[int], node: int) -> list[int]:
    """Return a node and its ancestors, the root first; nothing for -1."""
    return [] if node < 0 else [*path(parents, parents[node]), node]


def tokens_before(tokens: Sequence[int], lengths: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """Return the tokens of a node's ancestors, the root's first."""
    starts = [sum(lengths[:each]) for each in range(len(lengths))]
    return [x for each in path(parents, parents[node]) for x in tokens[starts[each] : starts[each] + lengths[each]]]
