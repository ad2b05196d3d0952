"""Metrics of runs: FLOP formulas, peaks of GPUs, the remaining time, and outputs (console, JSONL, W&B).

`flops` computes MFU. `environment` describes the hardware and software of a run, and what distinguishes it from other
runs. `sinks` write the metrics of a step under the keys of `names`. `step_profile` shows where a step's time went. The
wing imports so few others that any later wing may use it.
"""
