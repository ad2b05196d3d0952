"""The site of these pages, by Sphinx: `make docs`. It reads the repository as it is, so that links need no change."""

project = html_title = "megatron-longctx"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "docs/**", "launch/*.md", "analysis/results/*.md"]
exclude_patterns = [".git", ".venv*", "build", "data", "dist", "runs"]  # not even looked into
myst_heading_anchors = 4  # GitHub's
html_theme = "furo"
html_extra_path = ["site"]
suppress_warnings = ["toc.not_included"]  # tables of results, which results.md leads to
html_show_copyright = html_use_index = html_copy_source = False
