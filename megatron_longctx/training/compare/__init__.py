"""Compares runs: tables, a picture, and a dashboard in one HTML file.

`runs` reads run folders, and `report` is the verb `compare`. `views` fills a page that needs no server or network, and
makes a W&B workspace and report with the same metrics.
"""

from .report import compare

__all__ = ["compare"]
