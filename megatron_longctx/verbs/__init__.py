"""The command `megatron-longctx`: one module per verb, and `cli`, which parses the command line.

`plan`, `doctor`, `check`, `demo`, `evaluate`, `importing`, `exporting`, `submit` and `wandb_runs` are here. `train`,
`generate`, `serve`, `calibrate` and `compare` are in their own rooms. `habits` has Hydra's options.
"""
