"""Which rank holds which token. Pure functions over integers; nothing here knows a process group or a device.

`build_layout("zigzag", n, length)` returns a `Layout`; to add one, write a function in `layouts.py` that returns the
spans of every rank and enter it in `LAYOUTS`.
"""

from .balanced import balanced
from .layout import Layout
from .layouts import LAYOUTS, build_layout, contiguous, per_document, striped, zigzag
