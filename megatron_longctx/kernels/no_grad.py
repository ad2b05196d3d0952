"""`torch.no_grad` for small functions that are called often, mostly where gradients are off already."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def no_grad(function: Callable[P, R]) -> Callable[P, R]:
    """As the decorator `torch.no_grad()`, whose two switches take as long as launching an operation."""

    @functools.wraps(function)
    def without(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return without
