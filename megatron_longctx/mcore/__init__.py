"""Everything that touches Megatron-Core, and its only importer: layer specs, groups, batches, optimizer, checkpoints.

- `spec.with_context_parallel` puts our attention into a layer spec; `sequence.ShardedSequence` is what all layers of a
  model share; `rope`, `pack` and `core_attention` serve them.
- `model`, `step` and `optimizer` build and train a model as a configuration says; `data` and `corpus` read and write
  Megatron's datasets; `checkpoint` and its files save at any parallel sizes and load at any others.
- `recompute`, `head`, `tiles` and `row_parallel` are layers with our recomputation, chunks and low-bit sums.
- `inference` gives the engine of the room of that name a run's layers; `direct` issues them without autograd.
- `version` says what differs between the releases that are served, `cpu` what Megatron needs without a GPU.
"""

import warnings

# Megatron warns at import of optional packages it would rather have (`megatron-longctx doctor` says it once, in full),
# and in use of names that newer torch versions deprecate. Neither is a user's to mend.
for _category, _module in ((UserWarning, r"megatron\.core"), (FutureWarning, r"megatron\.core|torch\.distributed")):
    warnings.filterwarnings("ignore", category=_category, module=_module)
