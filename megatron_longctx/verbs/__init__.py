"""The command `megatron-longctx`: a module for each verb, and `cli`, which reads its words.

`plan`, `doctor`, `check`, `demo`, `evaluate`, `importing`, `exporting`, `submit` and `wandb_runs` are here; `train`,
`generate`, `serve`, `calibrate` and `compare` lie in rooms of their own. `habits` has Hydra's options.
"""
