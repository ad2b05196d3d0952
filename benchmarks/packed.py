"""The benchmark of attention on packs of documents: this package's modes beside TransformerEngine THD and
ring-flash-attn on the same packs."""

from __future__ import annotations

import argparse

from . import attention
from .packs import packs

MASKS = ",".join([*(f"pack={name}" for name in packs()), "window=4096"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `attention`, with other defaults."""
    attention.add_arguments(parser)
    parser.set_defaults(masks=MASKS, lengths="65536", heads="32:8", peers=True)


run = attention.run
