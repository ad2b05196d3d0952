"""Names that every wing uses: shape letters and metric keys.

Shape letters, which may be suffixes of tensors (e.g. `q_sbhd`):

| letter | meaning | | letter | meaning |
|---|---|---|---|---|
| `s` | local tokens of one rank | | `h` | query heads |
| `S` | global tokens of a sequence | | `g` | key/value heads |
| `b` | batch (sequences) | | `d` | head dimension |
| `n` | ranks of the context-parallel group | | `t` | local key/value tokens, if they differ from `s` |

`rank` and `world` are the position in and the size of the context-parallel group unless stated otherwise; `axis` is a
process-group axis, `dim` a tensor dimension.
"""

from typing import Final

STEP: Final = "train/step"
TOKENS: Final = "train/tokens"
LOSS: Final = "train/loss"
GRAD_NORM: Final = "train/grad_norm"
LEARNING_RATE: Final = "train/lr"
VALIDATION_LOSS: Final = "loss/validation"

STEP_S: Final = "perf/step_s"
DATA_WAIT_S: Final = "perf/data_wait_s"
SAVE_STALL_S: Final = "perf/save_stall_s"
TOKENS_PER_S: Final = "perf/tokens_per_s"
TOKENS_PER_S_PER_GPU: Final = "perf/tokens_per_s_per_gpu"
TFLOPS_PER_GPU: Final = "perf/tflops_per_gpu"
MFU_CAUSAL_PCT: Final = "perf/mfu_causal_pct"
MFU_DENSE_PCT: Final = "perf/mfu_dense_pct"
MFU_FP8_PCT: Final = "perf/mfu_fp8_pct"
IMBALANCE_DP: Final = "perf/imbalance_dp"

PEAK_ACTIVE_GIB: Final = "mem/peak_active_gib"
PEAK_RESERVED_GIB: Final = "mem/peak_reserved_gib"

IMBALANCE_PCT: Final = "cp/imbalance_pct"
MEASURED_IMBALANCE_PCT: Final = "cp/measured_imbalance_pct"
EXPOSED_COMM_S: Final = "cp/exposed_comm_s"
