"""The policy gradient, written out token by token, and trained in trees and apart."""

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_longctx.config import TrainConfig
from megatron_longctx.mcore.corpus import check_values
from megatron_longctx.mcore.objectives import make_objective
from megatron_longctx.testing.tolerances import relative_error
from megatron_longctx.training.text import Source, prepare
from tests.shared.training import Job, recorded, tiny_config

POLICY = {"data.format": "rollouts", "data.packing": "best_fit", "train.objective": "policy_gradient"}


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("is_old", [True, False])
def test_the_policy_gradient_is_ppos(kl: float, is_old: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    losses = torch.rand(1, 40, generator=generator, dtype=torch.float64).mul(3).requires_grad_()
    old, ref = (-3 * torch.rand(1, 40, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages = torch.randn(1, 40, generator=generator, dtype=torch.float64)
    mask = torch.ones(1, 40)
    mask[0, -1], old[0, -1], ref[0, -1] = 0, -1e4, 1e4
    batch = {"loss_mask": mask, "advantages": advantages, "ref_logprobs": ref}
    if is_old:
        batch["old_logprobs"] = old
    objective = make_objective(TrainConfig(objective="policy_gradient", clip_low=0.2, clip_high=0.3, kl_coeff=kl))
    found = objective(losses, batch)
    total = 0.0
    for at in range(39):
        now, advantage = -float(losses.detach()[0, at]), float(advantages[0, at])
        ratio = math.exp(now - float(old[0, at])) if is_old else 1.0
        expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
        distance = float(ref[0, at]) - now
        expected += kl * (math.exp(distance) - distance - 1)
        assert float(found[0, at]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        total += expected
    (found * mask).sum().backward()
    assert float((found * mask).sum()) == pytest.approx(total, rel=1e-5) and bool(losses.grad.isfinite().all())
    if not is_old and not kl:
        torch.testing.assert_close(losses.grad[0, :39], advantages[0, :39], rtol=1e-5, atol=1e-6)


def test_what_the_objective_needs_is_refused_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"prompt": "abc", "responses": ["d"]}))
    prepare(Source(str(tmp_path / "corpus.jsonl")), tmp_path / "corpus", "byte-level")
    with pytest.raises(ValueError, match=r"train.objective=policy_gradient: expected rollouts with `adv.*corpus"):
        check_values(tiny_config(tmp_path, "run", POLICY))
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"prompt": "abc", "responses": [{"text": "d", "reward": 1}]}))
    prepare(Source(str(tmp_path / "corpus.jsonl")), tmp_path / "corpus", "byte-level")
    check_values(tiny_config(tmp_path, "run", POLICY))
    with pytest.raises(ValueError, match=r"train.kl_coeff=0.1: expected rollouts with `ref_logprobs` in"):
        check_values(tiny_config(tmp_path, "run", {**POLICY, "train.kl_coeff": 0.1}))
    with pytest.raises(ValueError, match=r"data.format=documents: expected rollouts with train.objective"):
        tiny_config(tmp_path, "run", {**POLICY, "data.format": "documents"})


def test_a_policy_trains_in_trees_as_on_separate_sequences(tmp_path: Path) -> None:
    """Two groups of rollouts, on two ranks. The flat dataset has a line for every response."""
    generator = torch.Generator().manual_seed(3)
    trees, flat = [], []
    for prompt in ("a shared prompt, that is long ", "another prompt "):
        responses = []
        for size, advantage in ((9, 1.5), (1, -0.5), (14, -1.0)):
            tokens = torch.randint(97, 105, (size,), generator=generator).tolist()
            old, ref = (-3 * torch.rand(2, size, generator=generator)).tolist()
            responses.append({"tokens": tokens, "advantage": advantage, "old_logprobs": old, "ref_logprobs": ref})
        trees.append({"prompt": prompt, "responses": responses})
        flat += [{"prompt": prompt, "responses": [each]} for each in responses]
    jobs = {}
    for name, lines in (("trees", trees), ("flat", flat)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        corpus = prepare(Source(str(tmp_path / f"{name}.jsonl")), tmp_path / name, "byte-level")
        settings = {**POLICY, "data.prefix": str(tmp_path / name), "data.seq_length": 256, "train.kl_coeff": 0.1,
                    "train.steps": 6, "optim.warmup_steps": 0, "parallelism.context_parallel_size": 2}  # fmt: skip
        jobs[name] = corpus.tokens, Job(tiny_config(tmp_path, name, settings), gradients_at=(0,))
    assert jobs["trees"][0] < 0.6 * jobs["flat"][0]
    found = recorded(2, {name: job for name, (_, job) in jobs.items()})
    assert found["trees"].losses == pytest.approx(found["flat"].losses, rel=1e-5, abs=1e-6)
    assert found["trees"].losses[-1] < found["trees"].losses[0]
    for name, gradient in found["trees"].gradients[0].items():
        assert relative_error(gradient, found["flat"].gradients[0][name]) < 1e-5, name
