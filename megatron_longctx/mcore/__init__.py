"""Everything that touches Megatron-Core: layer specs, groups, batches, optimizer and checkpoints. Its only importer."""

import warnings

# Megatron warns at import of optional packages it would rather have (`megatron-longctx doctor` says it once, in full),
# and in use of names that newer torch versions deprecate. Neither is a user's to mend.
for _category, _module in ((UserWarning, r"megatron\.core"), (FutureWarning, r"megatron\.core|torch\.distributed")):
    warnings.filterwarnings("ignore", category=_category, module=_module)
