"""A pytest plugin that runs Megatron-LM's own unit tests of attention without a GPU, with its attention or with ours.

They are written for TransformerEngine's layers, which need a GPU. Here `get_gpt_layer_with_transformer_engine_spec`
returns Megatron's local layers instead, with norms that support sequence parallelism. CORE_ATTENTION=theirs keeps their
core attention, CORE_ATTENTION=ours replaces it. Neither has attention dropout. Ranks write outcomes into OUTCOMES.
"""

import functools
import inspect
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import ModuleSpec, TransformerConfig

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.integrations import cpu, megatron_lm
from megatron_longctx.mcore.core_attention import ContextParallelCoreAttention
from megatron_longctx.mcore.norms import NORMS
from megatron_longctx.mcore.sequence import ShardedSequence

OUTCOMES: dict[str, str] = {}


class _Norm:
    """The norm that the configuration names, as TransformerEngine's."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        return NORMS[config.normalization](config, hidden_size, eps)


class _OurAttention:
    """Our core attention over the group that the test made."""

    def __new__(cls, config: TransformerConfig, **settings: Any) -> Any:
        group = getattr(settings.get("pg_collection"), "cp", None) or parallel_state.get_context_parallel_group()
        sequence = _sequence(group, config.deterministic_mode)
        return ContextParallelCoreAttention(config=config, sequence=sequence, **settings)


@functools.lru_cache(maxsize=1)
def _sequence(group: Any, deterministic: bool) -> ShardedSequence:
    attention = ContextParallelAttention(group, layout="per_document", deterministic=deterministic)
    return ShardedSequence(attention)


def _layer(*args: Any, **settings: Any) -> ModuleSpec:
    """Return the spec of a local layer, for the arguments of TransformerEngine's."""
    local = gpt_layer_specs.get_gpt_layer_local_spec
    names = inspect.signature(getattr(local, "__wrapped__", local)).parameters
    layer = local(*args, **{name: value for name, value in settings.items() if name in names})
    layer = megatron_lm.with_norms(layer, _Norm)
    if os.environ["CORE_ATTENTION"] == "ours":
        layer.submodules.self_attention.submodules.core_attention = _OurAttention
    return layer


def _submodules(*args: Any, **settings: Any) -> Any:
    return _layer(*args, **settings).submodules


def _on_gloo(initialize: Any) -> Any:
    """A rank that fails leaves the others waiting, for this long."""

    def wrapper(*args: Any, **settings: Any) -> None:
        initialize(*args, **{**settings, "backend": "gloo", "timeout": timedelta(seconds=60)})

    return wrapper


def _without_dropout(initialize: Any) -> Any:
    @functools.wraps(initialize)
    def wrapper(self: TransformerConfig) -> None:
        self.attention_dropout, self.masked_softmax_fusion, self.use_cpu_initialization = 0.0, False, True
        initialize(self)

    return wrapper


def pytest_configure(config: pytest.Config) -> None:
    """Apply the replacements before any test is imported."""
    assert cpu.apply(), "needs a machine without CUDA devices"
    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = _layer
    gpt_layer_specs.get_gpt_layer_with_transformer_engine_submodules = _submodules
    dist.init_process_group = _on_gloo(dist.init_process_group)
    TransformerConfig.__post_init__ = _without_dropout(TransformerConfig.__post_init__)
    # It downloads data sets, which tests of attention do not read.
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    sys.modules[name] = SimpleNamespace(download_and_extract_asset=lambda **_: None)  # type: ignore[assignment]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the worst outcome of a test's phases."""
    if report.when == "call" or not report.passed:
        OUTCOMES.setdefault(report.nodeid, report.outcome)
        if report.failed:
            OUTCOMES[report.nodeid] = "failed"


def pytest_sessionfinish() -> None:
    """Write this rank's outcomes."""
    Path(os.environ["OUTCOMES"], f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(OUTCOMES))
