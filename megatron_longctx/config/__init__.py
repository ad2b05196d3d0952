"""The typed configuration: every key is a field in `tree`, `model` or `parallelism`, with allowed values from `bounds`.

`checks.validate` is the only validation. It runs once, before any rank starts, and reports value, expectation and
remedy. `planned` derives the mode, the mask, the workload and the data-parallel size from a configuration. `cluster`
describes how ranks are linked, and `tasp` is the mode that depends on it. `extras` are the optional packages.
"""

from . import tasp
from .bounds import TYPE_NAMES, has_type, keys_of
from .checks import check_dataset, check_datasets, check_inference, check_model, check_value, validate
from .model import LATENT_KEYS, MAX_TOKENS, RECURRENT_KEYS, ModelConfig, RopeScaling, layer_list
from .parallelism import (
    RECOMPUTES,
    REDUCTIONS,
    SWITCHES,
    TRANSPORTS,
    AttentionConfig,
    ParallelismConfig,
    RecomputeConfig,
    ReductionConfig,
)
from .planned import (
    cluster_of,
    configured_mode,
    configured_plan,
    data_parallel_size,
    layout_of,
    mode_options,
    names_as_keys,
    planned_mask,
    summed_node_size,
    token_unit,
    trained_length,
    workload_of,
)
from .tree import (
    TOKENIZERS,
    Config,
    DataConfig,
    InferenceConfig,
    LoggingConfig,
    OptimConfig,
    RunConfig,
    ServeConfig,
    TrainConfig,
)
