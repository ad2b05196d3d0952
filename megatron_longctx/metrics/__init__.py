"""What a run reports: FLOP formulas, hardware peaks, time left, and where the numbers go (console, JSONL, W&B).

Needs only `names` and `config`, so that any later room may use it.
"""
