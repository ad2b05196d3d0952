"""The typed configuration (`tree`), what each key may be (`bounds`), and its only validation (`checks`)."""

from .bounds import keys_of
from .checks import check_model, check_value, data_parallel_size, validate
from .parallelism import ParallelismConfig
from .planned import configured_mode, mode_options, planned_mask, token_unit, workload_of
from .rope_scaling import RopeScaling
from .tree import (
    CACHE_RULES,
    CUDA_GRAPHS,
    DECODES,
    DEVICES,
    MOST_TOKENS,
    PRECISIONS,
    RECOMPUTES,
    REDUCTION_TRANSPORTS,
    REDUCTIONS,
    TOKENIZERS,
    TRANSPORTS,
    WANDB_MODES,
    AttentionConfig,
    Config,
    DataConfig,
    InferenceConfig,
    LoggingConfig,
    ModelConfig,
    OptimConfig,
    RecomputeConfig,
    ReductionConfig,
    RunConfig,
    ServeConfig,
    TrainConfig,
)
