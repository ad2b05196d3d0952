"""Runs side by side: tables, a picture, and a dashboard that is one HTML file."""

from .command import compare

__all__ = ["compare"]
