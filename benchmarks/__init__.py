"""Measurements of this and other packages, run from a clone: `python -m benchmarks NAME ... --out FILE.json`.

`python -m benchmarks --help` lists the names. Results contain their configuration, hardware, date and commit.
"""
