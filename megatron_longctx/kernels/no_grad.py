"""Functions that autograd does not look into: whole ones, and backwards of functions."""

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


def first_order(backward: Callable[P, R]) -> Callable[P, R]:
    """For the backward of an autograd function that autograd cannot differentiate again: raises where it would have to.

    torch's `once_differentiable` raises only where the incoming gradient has a graph, so that the gradient of a plain
    sum comes without one and counts as a constant.

    Raises:
        RuntimeError: the gradients' own graph was asked for.
    """

    @functools.wraps(backward)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_grad_enabled():  # in a backward: with create_graph
            raise RuntimeError(
                f"{backward.__qualname__}: gradients of gradients are not computed. Leave create_graph=True out."
            )
        return backward(*args, **kwargs)

    return checked
