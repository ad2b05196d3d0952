"""Comparisons of finished or running runs; they read `metrics.jsonl` and `resolved.yaml` and nothing else."""
