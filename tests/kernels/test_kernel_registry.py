"""Choosing a kernel: what is offered, refused and logged; and the flash-attn adapter against a stand-in package."""

import importlib.metadata
import logging
import sys
import types

import pytest
import torch

from megatron_longctx.kernels import (
    AUTO_ORDER,
    PROVIDERS,
    KernelRequest,
    available,
    choose,
    flash_attn,
    merge_into,
    registry,
)
from megatron_longctx.kernels.interface import Block
from megatron_longctx.kernels.planned import planned_shapes


def request_for(**changes):
    fields = {"device_type": "cpu", "dtype": torch.float32, "head_dim": 64, "num_heads": 8, "num_kv_heads": 2}
    return KernelRequest(**{**fields, **changes})


@pytest.fixture
def pretend_hopper(monkeypatch):
    """`why_not` sees an H100-like CUDA device; nothing is run on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.fixture(autouse=True)
def fresh_state():
    registry._reported.clear()
    flash_attn.package_problem.cache_clear()
    flash_attn._interface.cache_clear()
    yield
    flash_attn.package_problem.cache_clear()
    flash_attn._interface.cache_clear()


def test_every_auto_order_names_known_providers():
    assert all(name in PROVIDERS for names in AUTO_ORDER.values() for name in names)
    assert all(provider.name == name for name, provider in PROVIDERS.items())


def test_auto_takes_cpu_and_logs_once(caplog):
    with caplog.at_level(logging.INFO, logger=registry.__name__):
        kernels = [choose("auto", request_for()) for _ in range(3)]
    assert {kernel.name for kernel in kernels} == {"cpu"}
    assert [record.message for record in caplog.records] == ["attention kernel: cpu"]


def test_auto_says_what_it_passed_over(pretend_hopper, monkeypatch, caplog):
    monkeypatch.setattr(flash_attn, "package_problem", lambda: "the package is not installed")
    with caplog.at_level(logging.INFO, logger=registry.__name__):
        kernel = choose("auto", request_for(device_type="cuda", dtype=torch.bfloat16, head_dim=192))
    assert kernel.name == "flash"
    (message,) = [record.message for record in caplog.records]
    assert "not cudnn (head_dim=192 is not supported, only multiples of 8 up to 128)" in message
    assert "not flash_attn (the package is not installed)" in message


def test_unknown_names_are_refused_with_the_list():
    with pytest.raises(ValueError, match=r"kernel='cuddn' is unknown.*'auto' or one of cudnn, flash_attn, flash, cpu"):
        choose("cuddn", request_for())


def test_unusable_names_are_refused_with_reason_and_remedy():
    with pytest.raises(ValueError) as error:
        choose("cudnn", request_for())
    assert "kernel='cudnn' cannot be used here: device_type='cpu' is not supported, only 'cuda'." in str(error.value)
    assert "Usable for this request: cpu, reference" in str(error.value)


def test_auto_refuses_unknown_devices_and_dtypes():
    with pytest.raises(ValueError, match=r"device_type='tpu'; expected 'cuda' or 'cpu'"):
        choose("auto", request_for(device_type="tpu"))
    with pytest.raises(ValueError, match=r"cpu \(dtype=torch.int32 is not supported"):
        choose("auto", request_for(dtype=torch.int32))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_cuda_requests_name_the_missing_device():
    reasons = dict(available(request_for(device_type="cuda", dtype=torch.bfloat16)))
    assert all("torch sees no CUDA device" in reasons[name] for name in ("cudnn", "flash", "flash_attn", "reference"))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("cudnn", {}, None),
        ("cudnn", {"dtype": torch.float32}, "only torch.bfloat16, torch.float16"),
        ("cudnn", {"head_dim": 100}, "multiples of 8 up to 128"),
        ("cudnn", {"head_dim": 256}, "multiples of 8 up to 128"),
        ("cudnn", {"deterministic": True}, "no deterministic mode"),
        ("flash", {"head_dim": 256}, None),
        ("flash", {"head_dim": 264}, "multiples of 8 up to 256"),
        ("flash", {"dtype": torch.float64}, "only torch.bfloat16, torch.float16"),
        ("flash", {"deterministic": True}, None),
        ("reference", {"dtype": torch.float64, "deterministic": True, "head_dim": 7}, None),
        ("cpu", {}, "only 'cpu'"),
    ],
)
def test_gpu_limits(pretend_hopper, name, changes, reason):
    request = request_for(**{"device_type": "cuda", "dtype": torch.bfloat16, "head_dim": 128, **changes})
    found = PROVIDERS[name]().why_not(request)
    if reason is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=reason):
            choose(name, request)


def test_older_hardware_and_software_are_refused(pretend_hopper, monkeypatch):
    request = request_for(device_type="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 8907)
    assert "cuDNN version 8907" in PROVIDERS["cudnn"]().why_not(request)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert "compute capability 7.5 is not supported" in PROVIDERS["flash"]().why_not(request)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    wide = request_for(device_type="cuda", dtype=torch.bfloat16, head_dim=200)
    assert "no backward on compute capability 8.6" in PROVIDERS["flash"]().why_not(wide)


def test_flash_turns_torchs_strict_switch_on_for_its_backward_alone(kernel_math, make_case, monkeypatch):
    seen = []

    def backward(grad_out, q, k, v, *_, **__):
        seen.append(
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        )
        return q, k, v

    torch.use_deterministic_algorithms(False)  # loads what looks the operator up
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", backward)
    q, k, v = (torch.ones(4, 1, 2, 8) for _ in range(3))
    block = Block(q, k, v, causal=True, scale=1.0)
    for deterministic in (False, True):
        PROVIDERS["flash"](deterministic=deterministic)._backward(block, q, q, torch.ones(4, 1, 2))
        assert not torch.are_deterministic_algorithms_enabled()
    assert seen == [(False, False), (True, False)]


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "varying", "to_flash"),
    [
        (1, 4096, False, False, True),
        (4096, 1, False, False, True),
        (328, 32_604, False, False, False),
        (328, 32_604, False, True, True),
        (32_768, 32_768, False, True, False),
        (512, 8_192, False, True, False),
        (512, 4_096, False, True, True),  # too little to be worth a call of its own
        (256, 32_768, False, True, True),  # too few queries to keep a GPU busy
        (3_277, 29_491, False, True, True),  # a shape that comes once
        (65_536, 65_536, False, True, True),
        (4_096, 4_096, True, True, False),
        (2_048, 2_048, True, True, True),
    ],
)
def test_cudnn_leaves_to_flash_what_it_does_not_plan_for(queries, keys, causal, varying, to_flash, monkeypatch):
    """32 query and 8 key/value heads of 128."""
    q, k = (torch.empty(n, 1, heads, 128, device="meta") for n, heads in ((queries, 32), (keys, 8)))
    kernel = PROVIDERS["cudnn"](varying=varying)
    block = Block(q, k, k, causal=causal, scale=1.0)
    taken = []
    monkeypatch.setattr(PROVIDERS["flash"], "_forward", lambda *_: taken.append("flash") or (q, q))
    monkeypatch.setattr(
        torch.ops.aten, "_scaled_dot_product_cudnn_attention", lambda *_, **__: taken.append("cudnn") or (q, q[..., :1])
    )
    kernel._forward(block)
    assert taken == ["flash" if to_flash else "cudnn"]


def test_planned_shapes_are_few_whatever_the_heads():
    assert len(list(planned_shapes(32, 128).all())) == 36
    for heads in (1, 2, 3, 8, 28, 64, 128):
        for head_dim in (64, 96, 128):
            shapes = planned_shapes(heads, head_dim)
            found = list(shapes.all())
            assert 1 <= len(found) <= 50
            for queries, keys, causal in found:
                assert shapes.has(queries, keys, causal) and queries * heads >= min(2**14, 128 * heads)
                assert 4 * queries * keys * heads * head_dim / (1 + causal) >= 5e10
                assert not shapes.has(queries + 1, keys, causal) and not shapes.has(queries, keys - 1, causal)


def test_only_kernels_that_plan_say_which_shapes():
    for name, provider in PROVIDERS.items():
        assert provider(varying=False).planned(32, 128) is None
        assert (provider(varying=True).planned(32, 128) is not None) == (name == "cudnn")


def test_the_kernel_of_a_varying_request_knows_it():
    for varying in (False, True):
        assert choose("cpu", request_for(device_type="cpu", varying=varying)).varying is varying


def test_requests_are_checked():
    with pytest.raises(ValueError, match="num_heads=6 is not a multiple of num_kv_heads=4"):
        request_for(num_heads=6, num_kv_heads=4)
    with pytest.raises(ValueError, match="head_dim=0 is not a positive number"):
        request_for(head_dim=0)


@pytest.mark.parametrize("version", ["2.6.3", "2.9.0", "3.0.0b1", "odd"])
def test_other_releases_of_flash_attn_are_refused(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    assert f"flash-attn {version} is not supported, only >=2.7,<2.9" in flash_attn.package_problem()


def test_a_broken_flash_attn_is_a_reason_and_no_crash(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.8.3")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)
    assert "cannot be imported" in flash_attn.package_problem()


@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attn_adapter_speaks_the_packages_signatures(kernel_math, make_case, monkeypatch, deterministic):
    """The stand-in has the parameter lists of flash-attn 2.7.0.post2 to 2.8.3.post2, and computes by `cpu`."""
    cpu, seen = PROVIDERS["cpu"](), []

    def forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out, lse = cpu.forward(q, k, v, causal=causal, scale=softmax_scale)
        return out.transpose(0, 1), lse.permute(1, 2, 0).contiguous(), None, None

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
        assert softmax_lse.is_contiguous() and softmax_lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        seen.append(deterministic)
        dout, q, k, v, out = (x.transpose(0, 1) for x in (dout, q, k, v, out))
        grads = cpu.backward(dout, q, k, v, out, softmax_lse.permute(2, 0, 1), causal=causal, scale=softmax_scale)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad.transpose(0, 1))

    stand_in = types.SimpleNamespace(_flash_attn_forward=forward, _flash_attn_backward=backward)
    monkeypatch.setattr(flash_attn, "_interface", lambda: stand_in)
    for case in (make_case(12, 12, 2, 4, 2, 8, True), make_case(12, 30, 2, 4, 2, 8, False)):
        tensors = kernel_math.tensors(case, torch.float32)
        found = kernel_math.run(PROVIDERS["flash_attn"](deterministic=deterministic), *tensors, case)
        kernel_math.check(found, kernel_math.truth(*tensors, case), kernel_math.torch_own(*tensors, case))
    # Merged, the lse is stored token first: the package must still get it as contiguous (b, h, s).
    found = kernel_math.run_in_blocks(
        PROVIDERS["flash_attn"](deterministic=deterministic), merge_into, *tensors, case, [0, 11, 30]
    )
    kernel_math.check(found, kernel_math.truth(*tensors, case), kernel_math.torch_own(*tensors, case))
    assert seen == [deterministic] * 4
