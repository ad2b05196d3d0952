"""The typed configuration: every key is a field in `tree`, with its allowed values from `bounds`.

`checks.validate` is the only validation. It runs once, before any rank starts, and reports value, expectation and
remedy. `planned` derives the mode, the mask and the workload from a configuration. `compose` composes configurations
from recipes, and `sweep` makes the jobs of a sweep.
"""

from .bounds import keys_of
from .checks import check_inference, check_model, check_value, data_parallel_size, validate
from .experts import layer_list
from .latent import LatentKeys
from .parallelism import ParallelismConfig
from .planned import configured_mode, layout_of, mode_options, planned_mask, ranks_summed, token_unit, workload_of
from .rope_scaling import RopeScaling
from .tree import (
    CACHE_RULES,
    MOST_TOKENS,
    RECOMPUTES,
    REDUCTIONS,
    TOKENIZERS,
    TRANSPORTS,
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
