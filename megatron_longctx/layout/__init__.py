"""Which rank holds which token. Pure functions over integers, without process groups and devices.

`build_layout("zigzag", n, length)` returns a `Layout`. `balanced` lays out several documents and gives all ranks equal
tokens and equal causal work. To add a layout, write a function in `layouts.py` that returns the spans of every rank and
enter it in `LAYOUTS`.
"""

from .balanced import balanced
from .layout import Layout
from .layouts import LAYOUTS, build_layout, contiguous, per_document, striped, zigzag
