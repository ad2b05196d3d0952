"""Trees of shared prefixes train as their branches do apart, each repeating its prefixes, on any parallel sizes."""

import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_longctx.core.plans import Kind, backward_plan, build_plan
from megatron_longctx.core.plans.mask import documents
from megatron_longctx.mcore import groups, optimizer
from megatron_longctx.mcore.data import TrainingBatch
from megatron_longctx.mcore.model import build_model, transformer_config
from megatron_longctx.mcore.pack import tree_of
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.mcore.step import TrainStep
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import random_qkv
from megatron_longctx.testing.verify import verify
from tests.mcore.test_packed import Sharded
from tests.shared.sequences import sequence_of
from tests.shared.training import LATENTS, tiny_config
from tests.shared.trees import path

VOCABULARY, FEW, LONG = 64, 3, 5
CPU = torch.device("cpu")
CP, TP, PP, EP = (f"parallelism.{axis}_parallel_size" for axis in ("context", "tensor", "pipeline", "expert_model"))
SCHEDULE, LAYOUT, RECOMPUTE = "parallelism.schedule", "parallelism.layout", "recompute.mode"
MODELS: dict[str, dict[str, Any]] = {
    "windows": {"model.num_layers": 4, "model.activation": "gelu", "model.window": 6, "model.window_pattern": 2,
                "model.sinks": "learnable"},
    "latents": {**LATENTS, "model.activation": "gelu"},
    "experts": {"model.num_moe_experts": 4, "model.moe_aux_loss_coeff": 0.0},
}  # fmt: skip
# The model, the number of steps and the settings.
CASES: dict[int, dict[str, tuple[str, int, dict[str, Any]]]] = {
    3: {
        "cp3": ("windows", LONG, {CP: 3}),
        "cp3 ring": ("windows", FEW, {CP: 3, SCHEDULE: "ring", LAYOUT: "striped", RECOMPUTE: "attention_output"}),
        "cp3 latents": ("latents", FEW, {CP: 3, SCHEDULE: "all_gather", RECOMPUTE: "layer"}),
    },
    4: {
        "cp4 helper": ("windows", FEW, {CP: 4, SCHEDULE: "helper", LAYOUT: "per_document"}),
        "tp2 cp2": ("windows", FEW, {TP: 2, CP: 2, RECOMPUTE: "attention_output"}),
        "tp2 cp2 latents": ("latents", FEW, {TP: 2, CP: 2, SCHEDULE: "ulysses"}),
        "pp2 cp2": ("windows", FEW, {PP: 2, CP: 2, RECOMPUTE: "attention_output+offload"}),
        "ep2 cp2 dp2": ("experts", FEW, {EP: 2, CP: 2}),
    },
    8: {"cp8": ("windows", 2, {CP: 8})},  # also a tree of one node of 9 tokens
}


class Tree(NamedTuple):
    lengths: tuple[int, ...]
    parents: tuple[int, ...]


def random_tree(seed: int, nodes: int, longest: int = 9) -> Tree:
    """Return trees of up to 6 nodes from root to leaf, with 8 tokens or more in an even number."""
    draw = random.Random(seed)
    lengths = [draw.choice((1, draw.randint(1, longest))) for _ in range(nodes)]
    tree = Tree(tuple(lengths), ())
    for number in range(nodes):
        above = [each for each in range(-1, number) if len(path(tree.parents, each)) < 6]
        tree = tree._replace(parents=(*tree.parents, draw.choice(above)))
    more = max(8 - sum(lengths), sum(lengths) % 2)
    lengths[-1] += more + (sum(lengths) + more) % 2
    return tree._replace(lengths=tuple(lengths))


# Two micro-batches a step: trees of 1 to 200 nodes, the largest only in the longest run.
NODES = (17, 2), (1, 9), (12, 3), (200, 5), (8, 60)
TREES = [[random_tree(10 * step + i, nodes) for i, nodes in enumerate(each)] for step, each in enumerate(NODES)]


def in_tree(tree: Tree) -> TrainingBatch:
    """Return a batch whose labels are the next tokens of the same node, whose last token has no loss."""
    generator, length = torch.Generator().manual_seed(sum(tree.lengths)), sum(tree.lengths)
    tokens = torch.randint(VOCABULARY, (1, length), generator=generator)
    last = torch.tensor(tree.lengths).cumsum(0) - 1
    mask = torch.rand(1, length, generator=generator).index_fill(1, last, 0)
    labels = tokens.roll(-1, 1).index_fill(1, last, 0)
    return TrainingBatch(tokens, labels, mask, tree.lengths, tree.parents)


def apart(tree: Tree) -> TrainingBatch:
    """Return the branches of a tree as documents that repeat their prefixes. A prefix counts in the first of them."""
    whole, counted = in_tree(tree), set[int]()
    pieces = {name: x.split(tree.lengths, 1) for name, x in whole.tensors.items()}
    found: dict[str, list[Tensor]] = {name: [] for name in pieces}
    lengths = []
    for leaf in sorted({*range(len(tree.lengths))} - {*tree.parents}):
        nodes = path(tree.parents, leaf)
        lengths.append(sum(tree.lengths[node] for node in nodes))
        for node in nodes:
            for name, each in pieces.items():
                again = name == "loss_mask" and node in counted
                found[name].append(torch.zeros_like(each[node]) if again else each[node])
            counted.add(node)
    return TrainingBatch(**{name: torch.cat(each, 1) for name, each in found.items()}, documents=tuple(lengths))


class Trained(NamedTuple):
    """The losses of steps, the gradients of the first one, the weights at the beginning and after each step."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: list[dict[str, Tensor]]


def _train(
    root: Path,
    model: str,
    settings: dict[str, Any],
    batches: list[list[TrainingBatch]],
    weights: dict[str, Tensor] | None,
) -> tuple[Trained, Sharded]:
    """Train with AdamW, and return this rank's part of the results."""
    config = tiny_config(root, "trees", {"data.seq_length": 64, **MODELS[model], **settings})
    collection = groups.from_config(config.parallelism, seed=9)
    megatron, sequence = transformer_config(config), build_sequence(config, collection.cp)
    gpt = build_model(config, megatron, collection, sequence, VOCABULARY)
    models = optimizer.wrap_ddp([gpt], megatron, collection, distributed=False)
    megatron.finalize_model_grads_func = finalize_model_grads
    part = Sharded(gpt, collection)
    if weights is not None:
        part.load(weights)
    step = TrainStep(models, sequence, collection, 1, 2 // collection.dp.size())
    adam = torch.optim.AdamW(gpt.parameters(), 1e-3, eps=1e-6)  # above the rounding of tiny gradients
    found = Trained([], {}, [{name: p.detach().clone() for name, p in part.parameters.items()}])
    for each in batches:
        models[0].zero_grad_buffer()
        found.losses.append(step.run(iter(each[collection.dp.rank() :: collection.dp.size()])).mean)
        for name, parameter in part.parameters.items():
            found.gradients.setdefault(name, parameter.main_grad.clone())
            parameter.grad = parameter.main_grad
        adam.step()
        adam.zero_grad()  # or backward would add to these gradients, which are Megatron's own
        found.weights.append({name: p.detach().clone() for name, p in part.parameters.items()})
    groups.destroy()
    return found, part


def _apart(rank: int, root: Path) -> None:
    for model in MODELS:
        batches = [[apart(tree) for tree in trees] for trees in TREES[: LONG if model == "windows" else FEW]]
        torch.save(tuple(_train(root, model, {}, batches, None)[0]), root / model)


def _in_trees(rank: int, root: Path, world: int) -> dict[str, tuple[float, float, float]]:
    """Return the largest relative errors of losses, of the first gradients and of the trained weights."""
    found = {}
    for name, (model, steps, settings) in CASES[world].items():
        batches = [[in_tree(tree) for tree in trees] for trees in TREES[:steps]]
        expected = Trained(*torch.load(root / model))
        own, part = _train(root, model, settings, batches, expected.weights[0])
        loss = max(abs(a / b - 1) for a, b in zip(own.losses, expected.losses, strict=False))
        gradient = max(part.error(each, x, expected.gradients[each]) for each, x in own.gradients.items())
        weight = max(part.error(each, x, expected.weights[steps][each]) for each, x in own.weights[-1].items())
        found[name] = loss, gradient, weight
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    run_distributed(_apart, 1, folder)
    return folder


@pytest.mark.parametrize("world", CASES)
def test_trees_train_as_their_branches_apart(world: int, root: Path) -> None:
    for cases in run_distributed(_in_trees, world, root, world):
        for name, (loss, gradient, weight) in cases.items():
            most = 1e-6 if CASES[world][name][1] == LONG else 2e-6  # Adam's first steps are large for tiny gradients
            assert loss < 1e-6 and gradient < 2e-6 and weight < most, (name, loss, gradient, weight)


def test_positions_follow_the_branch_and_the_layout_counts_its_pairs() -> None:
    """The root is the longest node, but its 40 children of 100 tokens have most of the work."""
    pack = sequence_of().pack([5, 3, 1, 4], parents=[-1, 0, 1, 0])
    assert pack.positions(CPU).tolist() == [*range(5), *range(5, 8), 8, *range(5, 9)]
    assert pack.max_seqlen_q == 9 and pack.mask().documents == documents([5, 3, 1, 4], parents=[-1, 0, 1, 0]).documents
    tree = sequence_of(world=4).pack([2000, *[100] * 40], parents=[-1, *[0] * 40])
    assert tree.layout.name == "balanced"
    places = tree.mask().documents
    counts, tokens = [], [tree.layout.num_tokens(rank) for rank in range(4)]
    for rank in range(4):
        sees = {
            token: each.position + token - each.start + 1 for each in places for token in range(each.start, each.stop)
        }
        counts.append(sum(sees[token] for token in tree.layout.tokens(rank)))
    assert max(counts) / min(counts) < 1.02 and max(tokens) / min(tokens) < 1.02, (counts, tokens)
    assert sum(counts) == tree.mask().pairs


@pytest.mark.parametrize("schedule", ["all_gather", "ring", "zigzag", "helper", "usp", "double_ring", "tasp"])
def test_keys_of_a_prefix_move_once_and_plans_are_proven(schedule: str) -> None:
    plan = build_plan(schedule, 8, documents([640, *[31] * 64], parents=[-1, *[0] * 64]))
    verify(plan)
    verify(backward_plan(plan), plan)
    moved = Counter((move.destination, move.block.home, slot) for step in plan.steps for move in step.moves
                    if move.block.kind is Kind.KV for slot in range(move.block.start, move.block.stop))  # fmt: skip
    assert moved and set(moved.values()) == {1}


def test_megatrons_own_parameters_may_have_parents() -> None:
    """The second document is empty, so that the third continues the first; documents are padded to 8 tokens."""
    sequence = sequence_of()
    stops, padded = torch.tensor([0, 5, 5, 8, 12]), torch.tensor([0, 8, 8, 16, 24])
    params = PackedSeqParams("thd", stops, stops, padded, padded)
    params.parents = [-1, 0, 1, 0]
    expected = [5, 3, 3, 5, 4, 4], [-1, -1, 0, -1, 0, -1]
    assert tree_of(params, params.parents) == expected
    pack = sequence.pack_of(params)
    assert (pack.documents, pack.parents) == tuple(map(tuple, expected)) and sequence.pack_of(params) is pack
    params.parents[3] = 2
    assert sequence.pack_of(params).parents == (-1, -1, 0, -1, 2, -1)
    params.parents = torch.tensor([-1, -1, -1, 2])
    assert sequence.pack_of(params).parents == (-1, -1, -1, -1, 2, -1)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([-1, 0], r"packed_seq_params\.parents=2 numbers: expected 3, one for each document of cu_seqlens_q"),
        ([-1, 1, 0], r"packed_seq_params\.parents\[1\]=1: expected -1 to 0"),
        ([-2, 0, 0], r"packed_seq_params\.parents\[0\]=-2: expected -1 to -1"),
    ],
)
def test_parents_that_are_not_earlier_documents_are_refused(parents: list[int], message: str) -> None:
    stops = torch.tensor([0, 5, 8, 12])
    params = PackedSeqParams("thd", stops, stops)
    params.parents = parents
    with pytest.raises(ValueError, match=message):
        sequence_of().pack_of(params)
    with pytest.raises(ValueError, match=r"parents"):
        sequence_of().pack([5, 3, 4], parents)


def test_a_branch_that_is_left_out_changes_nothing_elsewhere() -> None:
    sequence = sequence_of(kernel="auto")
    whole, less = sequence.pack([6, 4, 5], [-1, 0, 0]), sequence.pack([6, 5], [-1, 0])
    q, k, v, _ = random_qkv(15, 1, 2, 1, 8, torch.float64)
    kept = torch.tensor([*range(6), *range(10, 15)])
    expected = sequence.attention(q, k, v, mask=whole.mask())[kept]
    found = sequence.attention(q[kept], k[kept], v[kept], mask=less.mask())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
