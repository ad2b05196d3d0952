"""When a result is accurate enough.

The rule: its error against an fp64 reference is at most twice the error of the single-device kernel of the same
precision against the same reference. Errors are Frobenius norms of the difference.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_SLACK = 2.0
_VANISHING = 1e-9  # a reference below this size is zero but for rounding: nothing to be relative to
_VANISHING_RESULT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def error(found: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference, in fp64."""
    return float((found.to(truth.device, torch.float64) - truth.double()).norm())


def relative_error(found: Tensor, truth: Tensor) -> float:
    """`error` as a share of the truth's norm; for a truth that vanishes, the error itself."""
    size = float(truth.double().norm())
    return error(found, truth) / (size if size > _VANISHING else 1.0)


def assert_as_good_as(
    found: Mapping[str, Tensor], own: Mapping[str, Tensor], truth: Mapping[str, Tensor], case: object = ""
) -> None:
    """Check every tensor of `found` by the rule.

    Rounding the truth to the result's dtype is an error that any kernel may make, so no less is ever asked for.

    Args:
        own: what the single-device kernel found, in the same precision.
        truth: the reference, in fp64 (or a precision far above the result's).
        case: what to name in the message.

    Raises:
        AssertionError: a shape or dtype that differs, a value that is not finite, or an error above the rule's.
    """
    for name, expected in truth.items():
        result = found[name]
        assert result.shape == expected.shape, f"{case}: {name} {tuple(result.shape)}, not {tuple(expected.shape)}"
        assert result.dtype == own[name].dtype, f"{case}: {name} is {result.dtype}, not {own[name].dtype}"
        if not result.numel():
            continue
        assert torch.isfinite(result).all(), f"{case}: {name} is not finite"
        if float(expected.double().norm()) <= _VANISHING:
            assert float(result.double().abs().max()) <= _VANISHING_RESULT[result.dtype], f"{case}: {name} is not zero"
            continue
        rounding = error(expected.to(result.dtype), expected)
        allowed = _SLACK * max(error(own[name], expected), rounding)
        assert error(result, expected) <= allowed, (
            f"{case}: {name} is {error(result, expected):.3g} off, at most {allowed:.3g} is allowed "
            f"(norm {float(expected.double().norm()):.3g})"
        )
