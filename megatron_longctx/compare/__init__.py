"""Runs side by side: tables, a picture, and a dashboard that is one HTML file.

`runs` reads run folders, whatever wrote them; `command` is the verb `compare`; `dashboard` fills a page that opens
without a server or a network; `wandb_views` makes a workspace and a report of W&B of the same figures.
"""

from .command import compare

__all__ = ["compare"]
