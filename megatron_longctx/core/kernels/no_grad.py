"""Decorators for functions that autograd does not record."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def no_grad(function: Callable[P, R]) -> Callable[P, R]:
    """Run the function under `torch.no_grad()`, whose two switches take as long as a kernel launch, only if needed."""

    @functools.wraps(function)
    def without_grad(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return without_grad


def first_order(backward: Callable[P, R]) -> Callable[P, R]:
    """Refuse, with a RuntimeError, to differentiate this backward of an autograd function again.

    torch's `once_differentiable` raises only if the incoming gradient has a graph. The gradient of a plain sum has none
    and would count as a constant.
    """

    @functools.wraps(backward)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_grad_enabled():  # in a backward: with create_graph
            raise RuntimeError(
                f"{backward.__qualname__}: gradients of gradients are not computed. Leave create_graph=True out."
            )
        return backward(*args, **kwargs)

    return checked
