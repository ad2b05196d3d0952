"""The site of these pages, by Sphinx: `make docs`. It reads the repository as it is, so links need no change."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `api` shows the docstrings of this checkout

project = html_title = "megatron-longctx"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_typehints = "none"  # signatures say them
autodoc_preserve_defaults = True
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "docs/**", "launch/*.md", "analysis/results/*.md"]
exclude_patterns = [".git", ".venv*", "build", "data", "dist", "runs"]  # not even looked into
myst_heading_anchors = 4  # GitHub's
html_theme = "furo"
html_extra_path = ["site"]
suppress_warnings = ["toc.not_included"]  # tables of results, which results.md leads to
html_show_copyright = html_use_index = html_copy_source = False
