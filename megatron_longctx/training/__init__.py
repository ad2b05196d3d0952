"""Training jobs: starting ranks, the loop, and the run's folder.

`launcher.train` is the entry point, `preflight` checks a run before ranks start, every rank runs `worker`, and `loop`
trains. `run_folder`, `saver` and `heartbeat` manage a run's folder, and `monitoring` what the loop measures. `text`
writes datasets, and `auto` chooses the mode. Everything that depends on Megatron is in `mcore`.
"""
