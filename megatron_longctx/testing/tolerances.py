"""When a result is accurate enough.

The rule: its error against an fp64 reference is at most twice the error of the single-device kernel of the same
precision against the same reference. Errors are Frobenius norms of the difference.

dq may also have the error that rounding the lse of blocks, in fp32, causes (`lse_rounding`). A kernel that sees all
keys has one sum of exponentials for forward and backward: with any error, the gradients of a row's scores add up to
0, and the common part of all keys cancels in dq. Blocks are weighted by their lse, each with an error of up to half an
eps of its value (6e-5 if all logits are near 1,000), and the common part cancels only to that precision. out, dk and dv
keep the rule.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

_SLACK = 2.0
_VANISHING = 1e-9  # a reference with a smaller norm is zero but for rounding, so no error is relative to it
_VANISHING_RESULT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def error(result: Tensor, truth: Tensor) -> float:
    """Return the Frobenius norm of the difference, in fp64."""
    return float((result.to(truth.device, torch.float64) - truth.double()).norm())


def relative_error(result: Tensor, truth: Tensor) -> float:
    """Return `error` as a share of the truth's norm, or `error` itself if the truth vanishes."""
    size = float(truth.double().norm())
    return error(result, truth) / (size if size > _VANISHING else 1.0)


def lse_rounding(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, causal: bool) -> dict[str, float]:
    """Return the errors that rounding lse may add to the rule, keyed by the result's name.

    The error of dq is half an eps (fp32) of each query's lse, times the absolute terms of its gradient. All tensors are
    `[S, b, h, d]`, and the scale is `d ** -0.5`.
    """
    q, k, v, grad_out = (x.double().permute(1, 2, 0, 3) for x in (q, k, v, grad_out))
    scale = q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    if causal:
        scores.masked_fill_(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    probs, grad_probs = (scores - lse).exp(), grad_out @ v.mT
    off = torch.finfo(torch.float32).eps / 2 * lse.abs() * probs
    mean, size = ((probs * x).sum(-1, keepdim=True) for x in (grad_probs, grad_probs.abs()))
    return {"dq": float((off * ((grad_probs - mean).abs() + size) @ k.abs() * scale).norm())}


def assert_as_good_as(
    results: Mapping[str, Tensor],
    single_device: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    case: object = "",
    extra: Mapping[str, float] | None = None,
) -> None:
    """Check all results by the rule.

    Any kernel may round the truth to the result's dtype, so an error of that size is always allowed.

    Args:
        single_device: results of the single-device kernel in the same precision.
        truth: the reference, in fp64 (or a precision far above that of the results).
        case: shown in messages.
        extra: errors that are allowed beyond the rule, keyed by the result's name.

    Raises:
        AssertionError: another shape or dtype, a value that is not finite, or too large an error.
    """
    for name, expected in truth.items():
        result, own = results[name], single_device[name]
        assert result.shape == expected.shape, f"{case}: {name} {tuple(result.shape)}, not {tuple(expected.shape)}"
        assert result.dtype == own.dtype, f"{case}: {name} is {result.dtype}, not {own.dtype}"
        if not result.numel():
            continue
        assert torch.isfinite(result).all(), f"{case}: {name} is not finite"
        if float(expected.double().norm()) <= _VANISHING:
            assert float(result.double().abs().max()) <= _VANISHING_RESULT[result.dtype], f"{case}: {name} is not zero"
            continue
        rounding = error(expected.to(result.dtype), expected)
        allowed = _SLACK * max(error(own, expected), rounding) + (extra or {}).get(name, 0.0)
        assert error(result, expected) <= allowed, (
            f"{case}: {name} is {error(result, expected):.3g} off, at most {allowed:.3g} is allowed "
            f"(norm {float(expected.double().norm()):.3g})"
        )
