"""Needles and RULER's tasks for a run's checkpoint, without a server or a network: `python -m analysis.needles RUN`.

`questions` makes prompts of exact lengths. `job` asks them on the run's ranks, and `scores` writes the answers.
"""
