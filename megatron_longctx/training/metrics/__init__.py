"""Metrics of runs: where they are written, by which of them runs are compared, and where a step's time goes."""
