"""The choice of a kernel: offers, refusals and logs."""

import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_longctx.core.kernels import PROVIDERS, KernelRequest, auto_order, available, choose_kernel
from megatron_longctx.core.kernels.interface import BlockInputs, _logged
from megatron_longctx.core.kernels.interface import __name__ as LOGGER
from megatron_longctx.core.kernels.providers import fa4
from tests.core.kernels.blocks import Case


def request_for(**changes: Any) -> KernelRequest:
    fields = {"device_type": "cpu", "dtype": torch.float32, "head_dim": 64, "num_heads": 8, "num_kv_heads": 2}
    return KernelRequest(**{**fields, **changes})


def on_gpu(**changes: Any) -> KernelRequest:
    return request_for(**{"device_type": "cuda", "dtype": torch.bfloat16, "head_dim": 128, **changes})


@pytest.fixture
def pretend_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `why_not` see an H100-like CUDA device with every package; nothing runs on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(fa4, "package_problem", lambda: None)


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    package_problem, interface = fa4.package_problem, fa4._interface
    _logged.clear()
    package_problem.cache_clear()
    yield
    package_problem.cache_clear()
    interface.cache_clear()


def test_auto_tries_the_fastest_first() -> None:
    assert auto_order("cuda") == ["fa4", "cudnn", "flash", "reference"] and auto_order("cpu") == ["cpu", "reference"]
    assert all(provider.name == name for name, provider in PROVIDERS.items())


def test_auto_takes_cpu_and_logs_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER):
        kernels = [choose_kernel("auto", request_for()) for _ in range(3)]
    assert {kernel.name for kernel in kernels} == {"cpu"}
    assert [record.message for record in caplog.records] == ["attention kernel: cpu"]


def test_auto_logs_the_providers_it_skips(
    pretend_hopper: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_kernel("auto", on_gpu()).name == "fa4"
    monkeypatch.setattr(fa4, "package_problem", lambda: "the package is not installed")
    assert choose_kernel("auto", on_gpu()).name == "cudnn"
    assert (
        choose_kernel("auto", on_gpu(packed=True)).name == choose_kernel("auto", on_gpu(windows=True)).name == "flash"
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=LOGGER):
        kernel = choose_kernel("auto", on_gpu(head_dim=192))
    assert kernel.name == "flash"
    (message,) = [record.message for record in caplog.records]
    assert "not cudnn (head_dim=192 is not supported, only multiples of 8 up to 128)" in message
    assert "not fa4 (the package is not installed)" in message


@pytest.mark.parametrize("before", [False, True])
def test_compiled_kernels_are_kept_whoever_imports_the_package_first(
    before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package reads its settings when it is imported. Megatron imports it without any."""
    cute = tmp_path / "flash_attn" / "cute"
    cute.mkdir(parents=True)
    (cute / "cache_utils.py").write_text(
        "import os\nCUTE_DSL_CACHE_ENABLED = os.getenv('FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED', '0') == '1'\n"
        "CUTE_DSL_CACHE_DIR = os.getenv('FLASH_ATTENTION_CUTE_DSL_CACHE_DIR')\n"
        "def get_jit_cache(name):\n    return CUTE_DSL_CACHE_ENABLED and (CUTE_DSL_CACHE_DIR, name)\n"
    )
    body = "def _flash_attn_fwd(): ...\n_flash_attn_fwd.compile_cache = get_jit_cache('_flash_attn_fwd')\n"
    (cute / "interface.py").write_text(f"from flash_attn.cute.cache_utils import get_jit_cache\n{body}")
    monkeypatch.syspath_prepend(tmp_path)
    for key in ("ENABLED", "DIR"):
        monkeypatch.setenv(f"FLASH_ATTENTION_CUTE_DSL_CACHE_{key}", "")
        monkeypatch.delenv(f"FLASH_ATTENTION_CUTE_DSL_CACHE_{key}")
    monkeypatch.setenv("XDG_CACHE_HOME", "/kept")
    with monkeypatch.context() as patched:
        for name in [name for name in sys.modules if name.startswith("flash_attn")]:
            patched.delitem(sys.modules, name)
        if before:
            assert importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd.compile_cache is False
        kept = fa4._interface()._flash_attn_fwd.compile_cache
        for name in [name for name in sys.modules if name.startswith("flash_attn")]:
            del sys.modules[name]
    assert kept == ("/kept/megatron_longctx/fa4", "_flash_attn_fwd")


def test_unknown_names_are_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"kernel='cuddn' is unknown; expected 'auto' or one of .*flash, cudnn"):
        choose_kernel("cuddn", request_for())


def test_unusable_names_are_refused_with_reason_and_remedy() -> None:
    with pytest.raises(ValueError) as error:
        choose_kernel("cudnn", request_for())
    assert "kernel='cudnn' cannot be used here: device_type='cpu' is not supported, only 'cuda'." in str(error.value)
    assert "Usable for this request: " in str(error.value)


def test_auto_refuses_unknown_devices_and_dtypes() -> None:
    with pytest.raises(ValueError, match=r"device_type='tpu'; expected 'cpu' or 'cuda'"):
        choose_kernel("auto", request_for(device_type="tpu"))
    with pytest.raises(ValueError, match=r"cpu \(dtype=torch.int32 is not supported"):
        choose_kernel("auto", request_for(dtype=torch.int32))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_cuda_requests_name_the_missing_device() -> None:
    reasons = dict(available(on_gpu()))
    assert all("torch sees no CUDA device" in (reasons[name] or "") for name in auto_order("cuda"))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("fa4", {"deterministic": True, "windows": True, "packed": True}, None),
        ("fa4", {"head_dim": 192, "v_head_dim": 128}, None),
        ("fa4", {"head_dim": 288}, "head_dim=288, v_head_dim=288 are not supported, only up to 256"),
        ("fa4", {"head_dim": 72}, "only multiples of 32"),
        ("fa4", {"head_dim": 64, "v_head_dim": 128}, "only values that are no wider than keys"),
        ("fa4", {"dtype": torch.float32}, "only torch.bfloat16, torch.float16"),
        ("cudnn", {}, None),
        ("cudnn", {"dtype": torch.float32}, "only torch.bfloat16, torch.float16"),
        ("cudnn", {"head_dim": 100}, "multiples of 8 up to 128"),
        ("cudnn", {"v_head_dim": 64}, "v_head_dim=64 is not supported"),
        ("cudnn", {"windows": True}, "windows are not supported"),
        ("cudnn", {"packed": True}, "documents and prompts are not supported"),
        ("cudnn", {"deterministic": True}, "no deterministic mode"),
        ("flash", {"head_dim": 256, "deterministic": True, "windows": True, "packed": True}, None),
        ("flash", {"head_dim": 264}, "multiples of 8 up to 256"),
        ("flash", {"dtype": torch.float64}, "only torch.bfloat16, torch.float16"),
        ("reference", {"dtype": torch.float64, "deterministic": True, "head_dim": 7, "v_head_dim": 5}, None),
        ("cpu", {}, "only 'cpu'"),
    ],
)
def test_gpu_limits(pretend_hopper: None, name: str, changes: dict[str, Any], reason: str | None) -> None:
    if reason is None:
        assert choose_kernel(name, on_gpu(**changes)).name == name
    else:
        with pytest.raises(ValueError, match=reason):
            choose_kernel(name, on_gpu(**changes))


def test_older_hardware_and_software_are_refused(pretend_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not(name: str, **changes: Any) -> str:
        return PROVIDERS[name]().why_not(on_gpu(**changes)) or ""

    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 8907)
    assert "cuDNN version 8907" in why_not("cudnn")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert "compute capability 7.5 is not supported" in why_not("flash")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    assert "only 9.0 and later" in why_not("fa4")
    assert "no backward on compute capability 8.6" in why_not("flash", head_dim=200)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert "only up to 128, (192, 128) and (256, 256)" in why_not("fa4", head_dim=192)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert all("ROCm" in why_not(name) for name in ("fa4", "cudnn", "flash"))


def test_cudnn_leaves_single_queries_and_keys_to_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def take(name: str, q: Tensor) -> tuple[Tensor, Tensor]:
        taken.append(name)
        return q, q[..., :1]

    monkeypatch.setattr(PROVIDERS["flash"], "_forward", lambda _, inputs: take("flash", inputs.q))
    aten = "_scaled_dot_product_cudnn_attention"
    monkeypatch.setattr(torch.ops.aten, aten, lambda q, *_, **__: take("cudnn", q), raising=False)
    kernel = PROVIDERS["cudnn"]()
    for queries, keys in ((1, 4096), (4096, 1), (2, 2)):
        of = (torch.empty(n, 1, 8, 64, device="meta") for n in (queries, keys, keys))
        kernel._forward(BlockInputs(*of, Case(queries, keys, 1, 8, 8, 64, False).call, 1.0))
    assert taken == ["flash", "flash", "cudnn"]


def test_other_releases_of_flash_attn_4_and_broken_ones_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "4.0.0")
    assert f"flash-attn-4 4.0.0 is not supported, only {fa4.VERSION}" in (fa4.package_problem() or "")
    fa4.package_problem.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda _: fa4.VERSION)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    assert "cannot be imported" in (fa4.package_problem() or "")
    fa4.package_problem.cache_clear()

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert f"({fa4.VERSION}) is not installed" in (fa4.package_problem() or "")
