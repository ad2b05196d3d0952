"""Measurements of this project beside others, run from a clone: `python -m benchmarks WHAT ... --out FILE.json`.

WHAT is attention, all_reduce, inference or prefill. Results carry their configuration, hardware, date and commit.
"""
