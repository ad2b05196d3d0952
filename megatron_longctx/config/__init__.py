"""The typed configuration: every key is a field in `tree`, with what it may be from `bounds`.

`checks.validate` is its only validation: it runs once, before any rank starts, and refuses with value, expectation and
remedy. `planned` says what a configuration means for plans (the mode, the mask, the workload). Composition from recipes
is in `compose`, the jobs of a sweep are in `sweep`.
"""

from .bounds import keys_of
from .checks import check_model, check_value, data_parallel_size, validate
from .experts import layer_list
from .latent import LatentKeys
from .logging import LoggingConfig
from .parallelism import ParallelismConfig
from .planned import configured_mode, layout_of, mode_options, planned_mask, ranks_summed, token_unit, workload_of
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
    AttentionConfig,
    Config,
    DataConfig,
    InferenceConfig,
    ModelConfig,
    OptimConfig,
    RecomputeConfig,
    ReductionConfig,
    RunConfig,
    ServeConfig,
    TrainConfig,
)
