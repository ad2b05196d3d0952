"""What a run reports: FLOP formulas, hardware peaks, time left, and where the numbers go (console, JSONL, W&B).

`flops` and `hardware` give MFU, `environment` says what a run ran on, `facts` what tells it from others, `sinks` and
`wandb_run` write a step's numbers under the keys of `names`, `step_profile` reads where a step's time went. It needs so
few rooms that any later one may use it.
"""
