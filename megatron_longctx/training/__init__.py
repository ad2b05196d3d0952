"""Training jobs: starting ranks, the loop, and what a run leaves behind.

`launcher.train` is the way in, `worker` what every rank runs, `loop` trains. Whatever concerns Megatron is in `mcore`.
"""
