"""Sequences with equal beginnings as trees of tokens, in which every beginning is stored once.

Where sequences part, the last token that they share has a different label in each. So a node ends one token earlier,
and all of its children begin with a copy of that token. The label of a node's last token is therefore the first token
of each child, and counts in the first child only.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy
from numpy.typing import NDArray


class Example(NamedTuple):
    """One sequence of s tokens.

    tokens: int64 `[s]`.
    weights: fp32 `[s]`, of each token's own loss; the first has none.
    values: fp32 `[s, c]`, what the loss of each token needs besides; 0 where the weight is. Sequences share a token
        only if they agree on them.
    """

    tokens: NDArray[numpy.int64]
    weights: NDArray[numpy.float32]
    values: NDArray[numpy.float32]


class Tree(NamedTuple):
    """Nodes one after the other, S tokens in all.

    tokens, weights, values: as in `Example`, of the S tokens; weights are sums over the sequences.
    lengths: the tokens of each node. parents: for each node, the number of an earlier one, or -1.
    leaves: each example's number, and the node in which its tokens end. They are the first tokens of the nodes from the
        root to it. A tree that was divided has none.
    """

    tokens: NDArray[numpy.int64]
    weights: NDArray[numpy.float32]
    values: NDArray[numpy.float32]
    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    leaves: tuple[tuple[int, int], ...] = ()


class Part(NamedTuple):
    """Some nodes of a tree, with all of their ancestors.

    nodes: their numbers. parents: for each, the place of its parent in `nodes`, or -1. repeated: for each, whether an
    earlier part has it, too.
    """

    nodes: tuple[int, ...]
    parents: tuple[int, ...]
    repeated: tuple[bool, ...]


class _Range(NamedTuple):
    """Sorted examples `first..last-1`, which share their tokens up to `start`, the first one of their node.

    own: the weight of that token, if it is a copy.
    """

    first: int
    last: int
    start: int
    parent: int
    own: float | None


def merged(examples: Sequence[Example]) -> list[Tree]:
    """Return trees of all examples, one for each first token. Each node is followed by its largest child."""
    order = sorted((_key(each), number) for number, each in enumerate(examples))
    keys = [key for key, _ in order]
    weights = [examples[number].weights.copy() for _, number in order]
    kept, ends = [], list[list[int]]([[]])
    for place, key in enumerate(keys):
        ends[-1].append(order[place][1])
        if place + 1 < len(keys) and keys[place + 1].startswith(key):  # it is a part of the next one
            weights[place + 1][: len(weights[place])] += weights[place]
        else:
            kept.append(place)
            ends.append([])
    some = [examples[order[place][1]]._replace(weights=weights[place]) for place in kept]
    width = 8 + examples[0].values.itemsize * examples[0].values.shape[1] if examples else 8
    return [
        tree._replace(leaves=tuple((number, node) for at, node in tree.leaves for number in ends[at]))
        for tree in _trees(some, [keys[place] for place in kept], width)
    ]


def _key(each: Example) -> bytes:
    """Return what sequences have to agree on to share their tokens, in as many bytes for every token."""
    columns = (numpy.ascontiguousarray(x).view(numpy.uint8) for x in (each.tokens.astype(numpy.int64), each.values))
    return numpy.concatenate([x.reshape(len(each.tokens), -1) for x in columns], axis=1).tobytes()


def _num_shared(a: bytes, b: bytes, width: int) -> int:
    """Return the number of equal first tokens."""
    least = min(len(a), len(b))
    differ = numpy.frombuffer(a, numpy.uint8, least) != numpy.frombuffer(b, numpy.uint8, least)
    return (int(differ.argmax()) if differ.any() else least) // width


def _trees(examples: Sequence[Example], keys: Sequence[bytes], width: int) -> Iterator[Tree]:
    """Yield the trees of sorted examples, none of which is the beginning of another."""

    def groups(first: int, last: int, at: int) -> list[tuple[int, int]]:
        """Divide examples by their token `at`."""
        of = slice(at * width, (at + 1) * width)
        cuts = [first, *(place for place in range(first + 1, last) if keys[place][of] != keys[place - 1][of]), last]
        return list(pairwise(cuts))

    for root in groups(0, len(keys), 0) if keys else ():
        todo, nodes, parents = [_Range(*root, 0, -1, None)], list[Example](), list[int]()
        leaves = []
        while todo:
            first, last, start, parent, own = todo.pop()
            head, alone = examples[first], last - first == 1
            shared = len(head.tokens) if alone else _num_shared(keys[first], keys[last - 1], width)
            stop = shared if alone else shared - 1
            if stop > start:  # not of a root whose examples share one token alone
                weights = numpy.sum([each.weights[start:stop] for each in examples[first:last]], axis=0)
                if own is not None:
                    weights[0] = own
                nodes.append(Example(head.tokens[start:stop], weights, head.values[start:stop]))
                parents.append(parent)
                parent = len(nodes) - 1
            if alone:
                leaves.append((first, parent))
            else:
                children = groups(first, last, shared)
                children.sort(key=lambda group: sum(len(key) for key in keys[slice(*group)]))  # the largest comes first
                copied = sum(float(each.weights[stop]) for each in examples[first:last])
                for begin, end in children:
                    own = None if parent < 0 else copied if (begin, end) == children[-1] else 0.0
                    todo.append(_Range(begin, end, stop, parent, own))
        tokens, weights, values = (numpy.concatenate(each) for each in zip(*nodes, strict=True))
        yield Tree(tokens, weights, values, tuple(len(each.tokens) for each in nodes), tuple(parents), tuple(leaves))


def parts(lengths: Sequence[int], parents: Sequence[int], capacity: int) -> list[Part]:
    """Divide a tree, in the order of its branches, into parts of at most `capacity` tokens. One part if it fits.

    Raises ValueError: a branch alone is longer.
    """
    if sum(lengths) <= capacity:
        return [Part(tuple(range(len(lengths))), tuple(parents), (False,) * len(lengths))]
    found, seen = list[list[int]](), set[int]()
    inner, taken, tokens = {*parents}, set[int](), 0
    for leaf in (node for node in range(len(lengths)) if node not in inner):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        if (alone := sum(lengths[node] for node in path)) > capacity:
            raise ValueError(f"expected branches of at most {capacity} tokens; one has {alone}")
        more = [node for node in path if node not in taken]
        if not found or tokens + sum(lengths[node] for node in more) > capacity:
            found.append([])
            taken, tokens, more = set(), 0, path
        found[-1] += more
        taken.update(more)
        tokens += sum(lengths[node] for node in more)
    result = []
    for nodes in map(sorted, found):
        places = {node: place for place, node in enumerate(nodes)}
        above = tuple(places.get(parents[node], -1) for node in nodes)
        result.append(Part(tuple(nodes), above, tuple(node in seen for node in nodes)))
        seen.update(nodes)
    return result


def divided(tree: Tree, capacity: int) -> list[Tree]:
    """Return a tree as trees of at most `capacity` tokens, of which one learns each token. Raises as `parts`."""
    starts = numpy.cumsum([0, *tree.lengths])
    found = []
    for nodes, parents, repeated in parts(tree.lengths, tree.parents, capacity):
        places = numpy.concatenate([numpy.arange(starts[node], starts[node + 1]) for node in nodes])
        lengths = tuple(tree.lengths[node] for node in nodes)
        weights = tree.weights[places] * ~numpy.repeat(repeated, lengths)
        found.append(Tree(tree.tokens[places], weights, tree.values[places], lengths, parents))
    return found


def following(lengths: Sequence[int], parents: Sequence[int]) -> NDArray[numpy.int64]:
    """Return the place of every token's label, int64 `[S]`; -1 for a token without one."""
    starts = numpy.cumsum([0, *lengths[:-1]])
    places = numpy.arange(1, sum(lengths) + 1)
    first_child = {parent: node for node, parent in reversed([*enumerate(parents)])}
    for node, (start, length) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        places[start + length - 1] = starts[first_child[node]] if node in first_child else -1
    return places
