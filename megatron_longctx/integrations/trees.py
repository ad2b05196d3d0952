"""Batches whose rows begin alike, such as rollouts of one prompt, as one pack of trees, and values back in rows.

    tree = to_tree(input_ids, attention_mask, prompt_lengths=…, groups=…)
    logits = model(**shard({"input_ids": tree.tokens}, tree.documents, parents=tree.parents)).logits
    logprobs = tree.to_rows(logits.log_softmax(-1).gather(-1, tree.labels[..., None])[..., 0])  # [n, L]

The loss stays as it is, a function of rows `[n, L]`. Nothing here depends on a framework: torch and numpy are enough.
"""

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from ..core.errors import refuse
from ..core.plans.mask import documents as mask_of
from ..models.trees import Example, merged


class TreeBatch(NamedTuple):
    """A batch of n rows of L tokens as a pack of S tokens, on the device of the batch.

    tokens, position_ids: int64 `[1, S]`. A token's position counts from the beginning of its row.
    labels: int64 `[1, S]`: the token that each one predicts; 0 where there is none.
    loss_mask: fp32 `[1, S]`: the label's weight, the sum over the rows that have it.
    documents, parents: the pack's nodes, as `shard`, `Mask.packed` and `ShardedSequence.pack` take them.
    places: int64 `[n, L]`: the place in the pack of the token that predicts each token of the rows; -1 for padding and
        for the first token of a row, which nothing predicts.
    """

    tokens: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    documents: tuple[int, ...]
    parents: tuple[int, ...]
    places: Tensor

    def to_rows(self, values: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Return values of the pack's labels, such as log-probabilities, as rows. Differentiable.

        Args:
            values: `[1, S]` or `[S]`.
            tokens: int64 `[s]`, with context parallelism: this rank's tokens, as `attention.tokens(mask)` returns them.
                Values are then those of these tokens, `[1, s]` or `[s]`. The sum of the result over ranks has all.

        Returns:
            `[n, L]`: at each token the value for its prediction, and 0 where `places` is -1 or another rank's.

        Raises:
            ValueError: another number of values.
        """
        flat, index = values.flatten(), self.places
        expected = self.tokens.numel() if tokens is None else len(tokens)
        if flat.numel() != expected:
            remedy = "Give this rank's tokens with its values." if tokens is None else "Give the values of `tokens`."
            raise refuse("values", f"a tensor {list(values.shape)}", f"{expected} numbers", remedy)
        if tokens is not None:
            local = index.new_full((self.tokens.numel() + 1,), -1)  # the last one is for -1
            local[tokens.to(index.device)] = torch.arange(len(tokens), device=index.device)
            index = local[index]
        return torch.cat([flat, flat.new_zeros(1)])[index]


def to_tree(
    input_ids: Tensor | Sequence[Sequence[int]],
    attention_mask: Tensor | None = None,
    *,
    prompt_lengths: Tensor | Sequence[int] | None = None,
    groups: Sequence[Hashable] | None = None,
    loss_mask: Tensor | None = None,
    multiple: int = 1,
) -> TreeBatch:
    """Return a batch as a pack of trees, in which tokens that rows have in common from their beginning are stored once.

    Where rows part, each begins with its own copy of the last common token. So the first token of every response is
    predicted from a copy of the prompt's last token, and responses share only tokens with which they begin alike.

    Args:
        input_ids: int64 `[n, L]`, or n lists of token ids; L is then the length of the longest.
        attention_mask: `[n, L]`, 0 for padding before and after a row's tokens. None: there is none.
        prompt_lengths: `[n]`: the tokens of each prompt, without padding.
        groups: for each row, a value that is equal for rows with the same prompt, such as verl's `uid`. The prompts of
            a group are then compared. Without it, equal beginnings are found anyway.
        loss_mask: `[n, L]`, the weight of each token. None: 1 after the prompt, or after the first token.
        multiple: the pack's length is divisible by it, through padding without loss, as sequence parallelism needs.

    Raises:
        ValueError: rows without tokens or with padding inside, prompts longer than their row, or a group with different
            prompts; the message names the rows.
    """
    ids, present = _rows(input_ids, attention_mask)
    n, length = ids.shape
    if multiple < 1:
        raise refuse("multiple", multiple, "1 or more", "Correct it.")
    starts, counts = _spans(present)
    rows = [row[start : start + count] for row, start, count in zip(ids.cpu(), starts, counts, strict=True)]
    prompts = _checked([1] * n if prompt_lengths is None else [int(each) for each in prompt_lengths], counts)
    if groups is not None:
        _check_groups(groups, [row[:prompt] for row, prompt in zip(rows, prompts, strict=True)], prompt_lengths)
    tokens, documents, parents, paths = _merged(rows, multiple)

    device = ids.device
    places = torch.full((n, length), -1)
    for row, (start, path) in enumerate(zip(starts, paths, strict=True)):
        places[row, start + 1 : start + len(path)] = path[:-1]
    places = places.to(device)
    predicted = places >= 0
    if loss_mask is None:
        after = torch.tensor([start + prompt for start, prompt in zip(starts, prompts, strict=True)], device=device)
        loss_mask = torch.arange(length, device=device) >= after[:, None]
    elif loss_mask.shape != ids.shape:
        raise refuse("loss_mask", f"a tensor {list(loss_mask.shape)}", f"{[n, length]}, as input_ids", "Correct it.")
    labels = torch.zeros(len(tokens), dtype=torch.int64, device=device)
    labels[places[predicted]] = ids[predicted]
    weights = torch.zeros(len(tokens), device=device)
    weights.index_add_(0, places[predicted], loss_mask[predicted].to(weights))
    nodes = mask_of(documents, parents=parents).documents
    positions = torch.cat([torch.arange(node.stop - node.start) + node.position for node in nodes])
    tokens, positions = tokens.to(device)[None], positions.to(device)[None]
    return TreeBatch(tokens, positions, labels[None], weights[None], documents, parents, places)


def _rows(input_ids: Tensor | Sequence[Sequence[int]], attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return token ids and whether each is one, `[n, L]`."""
    if not isinstance(input_ids, Tensor):
        if attention_mask is not None:
            raise refuse("attention_mask", "given", "none with lists, which have no padding", "Leave it out.")
        lists = [torch.as_tensor(row) if len(row) else torch.empty(0, dtype=torch.int64) for row in input_ids]
        for number, each in enumerate(lists):
            if each.is_floating_point():
                raise refuse(f"input_ids[{number}]", each.dtype, "integers", "Give token ids.")
        input_ids = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True) if lists else torch.empty(0, 0).long()
        attention_mask = torch.arange(input_ids.shape[1]) < torch.tensor([[len(row)] for row in lists])
    if input_ids.ndim != 2 or not len(input_ids) or input_ids.is_floating_point():
        shape = f"{input_ids.dtype} {list(input_ids.shape)}"
        raise refuse("input_ids", shape, "integers [n, L] with a row or more", "Give a batch of token ids.")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        expected = f"{list(input_ids.shape)}, as input_ids"
        raise refuse("attention_mask", f"a tensor {list(attention_mask.shape)}", expected, "Correct it.")
    return input_ids.long(), attention_mask.to(input_ids.device) != 0


def _spans(present: Tensor) -> tuple[list[int], list[int]]:
    """Return the first token and the number of tokens of each row."""
    counts, starts = present.sum(1), present.int().argmax(1)
    at = torch.arange(present.shape[1], device=present.device)
    inside = (at >= starts[:, None]) & (at < (starts + counts)[:, None])
    for row in ((counts == 0) | (inside != present).any(1)).nonzero().flatten().tolist():
        found = "padding between tokens" if int(counts[row]) else "no tokens"
        expected = "tokens one after the other, with padding before and after them alone"
        raise refuse(f"attention_mask[{row}]", found, expected, "Leave the row out, or close the gap.")
    return starts.tolist(), counts.tolist()


def _checked(prompts: list[int], counts: Sequence[int]) -> list[int]:
    """Return the tokens of each row's prompt, and refuse more than the row has."""
    if len(prompts) != len(counts):
        raise refuse("prompt_lengths", f"{len(prompts)} numbers", f"{len(counts)}, one for each row", "Correct it.")
    for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        if not 1 <= prompt <= count:
            remedy = "Count a prompt's tokens without padding."
            raise refuse(f"prompt_lengths[{row}]", prompt, f"1 to {count}, the tokens of row {row}", remedy)
    return prompts


def _check_groups(groups: Sequence[Hashable], prompts: Sequence[Tensor], given: object) -> None:
    """Refuse prompts that are declared equal and are not."""
    if given is None:
        raise refuse("prompt_lengths", None, "the tokens of each prompt, with groups", "Give both, or neither.")
    if len(groups) != len(prompts):
        raise refuse("groups", f"{len(groups)} values", f"{len(prompts)}, one for each row", "Correct it.")
    first: dict[Hashable, int] = {}
    for row, (group, prompt) in enumerate(zip(groups, prompts, strict=True)):
        group = group.item() if isinstance(group, Tensor) else group  # tensors are equal only to themselves
        other = first.setdefault(group, row)
        expected = f"a group in which prompts are equal; row {row} has "
        if len(prompt) != len(prompts[other]):
            expected += f"{len(prompt)} tokens, and row {other} {len(prompts[other])}"
        elif (different := (prompt != prompts[other]).nonzero().flatten()).numel():
            at = int(different[0])
            expected += f"{int(prompt[at])} as token {at} of its prompt, and row {other} {int(prompts[other][at])}"
        else:
            continue
        raise refuse(f"groups[{row}]", group, expected, "Give them different groups, or correct prompt_lengths.")


def _merged(rows: Sequence[Tensor], multiple: int) -> tuple[Tensor, tuple[int, ...], tuple[int, ...], list[Tensor]]:
    """Return the pack's tokens, the lengths and parents of its nodes, and for each row the places of its tokens."""
    none = numpy.zeros(max(map(len, rows)), numpy.float32)
    trees = merged([Example(row.numpy(), none[: len(row)], none[: len(row), None][:, :0]) for row in rows])
    lengths, parents = list[int](), list[int]()
    leaves = {}
    for tree in trees:
        leaves.update({row: len(lengths) + node for row, node in tree.leaves})
        parents += [len(lengths) + parent if parent >= 0 else -1 for parent in tree.parents]
        lengths += tree.lengths
    starts = [0, *accumulate(lengths)]
    paths = []
    for number, row in enumerate(rows):
        node, parts = leaves[number], []
        while node >= 0:
            parts.append(torch.arange(starts[node], starts[node + 1]))
            node = parents[node]
        paths.append(torch.cat(parts[::-1])[: len(row)])
    tokens = torch.cat([torch.from_numpy(tree.tokens) for tree in trees])
    if padding := -len(tokens) % multiple:
        tokens = torch.cat([tokens, tokens.new_zeros(padding)])
        lengths, parents = [*lengths, padding], [*parents, -1]
    return tokens, tuple(lengths), tuple(parents), paths
