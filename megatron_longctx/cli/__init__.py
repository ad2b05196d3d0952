"""The command `megatron-longctx`: `cli` parses the command line and runs a verb.

The verbs `plan`, `doctor`, `check` and `demo`, `evaluate`, `import` and `export` (`conversion`), `submit` and `wandb`
are here. `train`, `generate`, `serve`, `calibrate` and `compare` are in their own packages. `hydra_options` has the
options of all verbs that compose a configuration, and the verb `keys`.

Verbs raise `ValueError` for what cannot run, `OSError` for what cannot be read or written, and `JobFailed` if a rank
failed; `cli` prints these in one line.
"""
