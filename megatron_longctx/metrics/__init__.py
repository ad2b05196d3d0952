"""What a run reports: FLOP formulas, hardware peaks, remaining time, and outputs (console, JSONL, W&B).

`flops` and `hardware` give MFU. `environment` describes the hardware and software of a run, and `facts` what
distinguishes it from others. `sinks` and `wandb_run` write the metrics of a step under the keys of `names`.
`step_profile` shows where a step's time went. The room imports so few others that any later room may use it.
"""
