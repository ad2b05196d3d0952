"""Training jobs: starting ranks, the loop, and what a run leaves behind.

`launcher.train` is the way in, `preflight` refuses before a rank starts, every rank runs `worker`, `loop` trains.
`run_folder`, `saver`, `resume`, `status` and `heartbeat` are a run's folder; `text` and `conversations` make datasets
of files; `auto` takes the mode. Whatever concerns Megatron is in `mcore`.
"""
