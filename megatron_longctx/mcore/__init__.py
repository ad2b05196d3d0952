"""Everything that depends on Megatron-Core, which only this wing imports: layer specs, groups, batches, checkpoints.

- `spec.with_context_parallel` puts context-parallel attention into a layer spec. All layers of a model share its
  `sequence.ShardedSequence`; `rope`, `pack` and `core_attention` support it.
- `model`, `step` and `optimizer` build and train a model from a configuration. `data` and `corpus` read and write
  Megatron's datasets. `checkpoint` and its files save at any parallel sizes and load at any others.
- `hybrid` builds a GPT as Megatron's `HybridModel`; `stack` changes the specs of such models.
- `recompute`, `head` and `row_parallel` are layers with recomputation, chunks and low-bit sums.
- `inference` gives a run's layers to the engine of the wing `inference`; `direct` runs them without autograd.
- `version` handles the differences between supported releases, `cpu` what Megatron needs without a GPU.
"""

import warnings

from ..config.extras import absent, install

if _absent := absent("megatron"):
    raise ModuleNotFoundError(
        f"{__name__}: the package {_absent[0]} is not installed. Run {install('megatron')}.", name=_absent[0]
    )

# Megatron warns on import about optional packages (`megatron-longctx doctor` lists them once), and in use about names
# that newer torch versions deprecate. Users can fix neither.
for _category, _module in ((UserWarning, r"megatron\.core"), (FutureWarning, r"megatron\.core|torch\.distributed")):
    warnings.filterwarnings("ignore", category=_category, module=_module)
