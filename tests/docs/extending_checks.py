"""What the examples of docs/extending.md must do: run by test_extending.py on a package that has them."""

from pathlib import Path

import half_kv
import pytest
import streaming
import torch
import torch.distributed as dist

from megatron_longctx.cli.conversion import export_model, import_model
from megatron_longctx.config.cluster import load_cluster
from megatron_longctx.core.kernels import KernelRequest, auto_order, choose_kernel
from megatron_longctx.core.plans import MODES, ModeOptions, Target, Workload, build_plan, find_mode
from megatron_longctx.core.plans.mask import Mask, full
from megatron_longctx.planner.choose_mode import Problem, rank_modes
from megatron_longctx.testing.references import dense_attention, random_qkv
from megatron_longctx.testing.tolerances import relative_error
from megatron_longctx.testing.verify import verify
from megatron_longctx.training.compose import compose_config
from tests.shared.published import ours, same, tensors_of, theirs, write_model
from tests.shared.threads import Inputs, attend

LENGTH = 53


def test_the_mode_is_found_by_its_name_and_considered_by_auto() -> None:
    config = compose_config(["parallelism=cp4", "parallelism.schedule=broadcast"])
    assert find_mode(config.parallelism.schedule, 4, ModeOptions()).name == "broadcast"
    problem = Problem(4, full(4096), Target(Workload(8, 8, 64), choose_kernel("einsum", request()).takes))
    ranking = rank_modes(problem, load_cluster("h200_x8").resized(4))
    assert [each.reason for each in ranking if each.name == "broadcast"] == [""]


def test_the_kernel_has_its_place_in_auto() -> None:
    assert auto_order("cpu") == ["cpu", "reference", "einsum"]
    with pytest.raises(ValueError, match="kernel='einsum' cannot be used here: device_type='cuda'"):
        choose_kernel("einsum", request("cuda"))


@pytest.mark.parametrize("schedule", MODES)
def test_the_mask_and_the_format_in_every_mode(schedule: str) -> None:
    mask = streaming.streaming(LENGTH, 5, 9)
    seen = torch.tensor([[j <= i and (j < 5 or i - j <= 9) for j in range(LENGTH)] for i in range(LENGTH)])
    q, k, v, grad = random_qkv(LENGTH, 2, 8, 4, 6, torch.float64, e=10)
    for name in ("einsum", "reference"):
        expected = dense_attention(q, k, v, grad, seen=seen)
        found = attended(schedule, mask, Inputs(*(x.requires_grad_() for x in (q, k, v)), grad), name)
        assert found.keys() == expected.keys()
        assert all(relative_error(found[key], expected[key]) < 1e-12 for key in expected)
    with torch.no_grad():
        found = attended(schedule, mask, Inputs(*(x.detach() for x in (q, k, v)), grad), "einsum", half_kv.HalfKV)
        rounded = dense_attention(q, k.half().double(), v.half().double(), grad, seen=seen)
    assert relative_error(found["out"], rounded["out"]) < 1e-12 < relative_error(found["out"], expected["out"])


def test_the_family_comes_in_computes_the_same_and_goes_out(tmp_path: Path) -> None:
    model = write_model(tmp_path / "theirs", "gemma", torch.float32, head_dim=16, num_hidden_layers=3)
    import_model(str(tmp_path / "theirs"), [f"out={tmp_path / 'run'}"])
    prompt = list(range(5, 60))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    logits, tokens = ours(0, str(tmp_path / "run"), prompt, 20, {})
    dist.destroy_process_group()
    expected, likeliest = theirs(model, prompt, 20, len(logits))
    assert (logits - expected).norm() < 1e-4 * expected.norm() and tokens == likeliest
    export_model([f"checkpoint={tmp_path / 'run'}", f"out={tmp_path / 'back'}"])
    assert same(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "theirs"))


def request(device: str = "cpu") -> KernelRequest:
    return KernelRequest(device, torch.float64, 6, 8, 4, v_head_dim=10)


def attended(
    schedule: str, mask: Mask, inputs: Inputs, kernel: str, kv: type[half_kv.HalfKV] | None = None
) -> dict[str, torch.Tensor]:
    plan = build_plan(schedule, 4, mask, ModeOptions(inner_size=2))
    verify(plan)
    kv_format = None if kv is None else kv(6, 10, torch.float64)
    return attend(plan, inputs, 6**-0.5, lambda: choose_kernel(kernel, request()), kv=kv_format)
