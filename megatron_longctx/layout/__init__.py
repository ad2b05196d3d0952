"""Which rank holds which token. Pure functions over integers; nothing here knows a process group or a device.

`build_layout("zigzag", n, length)` returns a `Layout`; `balanced` lays out several documents, with as many tokens and
as much causal work for all ranks. To add one, write a function in `layouts.py` that returns the spans of every rank and
enter it in `LAYOUTS`.
"""

from .balanced import balanced
from .layout import Layout
from .layouts import LAYOUTS, build_layout, contiguous, per_document, striped, zigzag
