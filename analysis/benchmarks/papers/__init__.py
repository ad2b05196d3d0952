"""Tables and figures of four papers, as far as they can be made without a GPU, compared with the papers' numbers.

`python -m analysis.benchmarks.papers PAPER` writes `analysis/results/papers_PAPER.json` and `docs/papers/PAPER.md`.
"""

PAPERS = ("distflashattn", "tasp", "cp_inference", "flash_communication")
