"""The four papers' tables and figures, as far as they can be made without a GPU, beside the papers' own numbers:
`python -m benchmarks.papers PAPER` writes `analysis/results/papers_PAPER.json` and `docs/papers/PAPER.md`."""

PAPERS = ("distflashattn", "tasp", "cp_inference", "flash_communication")
