"""Training jobs: starting ranks, the loop, and the run's folder.

`launcher.train` is the entry point, `preflight` checks a run before ranks start, and `loop` trains on every rank.
`run_folder` and `heartbeat` manage a run's folder, `monitoring` what the loop measures and saves, and `metrics` where
figures go. `comparison` compares runs, `text` writes datasets, `auto` chooses the mode, and `calibration` measures what
it chooses by. Everything that depends on Megatron is in `mcore`.
"""
