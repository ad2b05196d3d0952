"""Measurements of this and other packages, run from a clone: `python -m analysis.benchmarks NAME ... --out FILE.json`.

`python -m analysis.benchmarks --help` lists the names. Results contain their configuration, hardware, date and commit.
"""
